"""The training run, top to bottom: what is done at every step, when it is measured and saved."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from ..console import Progress, note
from ..errors import UserError, first_line
from ..heads.base import DraftHead
from ..outputs import new_directory, refuse_existing, restore
from ..recipes.schema import Recipe, load_recipe
from ..target import Target
from . import checkpoints
from .calibration import calibrate
from .changes import check_changes
from .faults import spoilt, told_plainly
from .log import Log
from .metrics import DepthSums
from .pace import brief
from .prepare import prepare, start
from .profiling import profiled
from .provenance import write_run
from .run import Run, Spoilt
from .sharding import whole_head
from .stopping import Interrupted, Stopping
from .summary import summarize

MISMATCH = 0.8  # the verifier's τ may fall this far below the simulated one on a few prompts by chance

Score = Callable[[Target, DraftHead], float]  # a head's τ by the verifier


def train(
    recipe: Recipe, score: Score | None = None, resume: bool = False, force: bool = False, profile: int = 0
) -> dict[str, Any]:
    """Run a recipe. Returns the last evaluation's metrics and ``summary``, and leaves the best head in ``output``/head.

    ``score`` gives a head's τ by the verifier; the best head is the best by it, or by the simulated τ without one. Every
    process of an ``accelerate launch`` calls this. ``resume`` goes on from the newest whole checkpoint, and starts where there
    is none. ``profile``: steps to trace into ``output``/profile. SIGTERM and SIGINT end the run after the step that is under
    way: ``stopped`` in what is returned names the signal, and a checkpoint of that step is there. Raises UserError for what
    the user can mend, in the middle of the run too.
    """
    began = time.perf_counter()
    accelerator = start(recipe)
    if recipe.train.on_policy and not whole_head(accelerator):
        raise UserError(
            "train.on_policy drafts with the whole head, which FSDP and ZeRO-3 cut up: launch with DDP, or set it to 0."
        )
    out = Path(recipe.output)
    with Stopping() as stopping:
        checkpoint = to_resume(recipe, out, accelerator) if resume else None
        if not resume:
            refuse_existing(out, force)
        run = prepare(recipe, accelerator, out, checkpoint)
        claim(accelerator, out, checkpoint)
        write_run(run.accelerator, recipe, run.target, run.data, out)
        if checkpoint:
            checkpoints.load(accelerator, checkpoint)
        log = Log(accelerator, out, recipe, checkpoint.metrics if checkpoint else 0, run.steps)
        with told_plainly(run):
            stopped_at = go_on(run, checkpoint.step if checkpoint else 0, score, log, stopping, profile)
    run.train.flush()
    log.tracker.finish()
    steps, data = run.steps, run.data
    accelerator.wait_for_everyone()
    del run  # DDP's reducer holds the process group, and a gloo group that dies after end_training never joins its threads
    accelerator.free_memory()
    accelerator.end_training()
    result: dict[str, Any] = {"best_tau": log.best, "head": str(out / "head"), **log.last}
    if stopped_at is not None:
        return {**result, "steps": stopped_at, "of": steps, "stopped": stopping.asked or "a signal to another process"}
    result |= {"steps": steps}
    if accelerator.is_main_process:
        result["summary"] = summarize(recipe, out, data, log, time.perf_counter() - began)
    return result


def go_on(run: Run, done: int, score: Score | None, log: Log, stopping: Stopping, profile: int) -> int | None:
    """Take the steps after ``done``, ``profile`` of them traced; returns that after which a signal ended the run, or None."""
    settings, accelerator = run.recipe.train, run.accelerator
    every = settings.eval_every or run.steps
    owed = done not in log.evaluated and (done % every == 0 or done == run.steps)
    if owed and not evaluated(run, done, score, log, stopping):
        if done == 0:
            save(run, 0, log)
        return done
    row: dict[str, Any] = {}
    again: int | None = None  # when to try again to write a checkpoint that could not be written
    bar = Progress("training", run.steps, done=done, show=accelerator.is_main_process)
    tracing = profiled(profile if accelerator.is_main_process else 0, done + 1, run.steps, run.out / "profile")
    with bar, tracing as traced, stopping.interruptible(False):
        sums = DepthSums.zeros(run.recipe.head.depths, accelerator.device)
        for step in range(done + 1, run.steps + 1):
            rows = run.global_batch(step - 1)
            try:
                with run.pace.step():
                    sums.add(run.advance(step, rows))
                run.spoilt_in_a_row = 0
            except Spoilt as error:
                spoilt(run, step, rows, str(error))
            traced()
            stops, last = run.anywhere(stopping.asked is not None), step == run.steps
            evaluates = step % every == 0 or last
            saves = stops or step == again or bool(settings.checkpoint_every and step % settings.checkpoint_every == 0)
            if step % settings.log_every == 0 or saves or evaluates:  # what a checkpoint covers is logged before it
                report = sums.reduced(accelerator).report(run.shares)
                pace = run.pace.row(accelerator, run.steps - step, run.train.lost)
                row = {"step": step, "lr": run.lr, **report, **pace}
                log.write(row, "train")
                sums = DepthSums.zeros(run.recipe.head.depths, accelerator.device)
            bar.advance(1, brief(row))
            if saves:
                again = None if save(run, step, log) else step + settings.log_every
            if evaluates and not stops and not evaluated(run, step, score, log, stopping):
                stops = True
                if not saves:
                    again = None if save(run, step, log) else step
            if stops and again:
                raise UserError(f"stopped after step {step} without a checkpoint of it: make room, then --resume.")
            if stops:
                return step
    return None


def save(run: Run, step: int, log: Log) -> bool:
    """Write a checkpoint. Where it cannot be written, say so and go on with the older ones."""
    run.train.flush()
    reason = checkpoints.save(run, step, log.size(), log.best_step)
    if reason and run.accelerator.is_main_process:
        again = f"training goes on and tries again in {run.recipe.train.log_every} steps"
        note(f"WARNING: no checkpoint of step {step} could be written ({reason}): make room in {run.out}; {again}")
    return reason is None


def to_resume(recipe: Recipe, out: Path, accelerator: Accelerator) -> checkpoints.Checkpoint | None:
    """The checkpoint to go on from; None where none was written yet. Raises UserError for a recipe that does not fit it."""
    if accelerator.is_main_process:
        restore(out / "head")
    with accelerator.main_process_first():  # the main process names the broken ones
        checkpoint = checkpoints.newest(out / "checkpoints", say=accelerator.is_main_process)
    changes = check_changes(recipe, load_recipe(out / "recipe.yaml")) if (out / "recipe.yaml").is_file() else []
    if checkpoint is None:
        refuse_to_start_over(out)
        if accelerator.is_main_process:
            note(f"{out} holds no checkpoint yet: starting from the first step")
        return None
    if accelerator.is_main_process:
        note(f"going on from {checkpoint.path}" + "".join(f"\n  changed: {change}" for change in changes))
    return checkpoint


def refuse_to_start_over(out: Path) -> None:
    """Raise UserError where ``out`` holds more than a run that was killed before its first checkpoint."""
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return
    recipe = out / "recipe.yaml"
    if not recipe.is_file() or not load_recipe(recipe).train.checkpoint_every:
        raise UserError(
            f"{out} holds no checkpoint, and is no run that writes any: start anew, without --resume and with --force, and set "
            "train.checkpoint_every."
        )


def claim(accelerator: Accelerator, out: Path, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Make the run directory, empty unless the run goes on in it. Called once everything that can be refused has been read."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if out.exists() and checkpoint is None:
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        for left in (*out.glob(".head.*"), *out.glob("checkpoints/.step-*")):  # by a kill
            shutil.rmtree(left)
    accelerator.wait_for_everyone()


def evaluated(run: Run, step: int, score: Score | None, log: Log, stopping: Stopping) -> bool:
    """Evaluate; False where a signal ended that. Several processes, which must meet again, finish it."""
    try:
        with stopping.interruptible(run.accelerator.num_processes == 1):
            evaluate(run, step, score, log)
    except Interrupted:
        return False
    return True


def evaluate(run: Run, step: int, score: Score | None, log: Log) -> None:
    """Held-out loss and simulated τ, τ by the verifier; saves the head when it is the best yet."""
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
        if log.best is None or current > log.best:
            keep(head, run.out / "head", step, current, log)
    elif score is not None and run.recipe.target.parallel:  # the main process's passes go through this one's part, too
        score(run.target, run.copied())
    log.write({"step": step, "seconds": time.perf_counter() - began, **report}, "held_out")


def keep(head: DraftHead, place: Path, step: int, tau: float, log: Log) -> None:
    """Save the best head so far. Where it cannot be written, say so and keep the one before."""
    try:
        with new_directory(place, force=True) as partial:
            head.save(partial)
    except (OSError, SafetensorError) as error:
        note(f"WARNING: the best head so far, of step {step}, could not be written ({first_line(error)}): make room in {place}")
        return
    log.best, log.best_step = tau, step
