"""Case 19: a head that has learned one text by heart has all its drafts accepted on it, for every kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BLOCK, WHOLE

from draftsmith.data.features import FeatureBatch
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import DraftHead
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

DEPTHS, NEW = 3, 26
PROMPT = [1, 40, 41, 42, 43, 2, 101, 1, 60, 61]
CASES = {
    "eagle": ("eagle", {}, "kl"),
    "eagle-through": ("eagle", {"detach": False, "layers": 2, "init_layer": "random", "feature_noise": 0.0}, "kl"),
    "eagle3": ("eagle3", {}, "kl"),
    "eagle3-layers": ("eagle3", {"layers": 2}, "kl"),
    "eagle3-3.1": ("eagle3", {"fc_norm": True, "norm_output": True, "init_layer": "random"}, "lk"),
    "draft-model": ("draft_model", {"layers": 2}, "kl"),
    "peagle": ("peagle", {"layers": 2, "mask_token": 127, "ratio": 1.0}, "kl"),
    "medusa-own": ("medusa", {"lm_head": "own"}, "ce"),
    "medusa-shared": ("medusa", {"lm_head": "shared", "blocks": 3}, "ce"),
    "medusa-2": ("medusa", {"lora": {"rank": 4, "dropout": 0}}, "kl"),
    "hydra": ("hydra", {"blocks": 2}, "ce"),
    "hydra-shared": ("hydra", {"lm_head": "shared", "blocks": 3}, "ce"),
    "hydra-prefix": ("hydra", {"prefix": True}, "kl"),
    "mlp-speculator": ("mlp_speculator", {"inner_dim": 48}, "ce"),
    "mlp-speculator-tied": ("mlp_speculator", {"tie_weights": True, "scale_input": True}, "kl"),
    "pard": ("pard", {"layers": 2, "mask_token": 127, "ratio": 1.0}, "ce"),
    "redrafter": ("redrafter", {}, "kl"),
    "redrafter-sum": ("redrafter", {"rnn": False, "exit_dim": 48}, "ce"),
    "dflash": ("dflash", BLOCK, "ce"),
    "dflash-causal": ("dflash", BLOCK | {"causal": True, "mask_embedding": True}, "kl"),
    "dflash-markov": ("dflash", BLOCK | {"in_block": "markov", "anchor_predicts": True}, "ce"),
    "dflash-gru": ("dflash", BLOCK | {"in_block": "gru", "memory": 32}, "ce"),
    "dflash-conv": ("dflash", BLOCK | {"in_block": "conv", "candidates": 4}, "ce"),
    "mtp": ("mtp", {}, "kl"),
    "mtp-mimo": ("mtp", {"form": "mimo", "init": "random"}, "ce"),
}


@pytest.fixture(scope="module")
def text(lively_target: Target) -> list[int]:
    """The target's own greedy text, of many different tokens."""
    tokens = generate(lively_target, None, PROMPT, chain(1), NEW).tokens
    assert len(tokens) == NEW and len(set(tokens)) > 12
    return tokens


def learn_by_heart(target: Target, text: list[int], case: str) -> DraftHead:
    """Train until every greedy draft at every depth is the target's own token. The reply starts at the text."""
    kind, options, loss = CASES[case]
    torch.manual_seed(0)
    size = target.vocab_size if options.get("lm_head") == "shared" or case in WHOLE else 100
    ids = torch.tensor([PROMPT + text])
    head = KINDS[kind].create(target, KINDS[kind].Options.model_validate(options), None, DEPTHS, draft_vocabulary(ids, size))
    batch = FeatureBatch(
        ids, (torch.arange(len(ids[0])) >= len(PROMPT))[None], target.features(ids, head.config.taps), None, ids.numel()
    )
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(1500):
        cost, sums = judged(head, batch, target, Objective(loss, depth_decay=1.0), head.taught(batch.ids, batch.mask, 0))
        if torch.equal(sums.right, sums.rows):
            assert sums.report(torch.ones(DEPTHS) / DEPTHS)["tau_sim"] == 1 + DEPTHS
            return head.eval()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    raise AssertionError(f"not learned: {sums.right / sums.rows}")


def draft_vocabulary(ids: torch.Tensor, size: int) -> torch.Tensor:
    """A draft vocabulary of ``size`` rising ids with all of ``ids`` in it, so that draft ids are not target ids."""
    own = ids.unique()
    others = torch.tensor([i for i in range(127, -1, -1) if i not in own.tolist()])
    return torch.cat([own, others[: size - len(own)]]).sort().values


@pytest.mark.parametrize("case", CASES)
def test_case_19_every_draft_is_accepted(lively_target: Target, text: list[int], case: str, tmp_path: Path) -> None:
    target = lively_target
    head = learn_by_heart(target, text, case)
    head.save(tmp_path)
    for ours in (head, load_head(tmp_path)):
        with ours.adapted(target):
            result: Any = generate(target, ours, PROMPT, chain(DEPTHS), NEW)
        assert result.tokens == text
        assert len(result.accepted) == -(-(NEW - 1) // (DEPTHS + 1))  # as few passes as can be
        assert result.accepted[:-1] == [DEPTHS] * (len(result.accepted) - 1)
