"""What a run would be: everything a recipe names is resolved, except that no weights are loaded and nothing is written."""

from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from ..data.conversations import Reading, read_conversations
from ..data.records import local_files
from ..data.tally import Tally
from ..errors import UserError
from ..fetch import load_tokenizer, located
from ..heads.base import DraftHead, read_config
from ..heads.kinds import KINDS
from ..recipes.schema import Recipe
from ..target import UNREADABLE, Target
from .prepare import check_start


class Skeleton(Target):
    """A target of shapes alone: nothing can be computed with it, so its final norm is not looked for."""

    def _find_final_norm(self) -> None:
        return None


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe, the conversations of its data files, the sizes of target and head, and what stays unresolved.

    Data files that are there are read in full. The target is built without weights from its config, which must lie in a
    local directory or the hub's cache, or be reachable. Raises UserError for a mistake in anything that could be read;
    ``unresolved`` says, part by part, what could not.
    """
    found: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "data": {},
        "target": None,
        "head": None,
        "unresolved": [],
    }
    for part in ("train", "held_out"):
        sources, tally = recipe.sources(part), Tally(strict=recipe.data.strict)
        if any(not local_files(source) for source in sources):
            missing = next(source for source in sources if not local_files(source))
            found["unresolved"].append(f"data.{part}: {missing} is neither in the working directory nor beside the recipe")
            continue
        data = recipe.data
        for _ in read_conversations(sources, tally, Reading(data.format, data.columns, data.salvage, data.split)):
            pass
        found["data"][part] = {"sources": sources, **tally.as_json()}
    if found["data"]:
        found["unresolved"].append("data: rows that hold nothing to learn are told once they are tokenized")
    try:
        target = load_skeleton(recipe.target.name)
    except UNREADABLE as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        found["unresolved"].append(f"target: the config of {recipe.target.name} could not be read ({reason})")
        found["unresolved"].append("head: its sizes follow from the target's config")
        return found
    if target.tokenizer is None:
        found["unresolved"].append(f"tokenizer: none could be read for {recipe.target.name}")
    else:
        target.tokenizer_or_refuse()
    head = head_of(recipe, target)
    found["target"] = {
        "name": target.name,
        "architecture": type(target.model).__name__,
        "depth": target.depth,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "parameters": parameters(target.model),
    }
    found["head"] = {
        "kind": head.kind,
        "taps": head.config.taps,
        "depths": head.config.depths,
        "draft_vocab_size": head.config.draft_vocab_size,
        "layer": head.config.layer,
        "parameters": parameters(head),
    }
    return found


def load_skeleton(name: str) -> Skeleton:
    """The target without its weights; the tokenizer is None where there is none to read."""
    path, where = located(name)
    config = AutoConfig.from_pretrained(path, **where)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    try:
        tokenizer = load_tokenizer(path, **where)
    except UNREADABLE:
        tokenizer = None
    return Skeleton(model, tokenizer, name)


def head_of(recipe: Recipe, target: Target) -> DraftHead:
    """The head that the recipe asks for, without weights."""
    section, kind = recipe.head, KINDS[recipe.head.kind]
    size, taps = section.draft_vocab or target.vocab_size, section.taps
    if section.init_from:
        old = read_config(section.init_from)
        check_start(recipe, old, target)
        size, taps = old.draft_vocab_size, old.taps
    if size > target.vocab_size:
        raise UserError(f"draft vocabulary of {size} is larger than the target's {target.vocab_size}: lower head.draft_vocab.")
    with torch.device("meta"):
        options = kind.Options.model_validate(section.options)
        return kind.create(target, options, taps, section.depths, torch.arange(size), section.confidence)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
