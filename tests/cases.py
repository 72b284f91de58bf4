"""The conformance table: every kind, with the options under which each of its parts is at work."""

from typing import Any

import torch

from draftsmith.heads.base import DraftHead
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target

DEPTHS, DRAFT_VOCAB = 4, 48
RANDOM = {"init_layer": "random", "init_lm_head": "random"}
BLOCK: dict[str, Any] = {"layers": 2, "mask_token": 127}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {"init_layer": "random"}),
    "eagle-through": ("eagle", {"init_layer": "random", "detach": False, "layers": 2, "bias": True}),
    "eagle-warm": ("eagle", {"feature_weight": 0.0}),
    "eagle3": ("eagle3", RANDOM),
    "eagle3-norm-before-residual": ("eagle3", RANDOM | {"norm_before_residual": True}),
    "eagle3-norm-before-fc": ("eagle3", RANDOM | {"norm_before_fc": True}),
    "eagle3-fc-norm": ("eagle3", RANDOM | {"fc_norm": True}),
    "eagle3-norm-output": ("eagle3", RANDOM | {"norm_output": True}),
    "eagle3-3.1": ("eagle3", RANDOM | {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "eagle3-warm": ("eagle3", {}),
    "eagle3-layers": ("eagle3", RANDOM | {"layers": 3, "norm_output": True}),
    "eagle3-layers-warm": ("eagle3", {"layers": 2}),
    "peagle": ("peagle", RANDOM | {"layers": 2, "mask_token": 127, "ratio": 1.0}),
    "peagle-own": ("peagle", RANDOM | {"layers": 1, "mask_token": 127, "ratio": 1.0, "embedding": "own", "fc_norm": True}),
    "peagle-warm": ("peagle", {"mask_token": 127, "ratio": 1.0}),
    "medusa-own": ("medusa", {"lm_head": "own", "blocks": 2}),
    "medusa-shared": ("medusa", {"lm_head": "shared"}),
    "medusa-2": ("medusa", {"lora": {"rank": 4, "alpha": 4, "dropout": 0.1}}),
    "medusa-2-shared": ("medusa", {"lm_head": "shared", "lora": {"rank": 2, "alpha": 2, "modules": "all-linear"}}),
    "hydra": ("hydra", {"blocks": 2}),
    "hydra-shared": ("hydra", {"lm_head": "shared", "feature_weight": 0.5}),
    "hydra-prefix": ("hydra", {"prefix": True, "dropout": 0.2, "noise": 5.0}),
    "mlp-speculator": ("mlp_speculator", {"inner_dim": 24}),
    "mlp-speculator-scaled": ("mlp_speculator", {"scale_input": True}),
    "mlp-speculator-tied": ("mlp_speculator", {"tie_weights": True, "scale_input": True, "inner_dim": 24}),
    "redrafter": ("redrafter", {}),
    "redrafter-sum": ("redrafter", {"rnn": False, "num_layers": 1, "init_lm_head": "random"}),
    "redrafter-projected": ("redrafter", {"exit_dim": 48}),
    "dflash": ("dflash", BLOCK),
    "dflash-whole": ("dflash", BLOCK | {"mask_embedding": True, "window": 5}),
    "dflash-causal": ("dflash", BLOCK | {"causal": True}),
    "dflash-markov": ("dflash", BLOCK | {"in_block": "markov", "rank": 8}),
    "dflash-markov-gated": ("dflash", BLOCK | {"in_block": "markov", "rank": 8, "gated": True, "anchor_predicts": True}),
    "dflash-gru": ("dflash", BLOCK | {"in_block": "gru", "rank": 8, "memory": 12, "mask_embedding": True}),
    "dflash-gru-anchor": ("dflash", BLOCK | {"in_block": "gru", "rank": 8, "memory": 12, "anchor_predicts": True}),
    "dflash-conv": ("dflash", BLOCK | {"in_block": "conv", "rank": 8, "group": 8, "candidates": 5}),
    "draft-model": ("draft_model", {"layers": 2}),
    "draft-model-lora": ("draft_model", {"layers": 2, "lora": 4}),
    "mtp": ("mtp", {"init": "random"}),
    "mtp-warm": ("mtp", {}),
    "mtp-deepseek": ("mtp", {"form": "deepseek", "init": "random"}),
    "mtp-mimo": ("mtp", {"form": "mimo"}),
    "pard": ("pard", {"layers": 2, "mask_token": 127, "ratio": 1.0}),
    "pard-lora": ("pard", {"layers": 2, "mask_token": 127, "ratio": 1.0, "lora": 4}),
    "pard-features": ("pard", {"layers": 2, "mask_token": 127, "ratio": 1.0, "features": True, "feature_scale": 1.0}),
}
WHOLE = {
    "dflash-whole",
    "dflash-conv",
    "draft-model",
    "draft-model-lora",
    "mtp",
    "mtp-warm",
    "mtp-deepseek",
    "mtp-mimo",
    "pard",
    "pard-lora",
    "pard-features",
}  # cases with the target's whole vocabulary
TAPS = {"pard-features": [1, 4]}  # where a case reads other taps than its kind's default


def make_head(
    target: Target, case: str, depths: int = DEPTHS, taps: list[int] | None = None, confidence: bool = False
) -> DraftHead:
    """A head whose every weight is random, norms included, so that nothing is accidentally an identity."""
    kind, options = CASES[case]
    size = target.vocab_size if options.get("lm_head") == "shared" or case in WHOLE else DRAFT_VOCAB
    torch.manual_seed(0)
    target_ids = torch.randperm(target.vocab_size)[:size].sort().values
    chosen = KINDS[kind].Options.model_validate(options)
    head = KINDS[kind].create(target, chosen, taps or TAPS.get(case), depths, target_ids, confidence)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()
