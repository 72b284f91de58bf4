"""Is this YAML file the document that is asked for? If not, one sentence says where not."""

import difflib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UserError


class Document(BaseModel):
    """A mapping in which every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


D = TypeVar("D", bound=Document)


def shipped(folder: Path) -> dict[str, Path]:
    """The YAML files of a folder, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str | Path, what: str, known: dict[str, Path]) -> Path:
    """The file that a user names: a YAML file, or one of the ``known``. ``what`` it is goes into the UserError."""
    if str(name) in known:
        return known[str(name)]
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"there is no {what} {str(name)!r}{hint}: name a YAML file or one of {', '.join(known)}.")


def read_document(path: Path, model: type[D]) -> D:
    """Raises UserError for broken YAML, an unknown key (with the nearest right one), a missing key or a wrong value."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping with the keys {', '.join(model.model_fields)}.")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error, model)}") from error


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence; an unknown key comes first, since it may be a missing one in other letters."""
    problem = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    where = problem["loc"]
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(where[-1]), keys_at(model, where[:-1]), n=1, cutoff=0.0)
        return f"unknown key {dotted(where)}: the nearest right key is {dotted([*where[:-1], *near])}."
    if problem["type"] == "missing":
        return f"the key {dotted(where)} is missing: add it."
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{dotted(where)}: {message}." if where else f"{message}."


def dotted(where: Any) -> str:
    """A place in the document, items of a list counted from 1."""
    return ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in where)


def keys_at(model: type[BaseModel], where: Any) -> list[str]:
    """The keys of the section at a place; an item of a list is what the list holds."""
    for part in where:
        if not isinstance(part, int):
            model = next(inner for inner in within(model.model_fields[part].annotation) if issubclass(inner, BaseModel))
    return list(model.model_fields)


def within(annotation: Any) -> list[type]:
    """The classes that an annotation speaks of, such as list[Source] | None."""
    inner = get_args(annotation)
    if inner:
        return [each for one in inner for each in within(one)]
    return [annotation] if isinstance(annotation, type) else []
