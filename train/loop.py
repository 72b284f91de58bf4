"""The training run, top to bottom: what is done at every step, when it is measured and saved."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType

from ..console import Progress, note
from ..errors import UserError
from ..heads.base import DraftHead
from ..outputs import new_directory, refuse_existing
from ..recipes.schema import Recipe, load_recipe
from ..target import Target
from . import checkpoints
from .calibration import calibrate
from .log import Log
from .metrics import DepthSums
from .pace import brief
from .prepare import prepare, start
from .profiling import profiled
from .provenance import write_run
from .run import Run
from .summary import summarize

MISMATCH = 0.8  # the verifier's τ may fall this far below the simulated one on a few prompts by chance

Score = Callable[[Target, DraftHead], float]  # a head's τ by the verifier


def train(
    recipe: Recipe, score: Score | None = None, resume: bool = False, force: bool = False, profile: int = 0
) -> dict[str, Any]:
    """Run a recipe. Returns the last evaluation's metrics and ``summary``, and leaves the best head in ``output``/head.

    ``score`` gives a head's τ by the verifier; the best head is the best by it, or by the simulated τ without one. Every
    process of an ``accelerate launch`` calls this. ``profile``: steps to trace into ``output``/profile.
    """
    began = time.perf_counter()
    accelerator = start(recipe)
    if recipe.train.on_policy and accelerator.distributed_type == DistributedType.FSDP:
        raise UserError("train.on_policy drafts with the whole head, which FSDP shards: launch with DDP, or set it to 0.")
    out = Path(recipe.output)
    if resume and not out.is_dir():
        raise UserError(f"{out} does not exist, so there is nothing to resume: start without --resume.")
    if resume:
        check_unchanged(recipe, out)
    else:
        refuse_existing(out, force)
    run = prepare(recipe, accelerator, out, resume)
    claim(accelerator, out, resume)
    write_run(run.accelerator, recipe, run.target, run.data, out)
    done = checkpoints.resume(accelerator, out / "checkpoints") if resume else 0
    log = Log(accelerator, out, recipe, done if resume else None, run.steps)
    best, every = log.best, recipe.train.eval_every or run.steps
    if done not in log.evaluated and (done == 0 or done % every == 0):
        best = evaluate(run, done, best, score, log)
    row: dict[str, Any] = {}
    bar = Progress("training", run.steps, done=done, show=accelerator.is_main_process)
    tracing = profiled(profile if accelerator.is_main_process else 0, done + 1, run.steps, out / "profile")
    with bar, tracing as traced:
        sums = DepthSums.zeros(recipe.head.depths, accelerator.device)
        for step in range(done + 1, run.steps + 1):
            with run.pace.step():
                sums.add(run.advance(step, run.global_batch(step - 1)))
            traced()
            if step % recipe.train.log_every == 0 or step == run.steps:
                report = sums.reduced(accelerator).report(run.shares)
                pace = run.pace.row(accelerator, run.steps - step, run.train.lost)
                row = {"step": step, "lr": run.lr, **report, **pace}
                log.write(row, "train")
                sums = DepthSums.zeros(recipe.head.depths, accelerator.device)
            bar.advance(1, brief(row))
            if recipe.train.checkpoint_every and step % recipe.train.checkpoint_every == 0:
                run.train.flush()
                checkpoints.save(accelerator, out / "checkpoints", step, recipe.train.keep_checkpoints)
            if step % every == 0 or step == run.steps:
                best = evaluate(run, step, best, score, log)
    run.train.flush()
    log.tracker.finish()
    steps, data = run.steps, run.data
    accelerator.wait_for_everyone()
    del run  # DDP's reducer holds the process group, and a gloo group that dies after end_training never joins its threads
    accelerator.free_memory()
    accelerator.end_training()
    result = {"steps": steps, "best_tau": best, "head": str(out / "head"), **log.last}
    if accelerator.is_main_process:
        result["summary"] = summarize(recipe, out, data, steps, time.perf_counter() - began)
    return result


def claim(accelerator: Accelerator, out: Path, resume: bool) -> None:
    """Make the run directory, empty unless the run goes on in it. Called once everything that can be refused has been read."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if out.exists() and not resume:
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()


def check_unchanged(recipe: Recipe, out: Path) -> None:
    """Raise UserError where a recipe asks a run that it resumes for another head or optimizer than its checkpoints hold."""
    before = load_recipe(out / "recipe.yaml")
    pairs = [("head", key) for key in type(recipe.head).model_fields]
    for section, key in [*pairs, ("train", "lr"), ("train", "betas"), ("train", "weight_decay")]:
        asked, has = (getattr(getattr(each, section), key) for each in (recipe, before))
        if asked != has:
            raise UserError(
                f"{section}.{key} is {asked} in the recipe and {has} in {out}, which goes on with what it has: write {has}, or "
                "start anew with head.init_from."
            )


def evaluate(run: Run, step: int, best: float | None, score: Score | None, log: "Log") -> float:
    """Held-out loss and simulated τ, τ by the verifier; saves the head when it is the best yet. Returns the best τ."""
    began = time.perf_counter()
    sums = run.held_out_sums().reduced(run.accelerator)
    report = sums.report(run.shares)
    head = run.snapshot()
    if head is not None:
        if head.confidence is not None:
            report |= calibrate(head.confidence, sums.sure)
        if score is not None:
            report["tau"] = score(run.target, head)
            if report["tau"] < MISMATCH * report["tau_sim"]:
                note(
                    f"train/serve mismatch: the verifier finds τ {report['tau']:.2f} where teacher forcing promises "
                    f"{report['tau_sim']:.2f}; look at the chat template, the loss mask and the taps."
                )
        current = report.get("tau", report["tau_sim"])
        if best is None or current > best:
            best = current
            with new_directory(run.out / "head", force=True) as partial:
                head.save(partial)
    log.write({"step": step, "seconds": time.perf_counter() - began, **report}, "held_out")
    return best if best is not None else float("-inf")  # only the main process decides
