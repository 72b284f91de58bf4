"""The training run, top to bottom: what is loaded, what one step does, when it is measured and saved."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from torch.optim.lr_scheduler import LambdaLR

from ..console import Progress, note
from ..data.batches import epoch_plan, share
from ..data.chat import Encoded
from ..data.conversations import Reading
from ..data.examples import Examples
from ..data.examples import prepare as prepare_examples
from ..data.features import Disk, FeatureBatch, Memory, OnlineFeatures, Shelf, Source, StoredFeatures
from ..data.manifest import Identity
from ..data.store import Store
from ..data.tally import Tally
from ..data.vocab import DraftVocabulary, choose, count_tokens, holding, special_ids
from ..errors import UserError
from ..heads.base import DraftHead, HeadConfig, check_target
from ..heads.kinds import KINDS, load_head
from ..outputs import new_directory, refuse_existing
from ..recipes.schema import Recipe, load_recipe
from ..target import Target
from . import checkpoints
from .calibration import calibrate
from .metrics import DepthSums
from .objectives import Objective
from .provenance import write_run
from .rollouts import rollouts
from .step import judged

MISMATCH = 0.8  # the verifier's τ may fall this far below the simulated one on a few prompts by chance

Score = Callable[[Target, DraftHead], float]  # a head's τ by the verifier


def train(recipe: Recipe, score: Score | None = None, resume: bool = False, force: bool = False) -> dict[str, Any]:
    """Run a recipe. Returns the last evaluation's metrics and leaves the best head in ``output``/head.

    ``score`` gives a head's τ by the verifier; the best head is the best by it, or by the simulated τ without one. Every
    process of an ``accelerate launch`` calls this.
    """
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
    log = Log(accelerator, out, recipe, done if resume else None)
    best, every = log.best, recipe.train.eval_every or run.steps
    if done not in log.evaluated and (done == 0 or done % every == 0):
        best = evaluate(run, done, best, score, log)
    report: dict[str, float] = {}
    with Progress("training", run.steps, done=done, show=accelerator.is_main_process) as bar:
        sums = DepthSums.zeros(recipe.head.depths, accelerator.device)
        for step in range(done + 1, run.steps + 1):
            sums.add(run.advance(step, run.global_batch(step - 1)))
            if step % recipe.train.log_every == 0 or step == run.steps:
                report = sums.reduced(accelerator).report(run.shares)
                lost = {"damaged_rows": run.train.lost} if run.train.lost else {}
                log.write({"step": step, "lr": run.lr, "padding": run.padding(), **lost, **report}, "train")
                sums = DepthSums.zeros(recipe.head.depths, accelerator.device)
            bar.advance(1, " ".join(f"{k} {v:.3f}" for k, v in report.items()))
            if recipe.train.checkpoint_every and step % recipe.train.checkpoint_every == 0:
                run.train.flush()
                checkpoints.save(accelerator, out / "checkpoints", step, recipe.train.keep_checkpoints)
            if step % every == 0 or step == run.steps:
                best = evaluate(run, step, best, score, log)
    run.train.flush()
    steps = run.steps
    accelerator.wait_for_everyone()
    del run  # DDP's reducer holds the process group, and a gloo group that dies after end_training never joins its threads
    accelerator.free_memory()
    accelerator.end_training()
    return {"steps": steps, "best_tau": best, "head": str(out / "head"), **log.last}


def start(recipe: Recipe) -> Accelerator:
    """The accelerator with the recipe's precision and tracker. wandb stays offline unless a key is set."""
    precision = recipe.train.precision
    if precision == "auto":
        on_gpu = str(PartialState().device).startswith("cuda")
        has_bf16 = torch.cuda.is_bf16_supported() if on_gpu else torch.cpu._is_avx512_bf16_supported()
        precision = "bf16" if has_bf16 else "no"
    tracker = None if recipe.train.tracker == "none" else recipe.train.tracker
    return Accelerator(mixed_precision=precision, log_with=tracker, project_dir=recipe.output)


