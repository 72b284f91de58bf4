"""Which measurements does a command ask for? Every combination of its proposers, prompts and settings is a cell."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ..errors import UserError
from ..sampling import GREEDY, Sampling
from .protocols import Protocol
from .tree import parse_or_search

SHOWN = 24  # letters of a tree that a cell's name has room for


@dataclass(frozen=True)
class Cell:
    """One measurement. ``proposer`` and ``prompts`` as they were named; ``tree`` is None for look-ups, which bring their own
    form."""

    proposer: str
    prompts: str
    tree: str | None
    sampled_drafts: bool
    temperature: float
    top_p: float
    top_k: int
    batch: int

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def name(self) -> str:
        """In the few words that a progress bar has room for."""
        proposer = "/".join(Path(self.proposer).parts[-2:])
        form = f" {self.tree[:SHOWN]}" if self.tree else ""
        top_p = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        decoding = f"temperature {self.temperature:g}{top_p}, batch {self.batch}"
        return f"{proposer}{form}, {decoding}, {Path(self.prompts).name}"


@dataclass(frozen=True)
class Grid:
    """What may differ from cell to cell, and what a protocol says besides."""

    tree: tuple[str, ...] = ("chain:5",)
    temperature: tuple[float, ...] = (0.0,)
    top_p: tuple[float, ...] = (1.0,)
    top_k: int = 0
    batch: tuple[int, ...] = (1,)
    sampled_drafts: bool = False
    max_new_tokens: int = 128
    dtype: str = "auto"
    seed: int = 0
    protocol: bool = False

    @classmethod
    def of(cls, protocol: Protocol) -> "Grid":
        return cls(
            tree=tuple(protocol.forms),
            temperature=tuple(protocol.temperature),
            top_p=(protocol.top_p,),
            top_k=protocol.top_k,
            batch=tuple(protocol.batch),
            sampled_drafts=protocol.sampled_drafts,
            max_new_tokens=protocol.max_new,
            dtype=protocol.dtype,
            seed=protocol.seed,
            protocol=True,
        )

    def __post_init__(self) -> None:
        for tree in self.tree:
            parse_or_search(tree)  # refuses what cannot be read
        for temperature, top_p in product(self.temperature, self.top_p):
            Sampling(temperature, self.top_k, top_p)  # refuses what is out of range
        if min(self.batch) < 1:
            raise UserError(f"--batch {min(self.batch)} decodes nothing: give 1 or more.")

    def cells(self, proposers: Sequence[str], heads: Collection[str], prompts: Sequence[str]) -> list[Cell]:
        """Every combination, proposers outermost.

        Those that are ``heads`` draft in every tree. The cuts change nothing about greedy decoding, which is measured once,
        and a protocol's drafts are drawn above temperature 0 alone.
        """
        found = []
        for proposer, source, tree, temperature, top_p, batch in product(
            proposers, prompts, self.tree, self.temperature, self.top_p, self.batch
        ):
            drafts = proposer in heads
            drawn = drafts and self.sampled_drafts and (temperature > 0 or not self.protocol)
            sampling = Sampling(temperature, self.top_k, top_p) if temperature else GREEDY
            found.append(
                Cell(proposer, source, tree if drafts else None, drawn, temperature, sampling.top_p, sampling.top_k, batch)
            )
        return list(dict.fromkeys(found))
