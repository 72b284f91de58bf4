"""A whole run as one typed document."""

import difflib
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from ..data.records import local_files
from ..errors import UserError
from ..heads.kinds import KINDS


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class TargetSection(Section):
    name: str = Field(description="a model directory, a hub id or a .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = Field(default=None, description="null: each process's own device; auto: spread over all devices")
    parallel: Literal["fsdp", "tp"] | None = Field(
        default=None, description="null: every process holds the target; fsdp: its layers are sharded; tp: every layer is split"
    )
    group: int | None = Field(default=None, ge=2, description="processes that hold one target together; null: all of them")

    @model_validator(mode="after")
    def is_held_one_way(self) -> Self:
        if self.parallel and self.device:
            raise ValueError("device and parallel are two ways to spread a target: leave one of them out")
        if self.group and not self.parallel:
            raise ValueError("group is read with parallel alone: set parallel to fsdp or tp, or take group out")
        return self


class EngineSection(Section):
    """docs/engine.md has the server's command line."""

    url: str = Field(description="a vLLM server that extracts hidden states: http://host:8000/v1")
    model: str | None = Field(default=None, description="its name there; null: the first one served")
    layers: list[int] | None = Field(
        default=None, description="those it extracts; null: the head's taps and the target's depth"
    )
    folder: str | None = Field(default=None, description="where its files are seen here; null: under the path it names itself")
    in_flight: int = Field(default=8, ge=1, description="requests under way at once")
    ahead: int = Field(default=64, ge=0, description="conversations asked for before their step: as many may wait in memory")
    timeout: float = Field(default=600.0, gt=0, description="seconds for one try of a request")


class DataSection(Section):
    train: str | list[str] = Field(description="conversations; relative to the recipe's folder or the working directory")
    held_out: str | list[str]
    format: str = Field(default="auto", description="the shape of a record; auto: told by its content")
    columns: dict[str, str] = Field(default={}, description="our names of a record's parts: the file's")
    split: str = Field(default="train", description="the part of a data set")
    salvage: bool = Field(default=False, description="go on behind damage, keeping what can be read")
    strict: bool = Field(default=False, description="stop at the first row that would be dropped")
    max_length: int = Field(default=2048, ge=8, description="tokens; longer conversations are cut")
    only_last: bool = Field(default=False, description="supervise each conversation's last answer alone")
    workers: int = Field(default=1, ge=1, description="processes that tokenize")
    pack: bool = Field(default=False, description="lay several conversations into one line of max_length tokens")
    features: Literal["online", "memory", "store", "write-through"] = Field(
        default="online", description="where hidden states are kept; all but store compute them"
    )
    store: str | None = Field(default=None, description="the feature store's directory, for store and write-through")
    store_dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="bfloat16", description="of a write-through store"
    )
    store_budget: float | None = Field(default=None, gt=0, description="GB that a write-through store may take; null: no limit")

    engine: EngineSection | None = Field(default=None, description="a server that runs the target's layers; null: this process")

    @model_validator(mode="after")
    def names_its_store(self) -> Self:
        if self.features in ("store", "write-through") and not self.store:
            raise ValueError(f"features: {self.features} needs data.store: name the store's directory")
        return self


class HeadSection(Section):
    kind: str
    taps: list[int] | None = Field(default=None, description="null: the kind's default")
    depths: int = Field(default=3, ge=1, description="depths trained: steps of training-time test, or Medusa heads")
    draft_vocab: int | None = Field(default=None, ge=1, description="null: the target's whole vocabulary")
    init_from: str | None = Field(default=None, description="a head directory to go on with: its weights and vocabulary")
    confidence: bool = Field(default=False, description="train an estimate of every draft's acceptance beside the head")
    options: dict[str, Any] = Field(default={}, description="the kind's own options")

    @model_validator(mode="after")
    def known(self) -> Self:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no head kind; the kinds are {', '.join(KINDS)}")
        try:
            self.options = KINDS[self.kind].Options.model_validate(self.options).model_dump()
        except ValidationError as error:  # told as errors of head.options, where they stand in the recipe
            raise ValidationError.from_exception_data("options", [below("options", each) for each in error.errors()]) from error
        return self


def below(section: str, error: Any) -> Any:
    """One of pydantic's errors, one section deeper."""
    return {"type": error["type"], "loc": (section, *error["loc"]), "input": error["input"], "ctx": error.get("ctx", {})}


LOSSES = ("kl", "kl_top", "rkl", "js", "tv", "l1", "nla", "lk", "ce", "ce_best", "dspark", "e2e_tv")
ON_LABELS = {"ce", "dspark", "dpace", "until_fail"}  # losses and weights that ask which token the data has