def claim(accelerator: Accelerator, out: Path, resume: bool) -> None:
    """Make the run directory, empty unless the run goes on in it. Called once everything that can be refused has been read."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if out.exists() and not resume:
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()


@dataclass
class Run:
    """Everything one step needs."""

    recipe: Recipe
    accelerator: Accelerator
    target: Target
    head: Any  # wrapped by accelerate
    optimizer: Any
    scheduler: Any
    train: Source
    held_out: Source
    vocabulary: DraftVocabulary
    data: dict[str, Any]  # what the examples were made from, and what became of the rows
    out: Path
    plans: dict[int, list[list[int]]] = field(default_factory=dict)
    tokens: int = 0  # read by this process since the last report
    slots: int = 0  # the same with padding
    lr: float = 0.0  # of the last step

    @property
    def objective(self) -> Objective:
        return Objective(**self.recipe.objective.model_dump())

    @property
    def shares(self) -> torch.Tensor:
        """The weight of every depth's mean loss [depths]."""
        return self.objective.shares(self.recipe.head.depths)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train.lengths) // self.recipe.train.batch_size)

    @property
    def steps(self) -> int:
        return self.recipe.train.max_steps or self.recipe.train.epochs * self.steps_per_epoch

    def global_batch(self, step: int) -> list[int]:
        """The rows of a global batch, the same on every process and after every restart."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self.plans:
            lengths = self.train.lengths.tolist()
            self.plans = {epoch: epoch_plan(lengths, self.recipe.train.batch_size, self.recipe.train.seed, epoch)}
        return self.plans[epoch][index]

    def padding(self) -> float:
        """The share of padding in the lines that this process has read since the last call."""
        share = 1 - self.tokens / max(self.slots, 1)
        self.tokens = self.slots = 0
        return share

    def micro_batches(self, source: Source, rows: list[int]) -> Iterator[FeatureBatch]:
        """This process's share of a global batch; where its rows have run out, one row without supervision."""
        settings, state = self.recipe.train, self.accelerator
        for own in share(rows, state.process_index, state.num_processes, settings.micro_batch_size):
            batch = source.batch(own or rows[:1])
            if not own:
                batch.mask.zero_()
            yield batch

    def advance(self, step: int, rows: list[int]) -> DepthSums:
        """One optimizer step over one global batch.

        Every depth's loss is divided by its count of taught rows in the whole global batch, so neither padding, nor
        the cut into micro-batches and processes, nor the number of depths moves the learning rate. A batch without any
        is no step.
        """
        batches = list(self.micro_batches(self.train, rows))
        if step > self.steps * (1 - self.recipe.train.on_policy):
            batches = [self.rollouts(batch, step) for batch in batches]
        taught = [self.taught(batch, step) for batch in batches]
        own = [torch.stack([maps.sum() for maps in each]) for each in taught]
        counts = torch.as_tensor(self.accelerator.reduce(torch.stack(own).sum(0), reduction="sum"))
        sums = DepthSums.zeros(self.recipe.head.depths, self.accelerator.device)
        self.tokens += sum(batch.tokens for batch in batches)
        self.slots += sum(batch.ids.numel() for batch in batches)
        if not counts.any():
            note(f"rows {rows} supervise nothing: no step is taken")
            return sums
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with self.accelerator.autocast(), nullcontext() if last else self.accelerator.no_sync(self.head):
                loss, seen = judged(self.head, batch, self.target, self.objective, taught[i], counts)
                # DDP and FSDP average gradients over processes; the sum is what is wanted
                self.accelerator.backward(loss * self.accelerator.num_processes)
            sums.add(seen)
        norm = self.clip()
        if not torch.isfinite(torch.as_tensor(norm)):
            raise RuntimeError(f"the gradient norm is {norm}: rows {rows} give no finite loss")
        self.lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return sums

    def clip(self) -> Any:
        """Clip the gradients; returns the head's norm before. A confidence estimate has a norm of its own, so that the head
        learns the same with it as without."""
        beside = self.accelerator.unwrap_model(self.head).confidence
        if beside is None:
            return self.accelerator.clip_grad_norm_(self.head.parameters(), self.recipe.train.clip)
        own = set(beside.parameters())
        self.accelerator.clip_grad_norm_(list(own), self.recipe.train.clip)
        rest = [parameter for parameter in self.head.parameters() if parameter not in own]
        return self.accelerator.clip_grad_norm_(rest, self.recipe.train.clip)

    def taught(self, batch: FeatureBatch, step: int) -> list[torch.Tensor]:
        """The rows of a batch that this step teaches, map by map; a kind that samples draws anew at every step."""
        head: DraftHead = self.accelerator.unwrap_model(self.head)
        return head.taught(batch.ids, batch.mask, self.recipe.train.seed + step)

    def rollouts(self, batch: FeatureBatch, step: int) -> FeatureBatch:
        head: DraftHead = self.accelerator.unwrap_model(self.head)
        length = min(self.recipe.train.rollout, head.deepest or self.recipe.train.rollout)
        return rollouts(head, batch, self.target, length, self.recipe.train.seed + step)

    @torch.no_grad()
    def held_out_sums(self) -> DepthSums:
        """This process's sums over its share of the held-out rows."""
        sums = DepthSums.zeros(self.recipe.head.depths, self.accelerator.device)
        rows, size = list(range(len(self.held_out.lengths))), self.recipe.train.batch_size
        self.head.eval()
        with Progress("held-out", len(rows), show=self.accelerator.is_main_process) as bar:
            for first in range(0, len(rows), size):
                for batch in self.micro_batches(self.held_out, rows[first : first + size]):
                    with self.accelerator.autocast():
                        sums.add(judged(self.head, batch, self.target, self.objective, self.taught(batch, 0))[1])
                bar.advance(size)
        self.head.train()
        return sums

    def snapshot(self) -> DraftHead | None:
        """The head as it stands, whole and unwrapped, on the main process; None on the others. All must call it."""
        state = self.accelerator.get_state_dict(self.head)
        if not self.accelerator.is_main_process:
            return None
        config = self.accelerator.unwrap_model(self.head).config
        head = KINDS[config.kind](config)
        head.load_state_dict(state)
        return head.to(self.target.device).eval()


