"""What is known of a service: how it is asked, how fast it answers, what a pass costs it, and what its proposers achieve.

The values come from a YAML file, from probing an endpoint or from measuring a local target; each says which.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError, first_line

Source = Literal["measured", "probed", "stated", "assumed"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Known(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Middle(Known):
    """A running batch: its median and its 95th percentile."""

    p50: Positive
    p95: Positive | None = None


class Mean(Known):
    """Tokens or seconds: their mean and their 95th percentile."""

    mean: Positive
    p95: Positive | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(mean=statistics.fmean(values), p95=float(np.quantile(values, 0.95)))


class Load(Known):
    """What the service gave with so many requests under way: output tokens per second of all, seconds of each."""

    concurrency: Annotated[int, Field(ge=1)]
    tokens_per_s: Positive
    ttft: Positive | None = None
    tpot: Positive | None = None


class StepCost(Known):
    """Seconds of one target pass in which each of ``batch`` sequences reads ``tokens`` tokens (1 in plain decoding, draft + 1
    in verification) behind ``context`` cached ones. ``spread``: the relative standard error of the seconds."""

    tokens: Annotated[int, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)] = 1
    context: Annotated[int, Field(ge=0)] = 0
    seconds: Positive
    spread: Annotated[float, Field(ge=0)] = 0.0


class DraftCost(Known):
    """Seconds that drafting ``length`` tokens for each of ``batch`` sequences takes before a pass."""

    batch: Annotated[int, Field(ge=1)] = 1
    length: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(ge=0)]
    spread: Annotated[float, Field(ge=0)] = 0.0


class Acceptance(Known):
    """How often a draft's next token is accepted where all before it were, with its 95 % interval."""

    rate: Share
    low: Share | None = None
    high: Share | None = None

    @model_validator(mode="after")
    def ordered(self) -> Self:
        if not (self.low if self.low is not None else 0) <= self.rate <= (self.high if self.high is not None else 1):
            raise ValueError("the rate must lie between low and high")
        return self


class Engine(Known):
    """An engine's own counters, where nothing is known by position: ``rate`` is accepted / drafted at a ``length``."""

    rate: Share
    length: Annotated[int, Field(ge=1)]


class ProposerFacts(Known):
    """What is known of a proposer on the service's prompts and sampling.

    ``acceptance``: by position, over all passes: one without a draft counts as a miss at the first position. ``sizes``: how
    large the drafts of the passes were {tokens: share}, for proposers that do not always draft as much as they may; None:
    always in full. ``tree``: its drafts are trees of ``sizes``, measured as they are and not to be shortened. ``memory``:
    bytes of its weights and its own cache. ``speedup_alone``: measured with one request at a time. ``training``: GPU hours it
    takes to train; ``ready``: it need not be trained.
    """

    name: str
    kind: Literal["head", "model", "lookup"] = "head"
    path: str | None = None
    tokenizer_equal: bool | None = None
    vocabulary_equal: bool | None = None
    acceptance: list[Acceptance] = []
    engine: Engine | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    sizes: dict[Annotated[int, Field(ge=0)], Share] | None = None
    tree: bool = False
    draft_seconds: list[DraftCost] = []
    memory: Annotated[float, Field(ge=0)] | None = None
    speedup_alone: Positive | None = None
    training: Annotated[float, Field(ge=0)] | None = None
    ready: bool = True

    @model_validator(mode="after")
    def whole(self) -> Self:
        if self.sizes is not None and abs(sum(self.sizes.values()) - 1) > 1e-3:
            raise ValueError("the shares of sizes must add up to 1")
        if self.tree and self.sizes is None:
            raise ValueError("a tree needs its sizes: {tokens: share}")
        return self


class Limits(Known):
    """The longest seconds that the service may take to a first token and per token after it (95th percentiles)."""

    ttft: Positive | None = None
    tpot: Positive | None = None


class Hardware(Known):
    """An accelerator and a dense model on it, for the roofline: the least time that physics allows.

    ``weights`` bytes read in a pass, ``parameters`` active per token, ``cache_per_token`` bytes, ``bandwidth`` bytes/s,
    ``flops`` per second, ``overhead`` seconds of a pass that are neither.
    """

    weights: Positive
    parameters: Positive
    cache_per_token: Annotated[float, Field(ge=0)] = 0.0
    bandwidth: Positive
    flops: Positive
    overhead: Annotated[float, Field(ge=0)] = 0.0


class Service(Known):
    """All that the advice reads. Seconds, bytes and tokens throughout; what is None is not known.

    ``qps``: requests per second of all ``replicas``. ``batch``: requests running in one replica. ``max_batch``: the most that
    the engine lets run at once. ``kv_cache_use``: share of the cache's blocks in use. ``memory_free``: bytes left on one
    replica's device. ``repetitiveness``: share of the output's 4-grams that stood in the prompt or the output before.
    ``closed``: so many clients ask again only when they are answered, which keeps the running batch; otherwise requests come
    at their own rate. ``pads``: drafts of one pass are padded to the largest. ``speculating``: speculation was already on when
    the speeds were taken. ``sources``: for every value that is set, by its name ("ttft", "proposers.eagle3.acceptance"),
    where it came from.
    """

    name: str = "service"
    target: str | None = None
    qps: Positive | None = None
    replicas: Annotated[int, Field(ge=1)] = 1
    batch: Middle | None = None
    max_batch: Annotated[int, Field(ge=1)] | None = None
    prompt_tokens: Mean | None = None
    output_tokens: Mean | None = None
    ttft: Mean | None = None
    tpot: Mean | None = None
    kv_cache_use: Share | None = None
    memory_free: Annotated[float, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetitiveness: Share | None = None
    throughput: list[Load] = []
    step_costs: list[StepCost] = []
    hardware: Hardware | None = None
    closed: bool = False
    pads: bool = True
    speculating: bool | None = None
    proposers: list[ProposerFacts] = []
    slo: Limits = Limits()
    sources: dict[str, Source] = {}

    @model_validator(mode="after")
    def names_differ(self) -> Self:
        names = [each.name for each in self.proposers]
        if len(set(names)) < len(names):
            raise ValueError("two proposers have one name: give each its own")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """A YAML file of known values; they count as stated unless its ``sources`` say otherwise. UserError with the key."""
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"--service {path} cannot be read ({first_line(error)}): give a YAML file.") from error
        if not isinstance(document, dict):
            raise UserError(f"--service {path} holds no keys: write the service's values, such as qps: 2.")
        try:
            found = cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(f"--service {path}: {where}: {first['msg'].removeprefix('Value error, ')}.") from error
        return found.from_("stated")

    def from_(self, source: Source) -> Self:
        """The same, every value that is set and has no source yet marked as coming from ``source``."""
        values = set(self.model_fields_set) - {"name", "target", "sources", "proposers"}
        names = [*values, *(f"proposers.{each.name}.{key}" for each in self.proposers for key in each.model_fields_set)]
        return self.model_copy(update={"sources": {name: source for name in names} | self.sources})

    def under(self, over: "Service") -> Self:
        """The same, with every value that ``over`` has set taken from there; proposers are joined by name."""
        changed: dict[str, Any] = {key: getattr(over, key) for key in over.model_fields_set - {"sources", "proposers"}}
        mine = {each.name: each for each in self.proposers}
        for each in over.proposers:
            known = {key: getattr(each, key) for key in each.model_fields_set}
            mine[each.name] = mine[each.name].model_copy(update=known) if each.name in mine else each
        return self.model_copy(update={**changed, "proposers": list(mine.values()), "sources": self.sources | over.sources})
