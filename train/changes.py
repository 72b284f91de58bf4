"""Which keys of a recipe may change when a run is resumed."""

from typing import Any

from ..errors import UserError
from ..recipes.schema import Recipe

# Section by section, the keys that a checkpoint's state hangs on. All other keys may change.
FIXED = {
    "target": (),
    "data": ("train", "split", "columns"),  # another corpus, or other parts of it: the place in the data would mean nothing
    "head": ("kind", "taps", "depths", "draft_vocab", "init_from", "confidence", "options"),
    "objective": (),
    "train": ("batch_size", "seed", "lr", "betas", "weight_decay"),  # the order of the rows, and the optimizer's state
    "eval": (),
}


def check_changes(recipe: Recipe, before: Recipe) -> list[str]:
    """What ``recipe`` changes in a run that was started with ``before``, key by key, each in words.

    Raises UserError that lists all changes of keys that may not change.
    """
    found = [
        (f"{section}.{key}", getattr(getattr(before, section), key), getattr(getattr(recipe, section), key), key in fixed)
        for section, fixed in FIXED.items()
        for key in type(getattr(recipe, section)).model_fields
    ]
    changed = [each for each in found if each[1] != each[2]]
    refused = [in_words(*each[:3]) for each in changed if each[3]]
    if refused:
        may = ", ".join(f"{section}.*" for section, fixed in FIXED.items() if not fixed)
        but = ", ".join(f"{section}.{key}" for section, fixed in FIXED.items() for key in fixed)
        raise UserError(
            f"a resumed run keeps {'; '.join(refused)}: write the old values, or start anew with head.init_from. What may "
            f"change: {may}, and all else but {but}."
        )
    return [in_words(*each[:3]) for each in changed]


def in_words(key: str, before: Any, now: Any) -> str:
    return f"{key} ({before} before, {now} now)"
