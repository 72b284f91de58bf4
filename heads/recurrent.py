"""Heads that draft by reading their own output: unrolled for training, cached for drafting, through the same layers.

Depth 0 of row t reads the target's feature of t and the embedding of x_{t+1}; depth i reads the head's own output of depth
i-1 and the embedding of x_{t+1+i}, at position t+i. In training all rows take a step together (training-time test,
EAGLE-3, 2503.01840); in drafting one row's steps follow the tree. Either way a row sees the features up to its own and the
states of its own draft.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..target import Features, Target
from .base import Ask, Depth, DraftHead, Guess, Shape, counted, marked
from .layers import LlamaRotaryEmbedding, causal, unrolled_attention

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # which layer, its q, k and v -> mixed [batch, heads, rows, dim]


def through(
    layers: Sequence[Any],
    entered: Tensor,
    residual: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention: Attention,
    asked: Sequence[int] | None = None,
) -> Tensor:
    """The output [batch, rows, hidden] of layers one on the other, before any final norm.

    ``layers``: a FeatureLayer or PlainLayer, then PlainLayers. ``entered`` and ``residual`` are what the first one's
    attention reads and what it adds to. ``asked``: the rows that the last layer's attention answers for; None: all.
    """
    hidden = residual
    for i, layer in enumerate(layers):
        if i > 0:
            entered, residual = layer.enter(hidden)
        mixed = attention(i, *layer.self_attn.project(entered, rotary))
        if asked is not None and i == len(layers) - 1 and len(asked) < residual.shape[1]:
            residual = residual[:, asked]
        hidden = layer.leave(residual, mixed)
    return hidden


class Unrolled:
    """The attention of training-time test, layer by layer: it remembers every layer's keys and values of all steps."""

    def __init__(self, layers: int, seen: Tensor) -> None:
        self.seen = seen
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def fork(self) -> Self:
        """One that remembers the same steps, and goes on by itself."""
        found = copy(self)
        found.keys, found.values = [[*own] for own in self.keys], [[*own] for own in self.values]
        return found

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer].append(k)
        self.values[layer].append(v)
        return unrolled_attention(q, self.keys[layer], self.values[layer], self.seen)


