"""The config of a model that cannot be read here: from the shapes of a few public models that travel with the recipes."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..errors import first_line
from ..fetch import located
from ..recipes import targets
from ..target import UNREADABLE

SHAPES = Path(targets.__file__).parent


def config_of(name: str) -> tuple[Any, str | None]:
    """The transformers config of a model directory, hub id or .gguf file, and None; or a stand-in, and why it is one.

    A stand-in is known by the last part of the name, so that a directory that is still to be filled has one, too. Nothing is
    downloaded but a config that the hub gives. Raises what transformers raises where there is neither.
    """
    path, where = located(name, fetch=False)
    try:
        return AutoConfig.from_pretrained(path, **where), None
    except UNREADABLE as error:
        file = SHAPES / f"{Path(name).name}.json"
        if not file.is_file():
            raise
        known = json.loads(file.read_text(encoding="utf-8"))
        said = f"sizes are those stated in recipes/targets/{file.name} for {known['model']}, made by {known['made_by']}"
        return AutoConfig.for_model(**known["shape"]), f"the config of {name} could not be read ({first_line(error)}): {said}"