def prepare(recipe: Recipe, accelerator: Accelerator, out: Path, resume: bool) -> Run:
    """Load the target and the data, make the head, the optimizer and the schedule."""
    target = Target.load(recipe.target.name, recipe.target.dtype, recipe.target.device or accelerator.device)
    target.tokenizer_or_refuse()
    tallies = {"train": Tally(strict=recipe.data.strict), "held_out": Tally(strict=recipe.data.strict)}
    store = Store(Path(str(recipe.data.store))) if recipe.data.features == "store" else None
    if store:
        store.check(target, recipe.head.taps or [])
    with accelerator.main_process_first():  # the others find its tables in the cache
        examples = store.examples if store else read_examples(recipe, "train", target, tallies["train"])
        held_out = read_examples(recipe, "held_out", target, tallies["held_out"])
    size = recipe.head.draft_vocab or target.vocab_size
    counts = count_everywhere(examples, target.vocab_size, accelerator)
    if resume:  # the vocabulary of a run never changes under it
        head: DraftHead = load_head(out / "head")
        head.train()
        vocabulary = holding(head.target_ids.cpu(), counts)
    elif recipe.head.init_from:
        head = begun_from(recipe, target)
        vocabulary = holding(head.target_ids.cpu(), counts)
    else:
        vocabulary = choose(counts, size, special_ids(target.tokenizer, target.eos_ids))
        kind = KINDS[recipe.head.kind]
        options = kind.Options.model_validate(recipe.head.options)
        torch.manual_seed(recipe.train.seed)
        section = recipe.head
        head = kind.create(target, options, section.taps, section.depths, vocabulary.target_ids, section.confidence)
    if accelerator.is_main_process:
        for part, tally in tallies.items():
            tally.warn()
            note(f"{part}: {tally.sentence()}" if tally.read else f"{part}: {len(examples)} rows of {recipe.data.store}")
        share_inside = f"covers {vocabulary.coverage:.2%} of the supervised tokens"
        note(f"draft vocabulary {len(vocabulary.d2t)} of {target.vocab_size}: {share_inside}")
    groups = parameter_groups(head, recipe.train.lr)
    optimizer = torch.optim.AdamW(groups, lr=recipe.train.lr, betas=recipe.train.betas, weight_decay=recipe.train.weight_decay)
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    width = recipe.data.max_length if recipe.data.pack else None
    if store:
        train: Source = StoredFeatures(store, target, head.config.taps, width, recipe.data.strict)
    else:
        train = OnlineFeatures(target, examples, head.config.taps, shelf(recipe, target, examples, head, accelerator), width)
    held = OnlineFeatures(target, held_out, head.config.taps, Memory() if recipe.data.features == "memory" else None, width)
    data: dict[str, Any] = {
        part: {"sources": recipe.sources(part), "fingerprint": found.fingerprint, **tallies[part].as_json()}
        for part, found in (("train", examples), ("held_out", held_out))
        if isinstance(found, Examples)
    }
    if store:
        data["train"] = {"store": recipe.data.store, **store.identity.data.model_dump()}
    data["draft_vocabulary"] = {"size": len(vocabulary.d2t), "coverage": vocabulary.coverage}
    run = Run(recipe, accelerator, target, wrapped, optimizer, None, train, held, vocabulary, data, out)
    # not prepared: accelerate would step it once per process, and our step is already global
    run.scheduler = LambdaLR(getattr(optimizer, "optimizer", optimizer), partial(rate, recipe=recipe, steps=run.steps))
    accelerator.register_for_checkpointing(run.scheduler)
    return run


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


