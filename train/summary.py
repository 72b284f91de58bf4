"""What a run came to, and what to type next."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from ..console import note
from ..data.tally import listed
from ..errors import first_line
from ..heads.engines.registry import exports, served
from ..outputs import write_whole
from ..recipes.schema import Recipe
from .log import Log
from .pace import clock, short


def summarize(recipe: Recipe, out: Path, data: dict[str, Any], log: Log, seconds: float) -> dict[str, Any]:
    """A finished run's summary.json, which is also returned: the numbers of its metrics.jsonl, over all its starts.

    ``data``: as in run.json. ``seconds``: what this start took from the clock. In the summary ``seconds`` are those within
    steps (``training``), of evaluations (``evaluation``) and of this start (``this_start``), and the rates are those of
    training; ``best_tau`` and ``best_step`` are the written head's (None: none could be), by the verifier or simulated, as
    ``tau_by`` says; ``skipped`` holds rows dropped at reading by reason, rows found damaged in a store, and steps not taken;
    ``next`` the commands that go on with the head.
    """
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train, held_out = ([row for row in rows if row["part"] == part] for part in ("train", "held_out"))
    training = sum(row["seconds"] for row in train)
    tokens, supervised = (sum(row[name] for row in train) for name in ("tokens", "supervised_tokens"))
    summary = {
        "steps": log.steps,
        "seconds": {"training": training, "evaluation": sum(row["seconds"] for row in held_out), "this_start": seconds},
        "tokens": tokens,
        "supervised_tokens": supervised,
        "tokens_per_s": tokens / training if training else 0.0,
        "supervised_tokens_per_s": supervised / training if training else 0.0,
        "best_tau": log.best,
        "best_step": log.best_step,
        "tau_by": "by the verifier" if any("tau" in row for row in held_out) else "simulated",
        "head": str(out / "head"),
        "skipped": {
            "rows": {part: about["reasons"] for part, about in data.items() if "reasons" in about},
            "damaged_rows": max((row.get("damaged_rows", 0) for row in train), default=0),
            "steps": sum(row.get("skipped_steps", 0) for row in train),
        },
        "peak_memory": max((row["peak_memory"] for row in train), default=0),
        "next": follow_ups(recipe, out),
    }
    try:
        write_whole(out / "summary.json", [json.dumps(summary, indent=1) + "\n"])
    except OSError as error:  # a full disk must not spoil the end of a run
        note(f"WARNING: {out}/summary.json could not be written: {first_line(error)}")
    return summary


def follow_ups(recipe: Recipe, out: Path) -> list[str]:
    """Commands for what comes after training: measure, ask why, export."""
    prompts = [part for source in recipe.sources("held_out") for part in ("--prompts", source)]
    tree = [] if recipe.eval.tree == "chain:5" else ["--tree", recipe.eval.tree]
    engine = [*served(recipe.head.kind), *exports(recipe.head.kind)][:1]
    commands = [
        ["draftsmith", "eval", str(out / "head"), *prompts, *tree, "--out", str(out / "eval")],
        ["draftsmith", "diagnose", str(out)],
        *(["draftsmith", "export", str(out / "head"), "--to", to, "--out", str(out / to)] for to in engine),
    ]
    return [shlex.join(command) for command in commands]


def told(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    spent, skipped = summary["seconds"], summary["skipped"]
    read = f"{short(summary['tokens'])} tokens ({short(summary['supervised_tokens'])} supervised)"
    fast = f"{short(summary['tokens_per_s'])} tokens/s, {summary['peak_memory'] / 2**30:.1f} GiB at the most"
    lost = [f"{part} rows dropped ({listed(Counter(reasons))})" for part, reasons in skipped["rows"].items() if reasons]
    lost += [f"{skipped[key]} {word}" for key, word in (("damaged_rows", "damaged rows"), ("steps", "steps")) if skipped[key]]
    best = "no head could be written"
    if summary["best_tau"] is not None:
        best = (
            f"best head (τ {summary['best_tau']:.3f}, {summary['tau_by']}, of step {summary['best_step']}): {summary['head']}"
        )
    lines = [
        f"{summary['steps']} steps: {clock(spent['training'])} of training, {clock(spent['evaluation'])} of evaluations",
        f"{read}, {fast}",
        *([f"left out: {', '.join(lost)}"] if lost else []),
        best,
        "next:",
        *(f"  {command}" for command in summary["next"]),
    ]
    return "\n".join(lines)
