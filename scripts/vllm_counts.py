"""Runs inside the vLLM environment: decodes a job's prompts with a draft head and writes what was drafted and accepted.

    python scripts/vllm_counts.py JOB.json RESULT.json

JOB: ``target`` (a path), ``method``, ``draft_length`` and further ``flags`` (a head's path is its ``model``), ``prompts``
(lists of token ids), ``max_tokens``.
RESULT: ``version``, ``load_seconds``, ``seconds``, and for every prompt ``tokens``, ``drafts``, ``proposed`` and
``accepted`` by position, all from the engine's own counters. One prompt at a time, so that counts belong to a prompt.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: loads in seconds, counts the same
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def load(job: dict[str, Any]) -> Any:
    """The engine in float32, greedy, without anything that could change the order of sums between prompts."""
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        job["target"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        speculative_config={
            "method": job["method"],
            "num_speculative_tokens": job["draft_length"],
            **job["flags"],
        },
    )


def counters(llm: Any, draft_length: int) -> dict[str, Any]:
    """The engine's counters since it was loaded."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_")}
    if not found:
        return {"drafts": 0, "proposed": 0, "accepted": [0] * draft_length}
    return {
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "proposed": found["vllm:spec_decode_num_draft_tokens"].value,
        "accepted": list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def decode(llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every prompt's text and the counters' growth over it."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    greedy = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    results = []
    before = counters(llm, job["draft_length"])
    for ids in job["prompts"]:
        output = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0].outputs[0]
        after = counters(llm, job["draft_length"])
        results.append(
            {
                "tokens": list(output.token_ids),
                "drafts": after["drafts"] - before["drafts"],
                "proposed": after["proposed"] - before["proposed"],
                "accepted": [a - b for a, b in zip(after["accepted"], before["accepted"], strict=True)],
            }
        )
        before = after
    return results


def main() -> None:
    import vllm  # type: ignore[import-not-found]

    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    start = time.perf_counter()
    llm = load(job)
    loaded = time.perf_counter()
    results = decode(llm, job)
    report = {
        "version": vllm.__version__,
        "load_seconds": loaded - start,
        "seconds": time.perf_counter() - loaded,
        "prompts": results,
    }
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