def begun_from(recipe: Recipe, target: Target) -> DraftHead:
    """The recipe's head with the weights of the head that ``head.init_from`` holds, whose vocabulary and taps it keeps.

    What that head does not have (an adapter, further depths) starts fresh, and is named. Raises UserError where the two
    cannot be the same head: another target, kind or vocabulary, other taps, a tensor without a place or of another shape.
    """
    section, source = recipe.head, str(recipe.head.init_from)
    old = load_head(source)
    check_start(recipe, old.config, target)
    options = KINDS[section.kind].Options.model_validate(section.options)
    torch.manual_seed(recipe.train.seed)
    taps, ids = old.config.taps, old.target_ids.cpu()
    head = KINDS[section.kind].create(target, options, taps, section.depths, ids, section.confidence)
    ours, theirs = head.tensors(), old.tensors()
    for name, tensor in theirs.items():
        if name not in ours or ours[name].shape != tensor.shape:
            is_here = "is missing" if name not in ours else f"has the shape {list(ours[name].shape)}"
            raise UserError(
                f"{source} holds {name!r} of shape {list(tensor.shape)}, which {is_here} in the recipe's head: make "
                "head.options, head.depths and head.confidence fit."
            )
    head.load_state_dict(theirs, strict=False)
    fresh = sorted({".".join(name.split(".")[:2]) for name in ours.keys() - theirs.keys()})
    if fresh:
        note(f"not in {source}, so fresh: {', '.join(fresh)}")
    return head


def check_start(recipe: Recipe, old: HeadConfig, target: Target) -> None:
    """Raise UserError where the head in ``head.init_from`` is of another target, or of other sizes than the recipe names."""
    check_target(old, target)
    for key, has in (("kind", old.kind), ("taps", old.taps), ("draft_vocab", old.draft_vocab_size)):
        asked = getattr(recipe.head, key)
        if asked is not None and asked != has:
            source = recipe.head.init_from
            raise UserError(f"head.{key} is {asked} in the recipe and {has} in {source}: leave it out or write {has}.")


