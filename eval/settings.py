"""The advice as engines take it: vLLM, SGLang and TensorRT-LLM.

Every engine knows some proposers and not others; where it does not know one, the settings say so in place of a guess.
"""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from .service import ProposerFacts

Schedule = list[tuple[int, int, int]]  # (from, to, length): draft length by running requests

VLLM: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model"},
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "mtp": {"method": "mtp"},
}
SGLANG = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "mtp": "NEXTN",
}
TENSORRT = {
    "ngram": "NGram",
    "suffix": "SA",
    "draft_model": "Draft_Target",
    "eagle3": "Eagle3",
    "pard": "PARD",
    "dflash": "DFlash",
    "mtp": "MTP",
}
WIDTH = 4  # choices under a node of an engine's dynamic tree
WINDOW = 64  # finished requests over which TensorRT-LLM averages the acceptance rate


@dataclass(frozen=True)
class Wish:
    """What shall be set: a proposer with its draft length by running requests. ``tree``: tokens of a tree;
    ``threshold``: the acceptance rate (accepted / drafted) below which drafting costs more than it gives at the usual load."""

    facts: ProposerFacts
    length: int
    schedule: Schedule
    threshold: float
    tree: int | None = None

    @property
    def kind(self) -> str:
        return self.facts.name.partition(":")[0]

    @property
    def upto(self) -> int | None:
        """The most running requests with which drafting pays; None where it always does."""
        drafting = [to for _, to, length in self.schedule if length]
        return drafting[-1] if drafting and not self.schedule[-1][2] else None

    @property
    def changes(self) -> bool:
        return len(self.schedule) > 1

    @property
    def longest(self) -> int:
        """What an engine has to be built for."""
        return max([length for _, _, length in self.schedule] or [0]) or self.length


def settings(wish: Wish) -> dict[str, Any]:
    """By engine: what to give it, or under ``unsupported`` why there is nothing."""
    return {"vllm": vllm(wish), "sglang": sglang(wish), "tensorrt-llm": tensorrt(wish)}


def path(wish: Wish) -> dict[str, Any]:
    return {"model": wish.facts.path or "PATH"} if wish.facts.kind != "lookup" else {}


def vllm(wish: Wish) -> dict[str, Any]:
    """The value of --speculative-config. Its schedule's ranges are inclusive; it drafts chains."""
    if wish.kind not in VLLM:
        return {"unsupported": f"vLLM has no method for {wish.facts.name}"}
    if wish.tree:
        return {"unsupported": f"vLLM drafts chains: measure {wish.facts.name} with --tree chain:{wish.length}"}
    config: dict[str, Any] = {**VLLM[wish.kind], **path(wish), "num_speculative_tokens": wish.longest}
    if wish.changes:
        config["num_speculative_tokens_per_batch_size"] = [list(step) for step in wish.schedule]
    return {"speculative-config": config}


def sglang(wish: Wish) -> dict[str, Any]:
    """Flags of the server. A chain's draft tokens are its steps and the root; they are the same at every batch size."""
    if wish.kind not in SGLANG:
        return {"unsupported": f"SGLang has no algorithm for {wish.facts.name}"}
    flags: dict[str, Any] = {"speculative-algorithm": SGLANG[wish.kind]}
    if wish.facts.kind != "lookup":
        flags |= {"speculative-draft-model-path": wish.facts.path or "PATH"}
    tokens = (wish.tree or wish.length) + 1
    if wish.kind not in ("ngram", "dflash"):
        flags |= {"speculative-num-steps": wish.length, "speculative-eagle-topk": WIDTH if wish.tree else 1}
    flags |= {"speculative-num-draft-tokens": tokens}
    return {"flags": flags}


def tensorrt(wish: Wish) -> dict[str, Any]:
    """The YAML's speculative_config. A schedule's keys are the largest batch size of each length, and above the last one
    nothing is drafted; it stands in place of max_concurrency. The rate's threshold turns drafting off for good."""
    if wish.kind not in TENSORRT:
        return {"unsupported": f"TensorRT-LLM has no decoding_type for {wish.facts.name}"}
    config: dict[str, Any] = {"decoding_type": TENSORRT[wish.kind], "max_draft_len": wish.longest}
    if wish.facts.kind != "lookup":
        config["speculative_model"] = wish.facts.path or "PATH"
    if wish.tree:
        config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": WIDTH, "max_total_draft_tokens": wish.tree}
    falling = [length for _, _, length in wish.schedule if length]
    if len(falling) > 1 and falling[0] == wish.longest:
        config["draft_len_schedule"] = {to: length for _, to, length in wish.schedule if length}
    elif wish.upto:
        config["max_concurrency"] = wish.upto
    config |= {"acceptance_rate_window_size": WINDOW, "acceptance_rate_threshold": round(wish.threshold, 3)}
    return {"speculative_config": config}


def written(found: dict[str, Any]) -> dict[str, str]:
    """File names and texts of what can be given to the engines."""
    texts: dict[str, str] = {}
    if "unsupported" not in found["vllm"]:
        texts["vllm.json"] = json.dumps(found["vllm"]["speculative-config"], indent=2) + "\n"
    if "unsupported" not in found["sglang"]:
        texts["sglang.txt"] = "".join(f"--{flag} {value}\n" for flag, value in found["sglang"]["flags"].items())
    if "unsupported" not in found["tensorrt-llm"]:
        texts["tensorrt-llm.yaml"] = yaml.safe_dump(found["tensorrt-llm"], sort_keys=False)
    return texts
