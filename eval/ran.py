"""What a finished run, or a head alone, leaves behind for a diagnosis to read."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..data.chat import Encoded, encode, supervises
from ..data.conversations import Conversation, Reading, read_conversations
from ..data.store import Store
from ..data.tally import Tally
from ..data.template import Refused
from ..errors import UserError
from ..recipes.schema import Recipe, load_recipe

THINNED = 8  # of so many conversations at the front of the data one is looked at


@dataclass(frozen=True)
class Ran:
    """A run's files. A head directory alone has no ``recipe``, an empty ``curve`` (metrics.jsonl) and no sources.

    ``store``: the feature store that the run trained on, whose ids and masks are a record of what it was taught.
    """

    head: Path
    recipe: Recipe | None
    curve: list[dict[str, Any]]
    train: list[str]
    held_out: list[str]
    store: Path | None


@dataclass(frozen=True)
class Row:
    """A conversation as a run reads it, and its category."""

    example: Encoded
    category: str


def read_ran(place: Path) -> Ran:
    """Read a run directory or a head directory. Raises UserError where it is neither."""
    if (place / "config.json").is_file():
        return Ran(place, None, [], [], [], None)
    if not (place / "recipe.yaml").is_file() or not (place / "head" / "config.json").is_file():
        raise UserError(f"{place} is neither a run (recipe.yaml and head/) nor a head (config.json): name one of them.")
    recipe = load_recipe(place / "recipe.yaml")
    record = json.loads((place / "run.json").read_text()) if (place / "run.json").is_file() else {}
    metrics = place / "metrics.jsonl"
    curve = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    named = {
        part: record.get("data", {}).get(part, {}).get("sources") or recipe.sources(part) for part in ("train", "held_out")
    }
    store = Path(str(recipe.data.store)) if recipe.data.features == "store" else None
    return Ran(place / "head", recipe, curve, named["train"], named["held_out"], store if store and store.exists() else None)


def stored_rows(store: Path, count: int) -> list[Row]:
    """Some rows of a feature store, evenly from all over it."""
    opened = Store(store)
    places = np.flatnonzero(opened.lengths)
    places = places[np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)]
    return [Row(opened.example(int(row)), "all") for row in places]


def some_rows(sources: Sequence[str], tokenizer: Any, recipe: Recipe | None, count: int, skip: int = 0) -> list[Row]:
    """Some of the sources' conversations behind the first ``skip``, encoded for a tokenizer as the recipe says."""
    settings = recipe.data if recipe else None
    reading = Reading(settings.format, settings.columns, settings.salvage, settings.split) if settings else Reading()
    length, only_last = (settings.max_length, settings.only_last) if settings else (2048, False)
    front = list(islice(answered(sources, reading), skip, skip + count * THINNED))
    found = []
    for conversation in front[:: max(1, len(front) // count)]:
        try:
            example = encode(conversation, tokenizer, length, only_last)
        except Refused:
            continue
        if supervises(example.mask):
            found.append(Row(example, str(conversation.about.get("category") or "all")))
    return found[:count]


def answered(sources: Sequence[str], reading: Reading) -> Iterator[Conversation]:
    return (one for one in read_conversations(sources, Tally(), reading) if not one.unanswered)
