"""A head for tests that says what a function of the committed tokens and the drafted path tells it to."""

from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from draftsmith.heads.base import DraftHead, Guess, HeadConfig, Shape, TargetIdentity
from draftsmith.target import Features, Target


class NoOptions(BaseModel):
    pass


class ScriptedHead(DraftHead):
    """``logits``, written by the test, gives the row [V] behind the committed tokens and a drafted path. ``read`` counts the
    nodes of every ``deepen``."""

    kind, Options = "scripted", NoOptions

    def __init__(self, vocab: int, target_ids: Tensor, taps: list[int] | None = None) -> None:
        identity = TargetIdentity(name="t", fingerprint="", architecture="", depth=1, hidden_size=1, vocab_size=vocab)
        sizes = {"taps": taps or [], "depths": 1, "draft_vocab_size": len(target_ids)}
        super().__init__(HeadConfig(kind=self.kind, target=identity, **sizes))
        self.target_ids.copy_(target_ids)
        self.read: list[int] = []

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        return []

    def initialize(self, target: Target) -> None: ...

    def predict(self, *_: Any) -> list:
        return []

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        raise NotImplementedError

    def new_state(self) -> dict:
        return {"committed": [], "paths": {}}

    def begin(self, state: dict, features: Features, ids: Tensor, target: Target) -> Guess:
        assert len(features.last) == len(ids) - 1  # every committed row comes once, with the token behind it
        assert state["committed"][-1:] in ([], ids[:1].tolist())
        state["committed"] += ids[1:].tolist()
        state["paths"] = {0: []}
        return self.guess([self.logits(state["committed"], [])])

    def deepen(self, state: dict, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        assert len({shape.depths[node] for node in nodes}) == 1  # a level at a time, and every node once
        assert not state["paths"].keys() & set(nodes)
        self.read.append(len(nodes))
        rows = []
        for node, token in zip(nodes, tokens.tolist(), strict=True):
            state["paths"][node] = [*state["paths"][shape.parents[node - 1]], token]
            assert len(state["paths"][node]) == shape.depths[node]
            rows.append(self.logits(state["committed"], state["paths"][node]))
        return self.guess(rows)

    def guess(self, rows: list[Tensor]) -> Guess:
        logits = torch.stack(rows)[:, self.target_ids]
        return Guess(logits, logits)
