"""A report's numbers in tensorboard or wandb, beside those of the training run."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tracker import Tracker
from .words import labels

SCALARS = (
    "tau",
    "tau_per_request",
    "mean_acceptance_length",
    "acceptance_rate",
    "tokens_per_pass",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "speedup",
    "repetitiveness",
    "peak_memory",
    "gpu_utilization",
)


def track(results: Sequence[dict[str, Any]], name: str, to: str, directory: Path) -> None:
    """Log every result's numbers to the tracker ``to`` (see TRACKERS) as the run ``name``; its files go into ``directory``.

    A tracker that is missing or fails is named on the terminal and changes nothing else: the numbers are in the report.
    """
    tracker = Tracker(to, name, directory, {}, "the report")
    tracker.log(scalars(results), step=0)
    tracker.finish()


def scalars(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Every number by its name, such as eval/eagle3/tau: what the results do not have in common tells them apart."""
    proposers = [result["proposer"] for result in results]
    names = proposers if len(set(proposers)) == len(proposers) else labels(results)
    found: dict[str, float] = {}
    for name, result in zip(names, results, strict=True):
        place = f"eval/{re.sub(r'[^A-Za-z0-9.:=_-]+', '-', name)}"
        found |= {f"{place}/{key}": float(result[key]) for key in SCALARS if result[key] is not None}
        found |= {f"{place}/{key}_mean": result[key]["mean"] for key in ("ttft", "tpot") if result[key]}
        found |= {f"{place}/time/{part}": share for part, share in result["time"].items()}
        found |= {f"{place}/category/{category}/tau": tau for category, tau in result["categories"].items()}
        shares = enumerate(result["accepted_per_position"], start=1)
        found |= {f"{place}/accepted_at/{position}": share for position, share in shares}
    return found
