"""A target whose every distribution is known, and whether texts follow it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from draftsmith.eval import verifier
from draftsmith.heads import drafting
from draftsmith.sampling import Sampling, probabilities
from draftsmith.target import Features

VOCAB, PROMPT = 8, [3, 1]
WARM, NUCLEUS = Sampling(1.0), Sampling(0.7, top_p=0.9)


def tables(seed: int, spread: float = 1.5, vocab: int = VOCAB) -> Tensor:
    """Logits [V, V, 2, V] of the next token after two tokens at an even or odd length."""
    return torch.randn(vocab, vocab, 2, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def look_up(table: Tensor, tokens: list[int]) -> Tensor:
    return table[tokens[-2], tokens[-1], len(tokens) % 2]


@dataclass
class TableTarget:
    """What the verifier asks of a Target, answered from a table. Its cache is the list of tokens read."""

    table: Tensor = field(default_factory=lambda: tables(1))
    device: torch.device = torch.device("cpu")
    max_positions: int = 1000
    eos_ids: frozenset[int] = frozenset()

    def new_cache(self) -> list[list[int]]:
        return []

    def prefill(self, ids: Tensor, cache: list[list[int]], taps: list[int]) -> tuple[Tensor, Features]:
        cache.append(ids.tolist())
        return look_up(self.table, cache[0]), Features(torch.zeros(len(ids), 0), torch.zeros(len(ids), 1))

    def verify(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, lengths: list[int], cache: list[list[int]], taps: list[int]
    ) -> tuple[Tensor, Features]:
        assert lengths == [len(own) for own in cache]
        texts = []
        for row, own in enumerate(cache):
            read, places = tokens[row].tolist(), positions[row].tolist()
            for i, family in enumerate(seen[row].tolist()):
                path = sorted((places[j], read[j]) for j, of in enumerate(family) if of)
                filling = i and family == [i == j for j in range(len(family))]
                assert filling or [at for at, _ in path] == list(range(len(own), len(own) + len(path)))
                texts.append(own + [token for _, token in path])
            own += read
        logits = self.table[[t[-2] for t in texts], [t[-1] for t in texts], [len(t) % 2 for t in texts]]
        empty = Features(torch.zeros(*tokens.shape, 0), torch.zeros(*tokens.shape, 1))
        return logits.view(*tokens.shape, -1), empty

    @staticmethod
    def keep(cache: list[list[int]], lengths: list[int], paths: list[list[int]]) -> None:
        for own, length, path in zip(cache, lengths, paths, strict=True):
            own[length:] = [own[length + node] for node in path]

    @staticmethod
    def join(cache: list[list[int]] | None, other: list[list[int]]) -> list[list[int]]:
        return (cache or []) + other

    @staticmethod
    def select(cache: list[list[int]], rows: list[int], width: int) -> None:
        cache[:] = [cache[row] for row in rows]


def exact(target: Any, sampling: Sampling, tokens: int, prompt: Sequence[int] = PROMPT) -> Tensor:
    """The probability of every text of so many tokens, by enumeration: [V ** tokens]."""
    found = []
    for text in itertools.product(range(target.table.shape[-1]), repeat=tokens):
        chance, read = 1.0, list(prompt)
        for token in text:
            chance *= float(probabilities(look_up(target.table, read), sampling)[token])
            read.append(token)
        found.append(chance)
    return torch.tensor(found, dtype=torch.float64)


def p_value(counts: Tensor, chances: Tensor) -> float:
    """Pearson's test of counts against chances; cells that expect less than five are put together."""
    assert counts[chances == 0].sum() == 0, "a token outside top-p was emitted"
    expected = chances * counts.sum()
    rare = expected < 5
    cells = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    seen, wanted = (x[cells[1] > 0].numpy() for x in cells)
    return float(scipy.stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


def remember_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warp every row of the tables once: twenty thousand texts read the same few rows."""
    known: dict[tuple[bytes, Sampling], Tensor] = {}

    def remembering(logits: Tensor, sampling: Sampling) -> Tensor:
        key = (logits.numpy().tobytes(), sampling)
        if key not in known:
            known[key] = probabilities(logits, sampling)
        return known[key].clone()

    monkeypatch.setattr(verifier, "probabilities", remembering)
    monkeypatch.setattr(drafting, "probabilities", remembering)
