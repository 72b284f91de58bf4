"""What a run would be: everything a recipe names is resolved, except that no weights are loaded and nothing is written."""

from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from transformers import AutoModelForCausalLM

from ..data.chat import NO_SUPERVISION, Refused, encode, supervises
from ..data.conversations import Reading, read_conversations
from ..data.manifest import Manifest
from ..data.records import local_files
from ..data.tally import Tally
from ..errors import UserError, first_line
from ..fetch import load_tokenizer, located
from ..heads.base import DraftHead, read_config
from ..heads.kinds import KINDS
from ..recipes.schema import Recipe
from ..target import UNREADABLE, Target
from . import footprint
from .prepare import check_start
from .stand_in import config_of

SAMPLE = 200  # conversations that are tokenized to tell how many tokens all are


class Skeleton(Target):
    """A target of shapes alone: nothing can be computed with it, so its final norm is not looked for."""

    def _find_final_norm(self) -> None:
        return None


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe, the conversations of its data files, sizes, memory, steps, disk, and what stays unresolved.

    Data files that are there are read in full. The target is built without weights from its config, which may lie in a
    local directory, in the hub's cache or on the hub; for some public models sizes are known without it (``stand_in``).
    Raises UserError for a mistake in anything that could be read; ``unresolved`` says, part by part, what could not.
    """
    found: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "data": {},
        "target": None,
        "head": None,
        "unresolved": [],
    }
    unresolved: list[str] = found["unresolved"]
    for part in ("train", "held_out"):
        sources, tally = recipe.sources(part), Tally(strict=recipe.data.strict)
        if any(not local_files(source) for source in sources):
            missing = next(source for source in sources if not local_files(source))
            unresolved.append(f"data.{part}: {missing} is neither in the working directory nor beside the recipe")
            continue
        for _ in read_conversations(sources, tally, reading(recipe)):
            pass
        found["data"][part] = {"sources": sources, **tally.as_json()}
    if found["data"]:
        unresolved.append("data: rows that hold nothing to learn are told once they are tokenized")
    try:
        target, stands_in = load_skeleton(recipe.target.name)
    except UNREADABLE as error:
        unresolved.append(f"target: the config of {recipe.target.name} could not be read ({first_line(error)})")
        unresolved.append("head: its sizes follow from the target's config")
        return found
    if stands_in:
        unresolved.append(f"target: {stands_in}")
    if target.tokenizer is None:
        unresolved.append(f"tokenizer: none could be read for {recipe.target.name}")
    else:
        target.tokenizer_or_refuse()
    rows, tokens = amount_of_data(recipe, target, found["data"])
    head, stands_in = head_of(recipe, target)
    if stands_in:
        unresolved.append(f"head.options.model: {stands_in}; its tokenizer was not compared")
    trained, frozen = footprint.counted(head)
    dtype = target.dtype if recipe.target.dtype == "auto" else getattr(torch, recipe.target.dtype)
    found["target"] = {
        "name": recipe.target.name,
        "architecture": type(target.model).__name__,
        "depth": target.depth,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "dtype": footprint.name(dtype),
        "parameters": footprint.numbers(target.model),
    }
    found["head"] = {
        "kind": head.kind,
        "taps": head.config.taps,
        "depths": head.config.depths,
        "draft_vocab_size": head.config.draft_vocab_size,
        "layer": head.config.layer,
        "parameters": trained + frozen,
        "trained": trained,
        "frozen": frozen,
    }
    found["features"] = {
        "bytes_per_token": footprint.feature_bytes(target, head, dtype),
        "from": f"({len(head.config.taps)} taps + 1 last state) x {target.hidden_size:,} x {dtype.itemsize} bytes",
    }
    parts = footprint.memory(recipe, target, head, dtype, torch.device(str(PartialState().device)))
    whole = footprint.Amount(sum(part.bytes for part in parts.values()), "the parts above, were they all on one device")
    found["memory"] = {name: part.as_json() for name, part in (parts | {"all": whole}).items()}
    flops = footprint.arithmetic(target, head, recipe.data.max_length)
    found["arithmetic"] = {
        "GFLOP_per_token": {name: round(each / 1e9, 3) for name, each in flops.items()},
        "from": "2 for every weight that a token meets, forward, and 4 more backward; attention over half of data.max_length",
    }
    found["steps"] = steps(recipe, rows)
    found["tokens"] = tokens
    found["disk"] = {name: part.as_json() for name, part in disk(recipe, target, head, tokens["per_epoch"]).items()}
    found["unresolved"] = found.pop("unresolved")  # the last that is printed
    return found


def reading(recipe: Recipe) -> Reading:
    return Reading(recipe.data.format, recipe.data.columns, recipe.data.salvage, recipe.data.split)


def load_skeleton(name: str) -> tuple[Skeleton, str | None]:
    """The target without its weights, and why its config is a stand-in where it is one; the tokenizer is None where there
    is none to read."""
    config, stands_in = config_of(name)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    tokenizer = None
    if not stands_in:
        path, where = located(name, fetch=False)
        with suppress(*UNREADABLE):
            tokenizer = load_tokenizer(path, **where)
    return Skeleton(model, tokenizer, name), stands_in


def head_of(recipe: Recipe, target: Target) -> tuple[DraftHead, str | None]:
    """The head that the recipe asks for, without weights, and why the LM that it is made of is a stand-in where it is one."""
    section, kind = recipe.head, KINDS[recipe.head.kind]
    size, taps, options, stands_in = section.draft_vocab or target.vocab_size, section.taps, dict(section.options), None
    if section.init_from:
        old = read_config(section.init_from)
        check_start(recipe, old, target)
        size, taps = old.draft_vocab_size, old.taps
    if size > target.vocab_size:
        raise UserError(f"draft vocabulary of {size} is larger than the target's {target.vocab_size}: lower head.draft_vocab.")
    with TemporaryDirectory() as scratch, torch.device("meta"):
        if options.get("model"):
            stands_in = sibling_stand_in(options, Path(scratch))
        if stands_in:
            target.tokenizer = None
        if target.tokenizer is None and "mask_token" in options:  # which token it is changes no size
            options["mask_token"] = options["mask_token"] or target.vocab_size - 1
        head = kind.create(
            target, kind.Options.model_validate(options), taps, section.depths, torch.arange(size), section.confidence
        )
    return head, stands_in


def sibling_stand_in(options: dict[str, Any], scratch: Path) -> str | None:
    """Where the config of ``options.model`` cannot be read and a stand-in is known, let the options name one in ``scratch``."""
    try:
        config, stands_in = config_of(options["model"])
    except UNREADABLE:
        return None  # the head's own check names the mend
    if stands_in:
        config.save_pretrained(scratch)
        options["model"] = str(scratch)
    return stands_in


# -- how long, and how much of the disk --------------------------------------------------------------------------------


def amount_of_data(recipe: Recipe, target: Target, data: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """How many conversations an epoch has, and its tokens; None where they cannot be known."""
    store = Path(str(recipe.data.store)) if recipe.data.features == "store" else None
    if store is not None and store.is_dir():
        held = Manifest.read(store).identity.data
        return held.rows, {"per_epoch": held.tokens, "from": f"the manifest of {store}"}
    if store is not None or "train" not in data:
        return None, {"per_epoch": None, "from": "unknown: the data are not there"}
    rows: int = data["train"]["rows"]["kept"]
    if target.tokenizer is None:
        most = rows * recipe.data.max_length
        return rows, {
            "per_epoch": None,
            "from": f"unknown without a tokenizer; at most {rows} x {recipe.data.max_length} = {most}",
        }
    tally, lengths, read = Tally(), [], 0
    for conversation in islice(read_conversations(recipe.sources("train"), tally, reading(recipe)), SAMPLE):
        read += 1
        try:
            example = encode(conversation, target.tokenizer, recipe.data.max_length, recipe.data.only_last)
        except Refused:
            continue
        if supervises(example.mask):
            lengths.append(len(example.ids))
    if not lengths:
        return rows, {"per_epoch": None, "from": f"unknown: {NO_SUPERVISION} in the first {read} conversations"}
    mean, share = sum(lengths) / len(lengths), len(lengths) / read
    said = f"{rows} conversations x {mean:.1f} tokens, the mean of the first {read}"
    if share < 1:
        said += f", of which {1 - share:.1%} teach nothing"
    return rows, {"per_epoch": round(rows * share * mean), "from": said}


def steps(recipe: Recipe, rows: int | None) -> dict[str, Any]:
    """Optimizer steps of the run."""
    settings = recipe.train
    if settings.max_steps:
        return {"number": settings.max_steps, "from": "train.max_steps"}
    if rows is None:
        return {"number": None, "from": "unknown: the data are not there"}
    each = -(-rows // settings.batch_size)
    return {
        "number": settings.epochs * each,
        "from": f"{settings.epochs} epochs x {rows} conversations / {settings.batch_size} a step (train.batch_size)",
    }


def disk(recipe: Recipe, target: Target, head: DraftHead, tokens: int | None) -> dict[str, footprint.Amount]:
    """What the run writes, and for a store what it reads."""
    size, kept = footprint.checkpoint_bytes(head), recipe.train.keep_checkpoints if recipe.train.checkpoint_every else 0
    trained = f"{sum(footprint.counted(head)):,} parameters"
    found = {
        "head": footprint.Amount(sum(footprint.counted(head)) * 4, f"{trained} x 4 bytes"),
        "checkpoints": footprint.Amount(
            kept * size, f"{kept} kept x {size:,} bytes: the head and AdamW's two moments (train.keep_checkpoints)"
        ),
    }
    each = footprint.store_bytes(recipe, target, head)
    if recipe.data.features in ("store", "write-through"):
        limit = recipe.data.store_budget
        said = f"{each:,.0f} bytes a token ({recipe.data.store_dtype}, with id and mask)"
        if tokens is None:
            found["store"] = footprint.Amount(0, f"unknown tokens x {said}")
        elif limit and tokens * each > limit * 1e9:
            found["store"] = footprint.Amount(limit * 1e9, f"data.store_budget; all would be {tokens:,} tokens x {said}")
        else:
            found["store"] = footprint.Amount(tokens * each, f"{tokens:,} tokens x {said}")
    return found
