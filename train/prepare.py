"""What a run is made of: the target, the data, the head, its optimizer and its schedule."""

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR

from ..console import note
from ..data.chat import Encoded
from ..data.conversations import Reading
from ..data.engine import Engine, EngineStates, layers_for
from ..data.examples import Examples
from ..data.examples import prepare as prepare_examples
from ..data.features import Disk, Memory, OnlineFeatures, Shelf, Source, StoredFeatures, lengths_of
from ..data.manifest import Identity
from ..data.store import Store
from ..data.tally import Tally
from ..data.vocab import choose, count_tokens, holding, special_ids
from ..ends import Ends
from ..errors import UserError
from ..heads.base import DraftHead, HeadConfig, check_target
from ..heads.kinds import KINDS, load_head
from ..recipes.schema import Recipe
from ..target import Target
from .checkpoints import Checkpoint, keep_heads_apart
from .deepspeed import check_deepspeed, under_deepspeed
from .run import Run
from .sharding import check_held, load_target


def start(recipe: Recipe) -> Accelerator:
    """The accelerator with the recipe's precision.

    Where a launcher starts several processes and there is no accelerator, they join over gloo: left to itself, accelerate
    would take each of them for a run of its own.
    """
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if deepspeed:
        check_deepspeed()
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or (several and not torch.accelerator.is_available())
    PartialState(cpu=cpu, timeout=timedelta(minutes=recipe.train.timeout))
    precision = recipe.train.precision
    if precision == "auto":
        on_gpu = str(PartialState().device).startswith("cuda")
        has_bf16 = torch.cuda.is_bf16_supported() if on_gpu else torch.cpu._is_avx512_bf16_supported()
        precision = "bf16" if has_bf16 else "no"
    if deepspeed:
        return under_deepspeed(recipe, precision)
    return Accelerator(mixed_precision=precision, cpu=cpu)


def prepare(recipe: Recipe, accelerator: Accelerator, out: Path, checkpoint: Checkpoint | None = None) -> Run:
    """Load the target and the data, make the head, or that of the checkpoint, the optimizer and the schedule."""
    if recipe.data.engine:
        target: Target = Ends.load(recipe.target.name, recipe.target.dtype, recipe.target.device or accelerator.device)
    else:
        target = load_target(recipe, accelerator)
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
    if checkpoint:  # the vocabulary of a run never changes under it
        head: DraftHead = load_head(checkpoint.path / "head")
        check_target(head.config, target)
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
    if recipe.data.engine and head.adapts:
        raise UserError("head.options.lora trains adapters in the target's layers, which data.engine leaves out: take one out.")
    check_held(recipe, accelerator, head)
    if recipe.train.gradient_checkpointing:
        head.recompute()
    if recipe.train.compile:
        head.compile_stretches()
    groups = parameter_groups(head, recipe.train.lr)
    settings = recipe.train
    optimizer = torch.optim.AdamW(  # fused: no temporary copies of the weights, of which there are many by lm_heads
        groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    width = recipe.data.max_length if recipe.data.pack else None
    if store:
        train: Source = StoredFeatures(store, target, head.config.taps, width, recipe.data.strict)
    else:
        kept = shelf(recipe, target, examples, head, accelerator)
        given = engine(recipe, target, head.config.taps, examples)
        train = OnlineFeatures(target, examples, head.config.taps, kept, width, given, recipe.data.strict)
    kept, given = Memory() if recipe.data.features == "memory" else None, engine(recipe, target, head.config.taps, held_out)
    held = OnlineFeatures(target, held_out, head.config.taps, kept, width, given)
    data: dict[str, Any] = {
        part: {"sources": recipe.sources(part), "fingerprint": found.fingerprint, **tallies[part].as_json()}
        for part, found in (("train", examples), ("held_out", held_out))
        if isinstance(found, Examples)
    }
    if store:
        data["train"] = {"store": recipe.data.store, **store.identity.data.model_dump()}
    data["draft_vocabulary"] = {"size": len(vocabulary.d2t), "coverage": vocabulary.coverage}
    run = Run(
        recipe,
        accelerator,
        target,
        wrapped,
        optimizer,
        None,
        train,
        held,
        vocabulary,
        data,
        out,
        chunk=checkpoint.chunk if checkpoint else None,
    )
    # not prepared: accelerate would step it once per process, and our step is already global
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, and DeepSpeed's inside it
        optimizer = optimizer.optimizer
    run.scheduler = LambdaLR(optimizer, partial(rate, recipe=recipe, steps=run.steps))
    accelerator.register_for_checkpointing(run.scheduler)
    keep_heads_apart(accelerator)
    return run


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


def engine(recipe: Recipe, target: Target, taps: Sequence[int], examples: Sequence[Encoded]) -> EngineStates | None:
    """The recipe's engine, for the rows of one part of the data; None: this process runs the target."""
    section = recipe.data.engine
    if section is None:
        return None
    layers = section.layers or layers_for(taps, target.depth)
    folder = Path(section.folder) if section.folder else None
    server = Engine(section.url, layers, section.model, folder, section.in_flight, section.timeout)
    server.connect(target, int(lengths_of(examples).max()))
    return EngineStates(server, target, taps, section.ahead, recipe.data.strict)


def count_everywhere(examples: Sequence[Encoded], vocab_size: int, accelerator: Accelerator) -> torch.Tensor:
    """How often each token is supervised: every process counts its share of the examples, and the shares are summed."""
    own = range(accelerator.process_index, len(examples), accelerator.num_processes)
    counts = count_tokens((examples[row] for row in own), vocab_size)
    return torch.as_tensor(accelerator.reduce(counts.to(accelerator.device), reduction="sum")).cpu()
