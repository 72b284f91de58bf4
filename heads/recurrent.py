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
from .layers import LlamaRotaryEmbedding, unrolled_attention

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # which layer, its q, k and v -> mixed [batch, heads, rows, dim]


def through(
    layers: Sequence[Any],
    entered: Tensor,
    residual: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention: Attention,
    asked: Sequence[int] | Tensor | None = None,
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
class Lines:
    """Rows that stand one behind the other, and where each belongs in [lines, most], counted flat: ``place`` [rows]."""

    place: Tensor
    lines: int
    most: int

    @classmethod
    def of(cls, flat: Tensor, lines: int, time: int) -> Self:
        """Of the rows ``flat`` [rows] of a batch [lines, time], rising; there is at least one."""
        line = flat // time
        sizes = torch.bincount(line, minlength=lines)
        most = int(sizes.max())
        within = torch.arange(len(flat), device=flat.device) - (sizes.cumsum(0) - sizes)[line]
        return cls(line * most + within, lines, most)

    def spread(self, x: Tensor) -> Tensor:
        """[1, heads, rows, dim] -> [lines, heads, most, dim], zeros where there is no row."""
        rows = x[0].transpose(0, 1)
        spread = rows.new_zeros(self.lines * self.most, *rows.shape[1:]).index_copy(0, self.place, rows)
        return spread.unflatten(0, (self.lines, self.most)).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse."""
        return x.transpose(1, 2).flatten(0, 1)[self.place].transpose(0, 1)[None]


class Ragged(Unrolled):
    """The attention of training-time test over the rows that matter, one behind the other, without padding.

    Step 0 enters the ``known`` rows: the ``asked`` ones, those that some depth teaches, and those that they see. Every other
    row would only be its own draft. So step 0's last layer, and all later steps, are taken by the asked rows alone. Both are
    given flat, rising: places in ``positions`` [lines, time].
    """

    def __init__(self, layers: int, positions: Tensor, known: Tensor, asked: Tensor) -> None:
        lines, time = positions.shape
        self.known, self.drafting = (Lines.of(rows, lines, time) for rows in (known, asked))
        super().__init__(layers, self.columns(positions, asked, self.drafting))
        self.all_seen = self.columns(positions, known, self.known) if layers > 1 else self.seen
        self.asked = torch.searchsorted(known, asked)  # which of the known ones they are

    def columns(self, positions: Tensor, flat: Tensor, place: Lines) -> Tensor:
        """Which of step 0's keys the rows ``flat`` see, bool [lines, 1, most, most known]. No row sees none.

        Known rows are the first ones of their line: the column of a key is its place in the line.
        """
        column = torch.arange(self.known.most, device=flat.device)
        row, own = flat % positions.shape[1], positions.flatten()[flat]
        seen = (column >= (row - own)[:, None]) & (column <= row[:, None])
        spread = seen.new_ones(place.lines * place.most, len(column)).index_copy(0, place.place, seen)
        return spread.view(place.lines, 1, place.most, len(column))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        enters = not self.keys[layer]
        rows = self.known if enters else self.drafting
        self.keys[layer].append(rows.spread(k))
        self.values[layer].append(rows.spread(v))
        asks, seen = self.drafting, self.seen
        if enters and layer < len(self.keys) - 1:
            asks, seen = self.known, self.all_seen
        elif enters:
            q = q[:, :, self.asked]
        return asks.gather(unrolled_attention(asks.spread(q), self.keys[layer], self.values[layer], seen))


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
        positions, readout = counted(ids, positions), self.readout(target)
        taught = torch.stack(rows).any(0)
        taught[0, 0] = True  # a batch that teaches nothing has its part in every parameter's gradient, too
        known, asked = marked(taught.flip(1).cumsum(1).flip(1) > 0), marked(taught)
        attention = Ragged(len(self.stack), positions, known, asked)
        last, place, after = features.last.flatten(0, 1), positions.flatten(), ids
        hidden = self.feature(Features(features.taps.flatten(0, 1)[known], last[known]))[None]
        depths = []
        for step, own in enumerate(rows):
            after = F.pad(after[:, 1:], (0, 1))  # x_{t+1+step} at index t
            here = asked if step else known
            embeds = target.embed(after.flatten()[here][None]).to(hidden.dtype)
            hidden, read, attention = self.stretch(self.unrolled, embeds, hidden, place[here][None] + step, attention)
            hidden = self.fed_back(hidden)
            flat = marked(own)
            states = read[0, torch.searchsorted(asked, flat)]
            extra = self.extra(states, last[flat + 1 + step].detach())
            depths.append(Depth(flat, states, readout, ahead=1 + step, extra=extra))
        return depths

    def unrolled(self, embeds: Tensor, hidden: Tensor, positions: Tensor, earlier: Ragged) -> tuple[Tensor, Tensor, Ragged]:
        """One step of rows [1, rows, hidden]: what ``leave`` makes of those asked for, and the attention that remembers it."""
        attention = earlier.fork()
        entered, residual = self.enter(embeds, hidden)
        out = through(self.stack, entered, residual, self.rotary(entered, positions), attention, earlier.asked)
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