@dataclass
class Cache:
    """Keys and values [1, kv_heads, rows, dim] of every layer: those of the committed rows, then what this round drafted."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    committed: int = 0

    def forget_drafts(self) -> None:
        self.keys = [keys[:, :, : self.committed] for keys in self.keys]
        self.values = [values[:, :, : self.committed] for values in self.values]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values with those of more rows behind them."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=2)
            self.values[layer] = torch.cat([self.values[layer], v], dim=2)
        return self.keys[layer], self.values[layer]

    def attention(self, layers: int, seen: Tensor, asked: int) -> Attention:
        """Attention of rows behind the cache's. ``seen`` [rows, cached + rows]: who sees whom. The last of ``layers``
        answers for the last ``asked`` rows alone."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.extend(layer, k, v)
            rows = asked if layer == layers - 1 else len(seen)
            return F.scaled_dot_product_attention(
                q[:, :, -rows:], keys, values, attn_mask=seen[None, None, -rows:], enable_gqa=True
            )

        return attend

    def behind(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Who sees whom among ``rows`` new rows in a chain behind the committed ones, and their positions [1, rows]."""
        seen = torch.ones(rows, self.committed + rows, dtype=torch.bool, device=device).tril(self.committed)
        return seen, torch.arange(self.committed, self.committed + rows, device=device)[None]


@dataclass
class Rows:
    """New rows of one sequence: who sees whom among them, bool [rows, cached + rows], their positions [1, rows], and how many
    of them, the last ones, a forward is asked for."""

    cache: Cache
    seen: Tensor
    positions: Tensor
    asked: int

    def __len__(self) -> int:
        return len(self.seen)


def side_by_side(layers: int, each: Sequence[Rows]) -> tuple[Attention, list[int]]:
    """Attention of several sequences' rows, one sequence behind the other, and which of all the rows are asked for.

    Everything but the attention itself works row by row, so that sequences share it without padding.
    """
    attentions = [own.cache.attention(layers, own.seen, own.asked) for own in each]
    sizes = [len(own) for own in each]
    ends = list(accumulate(sizes))
    asked = [row for own, end in zip(each, ends, strict=True) for row in range(end - own.asked, end)]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(attentions, *(rows.split(sizes, dim=2) for rows in (q, k, v)), strict=True)
        return torch.cat([attention(layer, *part) for attention, *part in parts], dim=2)

    return attentions[0] if len(each) == 1 else attend, asked


@dataclass
class RecurrentState:
    """``hidden``: by node, what is fed back below it [1, hidden]. ``slots``: the node of every drafted row in the cache."""

    cache: Cache = field(default_factory=Cache)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)


class RecurrentHead(DraftHead):
    """What a kind says of itself: what depth 0 reads, how a step enters the layers, and what it makes of their output."""

    layer: Any  # a FeatureLayer or PlainLayer
    further: Any  # PlainLayers
    rotary: LlamaRotaryEmbedding

    @abstractmethod
    def feature(self, features: Features) -> Tensor:
        """What depth 0 reads of the target [..., hidden]."""

    @abstractmethod
    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads and what it adds to, of embeddings and features [batch, rows, hidden]."""

    @abstractmethod
    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """What is fed back and what logits are read from, both [..., hidden], of the layers' output."""

    @abstractmethod
    def readout(self, target: Target) -> Callable[[Tensor], Tensor]:
        """States [n, hidden] -> logits [n, draft vocab]."""

    def fed_back(self, hidden: Tensor) -> Tensor:
        """What the next step of the training forward reads of this one's ``leave``."""
        return hidden

    def extra(self, states: Tensor, wanted: Tensor) -> Tensor | None:
        """What rows cost beside their logits [n]: ``wanted`` [n, hidden] are the target's own next last hidden states."""
        return None

    @property
    def stack(self) -> list[Any]:
        return [self.layer, *self.further]

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """Training-time test: step i reads the head's own output of step i-1 and the embedding of x_{t+1+i}."""
        positions = counted(ids, positions)
        attention, readout = Unrolled(len(self.stack), causal(positions)), self.readout(target)
        hidden, after, last = self.feature(features), ids, features.last.flatten(0, 1)
        depths = []
        for step, own in enumerate(rows):
            after = F.pad(after[:, 1:], (0, 1))  # x_{t+1+step} at index t
            embeds = target.embed(after).to(hidden.dtype)
            hidden, read, attention = self.stretch(self.unrolled, embeds, hidden, positions + step, attention)
            hidden = self.fed_back(hidden)
            flat = marked(own)
            states = read.flatten(0, 1)[flat]
            extra = self.extra(states, last[flat + 1 + step].detach())
            depths.append(Depth(flat, states, readout, ahead=1 + step, extra=extra))
        return depths

    def unrolled(self, embeds: Tensor, hidden: Tensor, positions: Tensor, earlier: Unrolled) -> tuple[Tensor, Tensor, Unrolled]:
        """One step of all rows [batch, rows, hidden]: what ``leave`` makes of it, and the attention that remembers it."""
        attention = earlier.fork()
        entered, residual = self.enter(embeds, hidden)
        out = through(self.stack, entered, residual, self.rotary(entered, positions), attention)
        return *self.leave(out), attention

    # -- drafting ----------------------------------------------------------------------------------------------

    def new_state(self) -> RecurrentState:
        return RecurrentState()

    def begin(self, state: RecurrentState, features: Features, ids: Tensor, target: Target) -> Guess:
        return self.begin_all([state], [features], [ids], target)[0]

    def deepen(self, state: RecurrentState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        return self.deepen_all([state], [Ask(nodes, tokens, shape)], target)[0]

    def begin_all(
        self, states: list[RecurrentState], features: list[Features], ids: list[Tensor], target: Target
    ) -> list[Guess]:
        rows = []
        for state, known in zip(states, ids, strict=True):
            state.cache.forget_drafts()
            rows.append(Rows(state.cache, *state.cache.behind(len(known) - 1, known.device), asked=1))
        read = Features(*(torch.cat([getattr(own, part) for own in features]) for part in ("taps", "last")))
        hidden, guess = self._step(rows, self.feature(read), torch.cat([known[1:] for known in ids]), target)
        guesses = []
        for place, (state, own) in enumerate(zip(states, rows, strict=True)):
            state.cache.committed += len(own)
            state.hidden, state.slots = {0: hidden[place : place + 1]}, []
            guesses.append(guess.rows(slice(place, place + 1)))
        return guesses

    def deepen_all(self, states: list[RecurrentState], asks: list[Ask], target: Target) -> list[Guess]:
        rows, parents = [], []
        for state, ask in zip(states, asks, strict=True):
            committed, device = state.cache.committed, ask.tokens.device
            state.slots += ask.nodes
            seen = seen_by(ask.nodes, state.slots, ask.shape, committed, device)
            positions = torch.tensor([[committed - 1 + ask.shape.depths[node] for node in ask.nodes]], device=device)
            rows.append(Rows(state.cache, seen, positions, asked=len(ask.nodes)))
            parents += [state.hidden[ask.shape.parents[node - 1]] for node in ask.nodes]
        hidden, guess = self._step(rows, torch.cat(parents), torch.cat([ask.tokens for ask in asks]), target)
        guesses, first = [], 0
        for state, ask in zip(states, asks, strict=True):
            own = slice(first, first + len(ask.nodes))
            state.hidden |= {node: hidden[own.start + i : own.start + i + 1] for i, node in enumerate(ask.nodes)}
            guesses.append(guess.rows(own))
            first = own.stop
        return guesses

    def _step(self, each: list[Rows], hidden: Tensor, tokens: Tensor, target: Target) -> tuple[Tensor, Guess]:
        """One forward of all the sequences' rows, one behind the other, ``hidden`` [rows, hidden] before them: what is fed
        back below those that are asked for, and the guess of their children."""
        entered, residual = self.enter(target.embed(tokens).to(hidden.dtype)[None], hidden[None])
        attention, asked = side_by_side(len(self.stack), each)
        positions = torch.cat([own.positions for own in each], dim=1)
        out = through(self.stack, entered, residual, self.rotary(entered, positions), attention, asked)
        hidden, read = self.leave(out[0])
        return hidden, Guess(self.readout(target)(read), read)


def seen_by(nodes: list[int], slots: list[int], shape: Shape, committed: int, device: torch.device) -> Tensor:
    """Who sees whom, bool [nodes, committed + slots]: every node the committed rows, its ancestors and itself; ``slots`` are
    the nodes of the drafted rows behind the committed ones."""
    families = [ancestry(node, shape) for node in nodes]
    drafted = torch.tensor([[slot in family for slot in slots] for family in families], device=device)
    return F.pad(drafted, (committed, 0), value=True)


def ancestry(node: int, shape: Shape) -> set[int]:
    """A node and its ancestors, the root left out."""
    family = set()
    while node:
        family.add(node)
        node = shape.parents[node - 1]
    return family
