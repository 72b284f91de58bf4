"""What ties a block's later tokens to its earlier ones, on top of a backbone that drafts them all at once.

Each kind adds something of the path so far to a position's state and corrects the logits with it. In training the path is
the data's own tokens, at drafting the drafted ones on the way to a node, so that trees work as chains do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]  # the target's embedding


class InBlock(nn.Module, ABC):
    """``extra``: by how much the states are wider than the backbone's. ``base``: whether its logits correct others that
    are worth a lesson of their own."""

    extra: int = 0
    base: bool = False

    @abstractmethod
    def follow(self, hidden: Tensor, tokens: Tensor, path: Tensor | None, embed: Embed) -> tuple[Tensor, Tensor | None]:
        """One depth on: ``tokens`` [n] precede the predicted ones, ``path`` [n, ...] is what the depth before left (None at
        the first). Returns the states [n, hidden + extra] and what to hand to the next depth."""

    @abstractmethod
    def correct(self, base: Tensor, states: Tensor, depth: int) -> Tensor:
        """The logits [n, draft vocab], from the backbone's own ones and the states, row by row."""


class Independent(InBlock):
    """Nothing: every position is drafted without regard to the others (DFlash, 2602.06036)."""

    def follow(self, hidden: Tensor, tokens: Tensor, path: Tensor | None, embed: Embed) -> tuple[Tensor, Tensor | None]:
        return hidden, None

    def correct(self, base: Tensor, states: Tensor, depth: int) -> Tensor:
        return base


class Markov(InBlock):
    """A low-rank bias W2 W1[previous token] (DSpark, DeepSeek 2026); ``gated`` lets the state weigh W1's parts.

    The states are [hidden, W1[previous]], which is what DSpark's confidence head reads, too.
    """

    def __init__(self, width: int, vocab: int, draft_vocab: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.width, self.extra = width, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if gated else None
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)

    def follow(self, hidden: Tensor, tokens: Tensor, path: Tensor | None, embed: Embed) -> tuple[Tensor, Tensor | None]:
        return torch.cat([hidden, self.markov_w1(tokens)], dim=-1), None

    def correct(self, base: Tensor, states: Tensor, depth: int) -> Tensor:
        previous = states[:, self.width :]
        if self.gate_proj is not None:
            previous = previous * self.gate_proj(states).sigmoid()
        return base + self.markov_w2(previous)


class Recurrent(InBlock):
    """A GRU over the path's embeddings, and a low-rank correction from it and the state (Domino, 2605.29707).

    The first depth is left to the backbone. No biases; the gates lie in torch's order.
    """

    base = True

    def __init__(self, width: int, draft_vocab: int, rank: int, memory: int) -> None:
        super().__init__()
        self.extra = memory
        self.prefix_gru = nn.GRU(width, memory, batch_first=True, bias=False)
        out = nn.Linear(rank, draft_vocab, bias=False)
        self.embed_proj = nn.Sequential(nn.Linear(width + memory, rank, bias=False), nn.SiLU(), out)
        nn.init.zeros_(out.weight)

    def follow(self, hidden: Tensor, tokens: Tensor, path: Tensor | None, embed: Embed) -> tuple[Tensor, Tensor | None]:
        read = embed(tokens).to(hidden.dtype)[:, None]
        memory = self.prefix_gru(read, None if path is None else path[None].contiguous())[1][0]
        return torch.cat([hidden, memory], dim=-1), memory

    def correct(self, base: Tensor, states: Tensor, depth: int) -> Tensor:
        return base + self.embed_proj(states) if depth else base


class Selector(InBlock):
    """Of each position's likeliest tokens the one that goes best with the token before (DFlash 2's path selector).

    A candidate b behind a scores U(b) + <A[a] * H(state), B[b]>. The reference drops all other tokens; here they keep U,
    lowered where need be so that no other token beats the best candidate. The choice is the same, and the logits stay a
    distribution over all tokens, which objectives and trees can read.
    """

    base = True

    def __init__(self, width: int, vocab: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.width, self.extra, self.candidates = width, rank, candidates
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def follow(self, hidden: Tensor, tokens: Tensor, path: Tensor | None, embed: Embed) -> tuple[Tensor, Tensor | None]:
        return torch.cat([hidden, self.predecessor_codebook[tokens]], dim=-1), None

    def correct(self, base: Tensor, states: Tensor, depth: int) -> Tensor:
        best = base.topk(self.candidates, dim=-1)
        asked = states[:, self.width :] * self.hidden_projection(states[:, : self.width])
        scores = best.values + (self.successor_codebook[best.indices] @ asked[..., None]).squeeze(-1)
        lowered = (scores.max(-1).values - best.values[:, -1]).clamp_max(0)
        return (base + lowered[:, None]).scatter(-1, best.indices, scores)
