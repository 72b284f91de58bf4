"""What every draft head is: a config, a training forward, a way to draft, and a directory it round-trips through.

Alignment, stated once. Tokens are x_0 .. x_{T-1}; the target's state at position t has read x_t.

* A row is a position t whose state is known and whose next token x_{t+1} is known too (the target just wrote it).
* Depth i (0-based) of row t predicts x_{t+2+i}. The teacher for it is the target's own distribution at position t+1+i.
* Row t is supervised at depth i when x_{t+1} .. x_{t+2+i} are all the assistant's: at serving a draft starts behind a
  token the target wrote and never runs past the end of its turn. The first token of a sequence is never the
  assistant's, so where sequences are packed into one row, no supervised row reaches into the next sequence.

A Medusa head i reads the last hidden state of t. A head of the EAGLE kind reads the feature of t and the embedding of
x_{t+1}, then its own output and the embedding of x_{t+1+i}.
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UserError, first_line
from ..target import Features, Target
from .confidence import Confidence

FORMAT = 1
Judged = TypeVar("Judged")


class TargetIdentity(BaseModel):
    """Which target a head belongs to, and the sizes it was built for."""

    name: str
    fingerprint: str
    architecture: str
    depth: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, target: Target) -> Self:
        return cls(
            name=target.name,
            fingerprint=target.fingerprint,
            architecture=type(target.model).__name__,
            depth=target.depth,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
        )


class HeadConfig(BaseModel):
    """A head directory's config.json. ``options`` are the kind's own, ``layer`` is a Llama config of its layers."""

    model_config = ConfigDict(extra="forbid")
    kind: str
    format: int = FORMAT
    target: TargetIdentity
    taps: list[int]
    depths: int
    draft_vocab_size: int
    confidence: bool = False
    options: dict[str, Any] = {}
    layer: dict[str, Any] = {}


@dataclass(frozen=True)
class Shape:
    """The form of a draft: node n (1-based; 0 is the root) hangs under ``parents[n-1]`` as its ``ranks[n-1]``-th child.

    Nodes are ordered by depth. A chain has ranks all 0. ``name`` is what reports print.
    """

    name: str
    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of every node, root included: [nodes + 1]."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @cached_property
    def length(self) -> int:
        """The depth of its deepest node."""
        return max(self.depths)

    @property
    def nodes(self) -> int:
        """How many tokens are drafted."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return all(parent == node for node, parent in enumerate(self.parents))

    @property
    def kind(self) -> str:
        return "chain" if self.is_chain else "tree"

    @property
    def paths(self) -> list[list[int]]:
        """Medusa's notation: for every node the ranks from the root down to it."""
        found: list[list[int]] = [[]]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            found.append([*found[parent], rank])
        return found[1:]

    def level(self, depth: int) -> list[int]:
        """The nodes at a depth."""
        return [node for node, d in enumerate(self.depths) if d == depth]

    @cached_property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, root included, best rank first: [nodes + 1]."""
        found: list[list[int]] = [[] for _ in self.depths]
        for node, parent in enumerate(self.parents, start=1):
            found[parent].append(node)
        return tuple(tuple(sorted(own, key=lambda node: self.ranks[node - 1])) for own in found)

    def children(self, node: int) -> tuple[int, ...]:
        """The children of a node, best rank first."""
        return self.families[node]

    @cached_property
    def bearing(self) -> tuple[tuple[int, ...], ...]:
        """For every depth but the deepest its nodes that have children: those a head must read to draft the next depth."""
        return tuple(tuple(node for node in self.level(depth) if self.families[node]) for depth in range(self.length))

    @cached_property
    def seen(self) -> np.ndarray:
        """Who sees whom: bool [nodes + 1, nodes + 1], True where the column is the row's ancestor or itself."""
        found = np.eye(len(self.depths), dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            found[node] |= found[parent]
        return found

    def cut(self, depth: int) -> "Shape":
        """The same shape without the nodes deeper than ``depth``; itself where it has none."""
        if depth >= self.length:
            return self
        kept = sum(d <= depth for d in self.depths) - 1
        return Shape(self.name, self.parents[:kept], self.ranks[:kept])


@dataclass
class Draft:
    """A token tree under the last committed token.

    ``tokens`` [nodes]: target ids. ``shape``: who hangs where. ``q`` [nodes + 1, V]: for each node (root first) the
    distribution its children were drawn from, without replacement and in rank order; None when they are simply the
    most likely ones, so that nothing about their choice is random. ``aside``: another tree under the same root, which the
    target reads in the same pass and which is never followed.
    """

    tokens: list[int]
    shape: Shape
    q: Tensor | None = None
    aside: "Draft | None" = None


@dataclass(frozen=True)
class Side:
    """A lesson beside the draft's own depths: its ``weight`` in the loss, and what it is taught with.

    ``loss`` names an objective of the recipe's (None: the recipe's own), ``whole`` says that its logits range over the
    target's whole vocabulary.
    """

    weight: float
    loss: str | None = None
    whole: bool = False


@dataclass
class Depth:
    """One depth of a training forward, read out a piece at a time: all its logits at once would not fit.

    ``rows`` [M] rising: indices into batch x time flattened, the positions t. ``states`` [M, width]: what the logits are
    read from. ``readout``: states [m, width] -> logits [m, draft vocab], each row from its own state alone. ``ahead``: the
    teacher is the target's distribution at t + ahead (depth i: 1 + i). ``extra`` [M]: what a row costs besides, weighted.
    """

    rows: Tensor
    states: Tensor
    readout: Callable[[Tensor], Tensor]
    ahead: int
    extra: Tensor | None = None
    side: Side | None = None

    @property
    def logits(self) -> Tensor:
        """All of them: [M, draft vocab]."""
        return self.readout(self.states)


@dataclass
class Guess:
    """What a head says of the tokens below n nodes: ``logits`` [n, draft vocab], read from ``states`` [n, width]."""

    logits: Tensor
    states: Tensor

    def rows(self, index: slice) -> "Guess":
        return Guess(self.logits[index], self.states[index])

    def repeated(self, row: int, nodes: list[int]) -> "Guess":
        """What one row says, for every one of ``nodes``: where the tokens before them do not matter."""
        return Guess(self.logits[row].expand(len(nodes), -1), self.states[row].expand(len(nodes), -1))


@dataclass
class Ask:
    """What ``DraftHead.deepen`` is asked: to read the drafted ``tokens`` [n] of ``nodes``, all of one depth of ``shape``."""

    nodes: list[int]
    tokens: Tensor
    shape: Shape


def supervised(mask: Tensor, depths: int) -> list[Tensor]:
    """For each depth the bool map [batch, time] of supervised rows, as above; ``mask`` marks x_t as the assistant's."""
    time = mask.shape[1]
    shifted = [torch.nn.functional.pad(mask[:, k:], (0, min(k, time))) for k in range(1, depths + 2)]
    run, maps = shifted[0], []
    for following in shifted[1:]:
        run = run & following
        maps.append(run)
    return maps


def counted(ids: Tensor, positions: Tensor | None) -> Tensor:
    """The positions [batch, time], counted from every line's first column where there are none."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if positions is None else positions


def marked(rows: Tensor) -> Tensor:
    """The rows [M] that a map [batch, time] marks, rising: indices into batch x time flattened."""
    return rows.flatten().nonzero().squeeze(1)


def scores(ids: Tensor, mask: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for every position of ``mask``, 1 elsewhere [batch, time]: for kinds that teach a sample of rows.

    A line's numbers follow from the seed and its own masked tokens alone, not from its neighbours, its padding or the
    process that holds it.
    """
    found = torch.ones(mask.shape)
    for line, (own, where) in enumerate(zip(ids.cpu(), mask.cpu(), strict=True)):
        generator = torch.Generator().manual_seed(zlib.crc32(own[where].numpy().tobytes(), seed & 0xFFFFFFFF))
        found[line, where] = torch.rand(int(where.sum()), generator=generator)
    return found.to(mask.device)


def falling(ids: Tensor, mask: Tensor, seed: int, depths: int, ratio: float, least: float) -> list[Tensor]:
    """A map of rows per depth: of the supervised rows, at depth d, the share ratio ** d but never less than ``least`` (COD,
    2504.18583).

    One score a row is held against every depth's share: a depth is taught only where the one before it is.
    """
    maps = supervised(mask, depths)
    drawn = scores(ids, maps[0], seed)
    return [own & (drawn < max(ratio**depth, least)) for depth, own in enumerate(maps)]


class DraftHead(nn.Module, ABC):
    """A draft head. The target's frozen tensors are read through ``target`` at call time and never registered here."""

    kind: ClassVar[str]
    Options: ClassVar[type[BaseModel]]
    target_ids: Tensor
    recomputes: bool = False  # see ``recompute``
    compiled: dict[Any, Any] | None = None  # see ``compile_stretches``

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        try:
            self.options: Any = self.Options.model_validate(config.options)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("options", *first["loc"])))
            raise UserError(f"the {self.kind} head's config has a wrong {where}: {first['msg']}.") from error
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))
        self.confidence = Confidence(self.width(config), config.depths) if config.confidence else None

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        """The taps this kind reads when the recipe names none."""
        return []

    @classmethod
    def create(
        cls,
        target: Target,
        options: BaseModel,
        taps: list[int] | None,
        depths: int,
        target_ids: Tensor,
        confidence: bool = False,
    ) -> Self:
        """A fresh head for a target. ``target_ids`` int64 [draft vocab] rising: the target's id of every draft id."""
        taps = cls.default_taps(target) if taps is None else taps
        target.check_taps(taps)
        config = HeadConfig(
            kind=cls.kind,
            target=TargetIdentity.of(target),
            taps=taps,
            depths=depths,
            draft_vocab_size=len(target_ids),
            confidence=confidence,
            options=options.model_dump(),
            layer=cls.layer_config(target, options),
        )
        head = cls(config)
        head.target_ids.copy_(target_ids)
        head.initialize(target)
        return head

    @classmethod
    def layer_config(cls, target: Target, options: Any) -> dict[str, Any]:
        """The transformer layers this kind builds, as a transformers config; empty where it has none."""
        return {}

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        """The size of the states that logits are read from."""
        return config.target.hidden_size

    @abstractmethod
    def initialize(self, target: Target) -> None:
        """Fill the fresh weights, as ``options.init`` says."""

    def taught(self, ids: Tensor, mask: Tensor, seed: int) -> list[Tensor]:
        """Which rows a training forward shall answer for: a bool map [batch, time] per depth, then one per side lesson.

        All supervised rows, unless the kind teaches a sample of them, drawn from ``seed`` by ``scores``. Never another row.
        """
        return supervised(mask, self.config.depths)

    @abstractmethod
    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """The training forward over right-padded ids [batch, time] with the target's features: one Depth per map of ``rows``.

        ``rows`` are the maps that ``taught`` gave. ``positions`` [batch, time] restart at 0 with each sequence packed into a
        row, and no sequence may see another; None: one sequence a row. Noise and dropout only while ``self.training``.
        """

    def forward(self, judge: Callable[["DraftHead", list[Depth]], Judged], *args: Any) -> Judged:
        """What ``judge`` makes of ``predict(*args)``. Logits are read out in here, where DDP and FSDP see it."""
        return judge(self, self.predict(*args))

    def recompute(self) -> None:
        """From now on keep less of the training forward for the backward pass, which computes it again.

        Raises UserError where a head trains what it cannot run a second time.
        """
        self.recomputes = True

    def compile_stretches(self) -> None:
        """From now on let torch compile the training forward, stretch by stretch: its first steps take a minute, and the others
        differ in rounding alone. Compiled for any batch and length, so that new shapes compile nothing anew.
        """
        self.compiled = {}

    def stretch(self, function: Callable[..., Judged], *args: Any) -> Judged:
        """``function(*args)``, the part of a training forward that is recomputed, and compiled, as one: it changes nothing but
        its result.
        """
        if self.compiled is not None and torch.is_grad_enabled():
            function = self.compiled.setdefault(function, torch.compile(function, dynamic=True))
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False)
        return function(*args)

    @contextmanager
    def adapted(self, target: Target) -> Iterator[None]:
        """Inside, the target is the one whose text this head's drafts keep: itself, unless the kind trains adapters on it."""
        yield

    @property
    def adapts(self) -> bool:
        """Whether this head changes its target, so that it is lossless only with respect to the adapted one."""
        return False

    def rate(self, name: str) -> float:
        """The learning rate of a parameter, as a multiple of the recipe's."""
        return 1.0

    def merged(self) -> "DraftHead":
        """This head as engines load it, adapters of its own merged into its weights; itself where it has none."""
        return self

    @property
    def deepest(self) -> int | None:
        """The deepest draft this head can write; None where it has no end."""
        return None

    @abstractmethod
    def new_state(self) -> Any:
        """An empty decode-time state for one sequence."""

    @abstractmethod
    def begin(self, state: Any, features: Features, ids: Tensor, target: Target) -> Guess:
        """Catch up with newly committed rows: their features [rows, ...], and ``ids`` [rows + 1], their own tokens and the
        one behind the last, so that row r has read ids[r] and is followed by ids[r + 1].

        Returns the guess (n = 1) of depth 0 behind the last row. One forward for all rows.
        """

    @abstractmethod
    def deepen(self, state: Any, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        """Read the drafted ``tokens`` [n] of ``nodes``, all of one depth: the guess of their children.

        ``shape`` may grow from call to call behind the nodes it has.
        """

    def begin_all(self, states: list[Any], features: list[Features], ids: list[Tensor], target: Target) -> list[Guess]:
        """``begin`` for several sequences, each with a state of its own. Kinds that can share a forward do."""
        return [self.begin(*own, target) for own in zip(states, features, ids, strict=True)]

    def deepen_all(self, states: list[Any], asks: list[Ask], target: Target) -> list[Guess]:
        """``deepen`` for several sequences, each with a state of its own. Kinds that can share a forward do."""
        pairs = zip(states, asks, strict=True)
        return [self.deepen(state, ask.nodes, ask.tokens, ask.shape, target) for state, ask in pairs]

    # -- the head's directory ----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors into an existing directory."""
        (directory / "config.json").write_text(self.config.model_dump_json(indent=2) + "\n")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the head's directory: its state, tied tensors under their first name alone."""
        first: dict[Any, str] = {}
        state = self.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def read_config(directory: str | Path) -> HeadConfig:
    """Read a head directory's config.json; UserError where it is none of ours."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} is not a head: it has no config.json; name a run's head/ directory.")
    try:
        config = HeadConfig.model_validate(json.loads(path.read_text()))
    except ValueError as error:
        raise UserError(f"{path} is not a draftsmith head's config: {first_line(error)}.") from error
    if config.format > FORMAT:
        raise UserError(f"{path} has format {config.format}, this draftsmith reads up to {FORMAT}: upgrade draftsmith.")
    return config


def read_weights(head: DraftHead, directory: str | Path) -> None:
    """Load model.safetensors strictly: every tensor named, none missing, of its shape, without NaN."""
    path = Path(directory) / "model.safetensors"
    if not path.is_file():
        raise UserError(f"{directory} has no model.safetensors: the head is not whole.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}): the head is not whole.") from error
    expected = head.tensors()
    odd = sorted(set(tensors) ^ set(expected))
    if odd:
        raise UserError(f"{path} and its config.json disagree about {odd[0]!r}: the head is not whole.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, where its config.json asks for {list(expected[name].shape)}"
            raise UserError(f"{path}: tensor {name!r} has the shape {shapes}: the head is broken.")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{path}: tensor {name!r} holds NaN or infinity: the head is broken.")
    ids = tensors["target_ids"]
    if ids[0] < 0 or ids[-1] >= head.config.target.vocab_size or (ids.diff() <= 0).any():
        raise UserError(f"{path}: target_ids do not rise within the target's vocabulary: the head is broken.")
    head.load_state_dict(tensors, strict=False)  # the names agree; those of tied tensors are written once


def check_target(config: HeadConfig, target: Target, force: bool = False) -> None:
    """Refuse a target other than the head's own, naming the difference; ``force`` allows one of the same sizes."""
    theirs = TargetIdentity.of(target)
    for size in ("hidden_size", "vocab_size", "depth"):
        ours, other = getattr(config.target, size), getattr(theirs, size)
        if ours != other:
            raise UserError(f"the head was trained on {config.target.name} with {size} {ours}, but {target.name} has {other}.")
    if config.target.fingerprint != theirs.fingerprint and not force:
        raise UserError(
            f"the head was trained on {config.target.name} (fingerprint {config.target.fingerprint}), but {target.name} has "
            f"{theirs.fingerprint}: config, tokenizer or chat template differ; --force evaluates all the same."
        )


def move_taps(taps: Sequence[int], depth: int) -> list[int]:
    """Distinct rising taps within 0..depth nearest to the wished ones (short models make the usual rule collide)."""
    found: list[int] = []
    for tap in taps:
        found.append(max(min(tap, depth), found[-1] + 1 if found else 0))
    while found and found[-1] > depth:  # pushed out at the top: close ranks downwards
        found = [min(tap, depth - (len(found) - 1 - i)) for i, tap in enumerate(found)]
    return found