def parameter_groups(head: DraftHead, lr: float) -> list[dict[str, Any]]:
    """What is trained, by learning rate; the first group has ``lr`` itself, though it may be empty."""
    groups: dict[float, list[torch.nn.Parameter]] = {1.0: []}
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(head.rate(name), []).append(parameter)
    return [{"params": own, "lr": lr * factor} for factor, own in groups.items()]


def rate(done: int, recipe: Recipe, steps: int) -> float:
    """The learning rate of the step after ``done`` steps, as a share of lr: linear warm-up, then a cosine to ``final_lr``.

    No step is lost at either end: the first has 1 / warm-up steps of lr, the last has ``final_lr``.
    """
    warm, final = max(1, round(recipe.train.warmup * steps)), recipe.train.final_lr
    if done < warm:
        return (done + 1) / warm
    progress = min((done + 1 - warm) / max(1, steps - warm), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def read_examples(recipe: Recipe, part: str, target: Target, tally: Tally) -> Examples:
    """The encoded conversations of one part of the recipe's data."""
    data = recipe.data
    reading = Reading(data.format, data.columns, data.salvage, data.split)
    return prepare_examples(
        recipe.sources(part),
        target.tokenizer,
        target.vocab_size,
        data.max_length,
        tally,
        reading,
        data.only_last,
        data.workers,
    )


def shelf(
    recipe: Recipe, target: Target, examples: Sequence[Encoded], head: DraftHead, accelerator: Accelerator
) -> Shelf | None:
    """Where the training rows' states are kept between epochs; None: nowhere."""
    if recipe.data.features == "memory":
        return Memory()
    if recipe.data.features == "online":
        return None
    identity = Identity.of(target, examples, head.config.taps, recipe.data.store_dtype)
    budget = 1e9 * (recipe.data.store_budget or math.inf) / accelerator.num_processes
    with accelerator.main_process_first():  # it makes the store, the others find it
        return Disk(Path(str(recipe.data.store)), identity, target.dtype, budget, f"rank-{accelerator.process_index}")


def count_everywhere(examples: Sequence[Encoded], vocab_size: int, accelerator: Accelerator) -> torch.Tensor:
    """How often each token is supervised: every process counts its share of the examples, and the shares are summed."""
    own = range(accelerator.process_index, len(examples), accelerator.num_processes)
    counts = count_tokens((examples[row] for row in own), vocab_size)
    return torch.as_tensor(accelerator.reduce(counts.to(accelerator.device), reduction="sum")).cpu()


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


class Log:
    """metrics.jsonl, the tracker and a line on stderr; from the main process only."""

    def __init__(self, accelerator: Accelerator, out: Path, recipe: Recipe, resumed_at: int | None) -> None:
        self.accelerator = accelerator
        self.file = out / "metrics.jsonl"
        self.last: dict[str, Any] = {}
        kept: list[dict[str, Any]] = []
        if resumed_at is not None and self.file.exists():  # what came after the checkpoint will come again
            kept = [row for row in map(json.loads, self.file.read_text().splitlines()) if row["step"] <= resumed_at]
        held_out = [row for row in kept if row["part"] == "held_out"]
        self.evaluated = {row["step"] for row in held_out}
        self.best: float | None = max((row.get("tau", row["tau_sim"]) for row in held_out), default=None)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        if recipe.train.tracker == "wandb":
            import wandb

            if not wandb.api.api_key:
                os.environ.setdefault("WANDB_MODE", "offline")
        accelerator.init_trackers("draftsmith")

    def write(self, values: dict[str, Any], part: str) -> None:
        if not self.accelerator.is_main_process:
            return
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **values}) + "\n")
        self.accelerator.log({f"{part}/{key}": value for key, value in values.items() if key != "step"}, step=values["step"])
        if part == "held_out":
            self.last = values
            note(f"step {values['step']}: held-out " + " ".join(f"{k} {v:.3f}" for k, v in values.items() if k != "step"))