class ObjectiveSection(Section):
    """docs/objectives.md has the formulas."""

    loss: str | dict[str, float] = Field(
        default="lk", description=f"one of {', '.join(LOSSES)}; or several with their weights, as {{ce: 0.1, tv: 0.9}}"
    )
    depth_decay: float | dict[str, float] | None = Field(
        default=None,
        description="weight of depth i: decay ** i; {gamma: g}: exp(-i / g); {power: p}: (1 + i) ** -p; null: 0.8, or 1 where "
        "objective.weights or e2e_tv weighs depths already",
    )
    weights: Literal["dpace", "cat", "until_fail"] | None = Field(
        default=None, description="weighs every row's depths by how far its draft gets; null: all alike"
    )
    temperature: float = Field(
        default=1.0, gt=0, description="divides the target's logits and the head's: the one that drafts will be served at"
    )
    eta: float | None = Field(default=None, gt=0, description="of lk: the larger, the earlier tv takes over from kl; null: 3")
    top_k: int | None = Field(default=None, ge=1, description="of kl_top: how many of the target's tokens count; null: 10")
    teacher: Literal["full", "draft"] = Field(
        default="full",
        description="the target's distribution over its vocabulary, or, cheaper, as if the draft vocabulary were all of it",
    )

    @field_validator("loss", mode="before")
    @classmethod
    def known_losses(cls, value: Any) -> Any:
        mix = {value: 1} if isinstance(value, str) else value
        if not isinstance(mix, dict) or not mix:
            raise ValueError("name a loss, or map losses to weights as in {ce: 0.1, tv: 0.9}")
        for name, weight in mix.items():
            if name not in LOSSES:
                raise ValueError(f"{name!r} is no loss; the losses are {', '.join(LOSSES)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
                raise ValueError(f"the weight of {name} must be a number above 0, not {weight!r}")
        return value

    @field_validator("depth_decay", mode="before")
    @classmethod
    def known_decay(cls, value: Any) -> Any:
        named = value if isinstance(value, dict) else {"base": value}
        fits = len(named) == 1 and set(named) <= {"base", "gamma", "power"}
        number = next(iter(named.values()), None)
        if value is not None and not (fits and isinstance(number, int | float) and number > 0 and named.get("base", 0) <= 1):
            raise ValueError("write a number above 0 and up to 1, or {gamma: g} or {power: p} with a number above 0")
        return value

    @model_validator(mode="after")
    def filled_in(self) -> Self:
        for key, loss in (("eta", "lk"), ("top_k", "kl_top")):
            if loss not in self.losses and getattr(self, key) is not None:
                raise ValueError(f"{key} is read by the loss {loss} alone: name {loss} in objective.loss, or take {key} out")
        if self.depth_decay is None:
            self.depth_decay = 1.0 if self.weights or "e2e_tv" in self.losses else 0.8
        return self

    @property
    def losses(self) -> dict[str, float]:
        """The losses and their weights."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else self.loss


class TrainSection(Section):
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=16, ge=1, description="conversations per optimizer step, over all processes")
    micro_batch_size: int = Field(default=4, ge=1, description="conversations per forward on one process")
    lr: float = Field(default=1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: float = Field(default=0.05, ge=0, le=1, description="share of the steps")
    final_lr: float = Field(default=0.1, ge=0, le=1, description="the cosine's end, as a share of lr")
    on_policy: float = Field(default=0.0, ge=0, le=1, description="share of the steps, at the end, on the draft's own rollouts")
    rollout: int = Field(default=8, ge=1, description="tokens of a rollout")
    clip: float = Field(default=1.0, gt=0, description="gradient norm")
    precision: Literal["auto", "bf16", "no"] = Field(default="auto", description="auto: bf16 where the device has it")
    gradient_checkpointing: bool = Field(
        default=False, description="compute the head's layers again for the backward pass instead of keeping their activations"
    )
    compile: bool = Field(default=False, description="let torch compile the head's layers; needs a C++ compiler on a CPU")
    seed: int = 0

    @field_validator("precision", mode="before")
    @classmethod
    def no_is_a_word(cls, value: Any) -> Any:
        """YAML reads an unquoted ``no`` as false."""
        return "no" if value is False else value

    log_every: int = Field(default=10, ge=1, description="steps")
    eval_every: int | None = Field(default=None, ge=1, description="steps; null: only before and after training")
    checkpoint_every: int | None = Field(default=None, ge=1, description="steps; null: none")
    keep_checkpoints: int = Field(default=2, ge=1)
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="what to do about a step whose loss or gradient is not finite; its rows are written out"
    )
    timeout: float = Field(
        default=60, gt=0, description="minutes that processes wait for one another, the first time while one of them tokenizes"
    )
    tracker: Literal["none", "wandb", "tensorboard"] = "none"


class EvalSection(Section):
    tree: str = "chain:5"
    max_new_tokens: int = Field(default=64, ge=2)
    prompts: int = Field(default=8, ge=0, description="held-out prompts decoded at every evaluation in training; 0: none")


class Recipe(Section):
    target: TargetSection
    data: DataSection
    head: HeadSection
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    output: str = Field(description="the run directory; must not exist unless the run is resumed or forced")
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def learns_from_the_target(self) -> Self:
        asked = ON_LABELS & {*self.objective.losses, self.objective.weights}
        if self.train.on_policy and asked:
            raise ValueError(f"train.on_policy needs an objective that learns from the target's distribution, not {min(asked)}")
        return self

    @model_validator(mode="after")
    def can_do_without_layers(self) -> Self:
        if self.data.engine and self.eval.prompts:
            raise ValueError(
                "eval.prompts decodes with the whole target, whose layers data.engine leaves to the engine: set eval.prompts "
                "to 0, and the best head is the best by the simulated τ"
            )
        if self.data.engine and self.train.on_policy:
            raise ValueError("train.on_policy runs the target, whose layers data.engine leaves to the engine: set it to 0")
        return self

    @model_validator(mode="after")
    def runs_the_target_evenly(self) -> Self:
        """Processes that hold a target together must run it equally often."""
        held, features = self.target.parallel, self.data.features
        if held and self.data.engine:
            raise ValueError("data.engine leaves the target's layers to the engine: take target.parallel out")
        if (held and features == "write-through") or (held == "fsdp" and features == "memory"):
            raise ValueError(
                f"with target.parallel {held} every process must run the target for every batch, which data.features "
                f"{features} spares some of them: set data.features to online, or extract a store first"
            )
        if held == "fsdp" and self.train.on_policy:
            raise ValueError(
                "train.on_policy runs the target as often as a process's own rows ask for, which target.parallel fsdp cannot: "
                "set it to 0, or target.parallel to tp"
            )
        return self

    def sources(self, part: str) -> list[str]:
        """The data sources of a part: each as it stands, or relative to the recipe's own folder where only that exists."""
        named = getattr(self.data, part)
        return [self._source(name) for name in ([named] if isinstance(named, str) else named)]

    def _source(self, name: str) -> str:
        beside = str(self._folder / name)
        return beside if not local_files(name) and local_files(beside) else name

    def to_yaml(self) -> str:
        """The resolved recipe, every default filled in."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(file: str | Path, changes: list[str] | None = None) -> Recipe:
    """Read a recipe (a file, or the name of a shipped one) and apply ``section.key=value`` changes.

    Raises UserError for a missing file, broken YAML, an unknown key (naming the nearest right one) or a wrong value.
    """
    path = find(file)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a recipe: it must be a mapping with target, data, head and output.")
    for change in changes or []:
        apply(document, change)
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, document)}") from error
    recipe._folder = path.parent
    return recipe


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find(file: str | Path) -> Path:
    path = Path(file)
    if path.is_file():
        return path
    if str(file).removesuffix(".yaml").removeprefix("recipes/") in shipped():
        return shipped()[str(file).removesuffix(".yaml").removeprefix("recipes/")]
    raise UserError(f"there is no recipe {str(file)!r}: name a YAML file or one of {', '.join(shipped()) or 'none shipped'}.")


def apply(document: dict[str, Any], change: str) -> None:
    """Apply one ``section.key=value``; the value is read as YAML."""
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise UserError(f"--set {change!r} cannot be read: write section.key=value.")
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise UserError(f"--set {change!r}: {section} is a value, not a section.")
    document[last] = yaml.safe_load(value)


def explain(error: ValidationError, document: dict[str, Any]) -> str:
    """The first problem as one sentence; an unknown key comes with the nearest right one."""
    problem = error.errors()[0]
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        known = keys_at(where[:-1], document)
        near = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.0)
        return f"unknown key {'.'.join(where)}: the nearest right key is {'.'.join([*where[:-1], *near])}."
    if problem["type"] == "missing":
        return f"the key {'.'.join(where)} is missing: add it."
    message = problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(where)}: {message}." if where else f"{message}."


def keys_at(where: list[str], document: dict[str, Any]) -> list[str]:
    """The keys of the section at a path; within head.options those of the document's own kind."""
    model: Any = Recipe
    for part in where:
        found = model.model_fields[part].annotation if part != "options" else KINDS[document["head"]["kind"]].Options
        model = next(each for each in (found, *get_args(found)) if isinstance(each, type) and issubclass(each, BaseModel))
    return list(model.model_fields)
