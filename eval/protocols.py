"""How does the field measure? A protocol is a YAML file with the tasks and every setting that a published table stands for."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ..errors import UserError
from ..sampling import Sampling
from .documents import Document, find, read_document, shipped
from .prompts import Prompt
from .tasks import Shuffle, chosen, read_task
from .tree import parse_or_search

PROTOCOLS = shipped(Path(__file__).parent / "benchmarks" / "protocols")


class Part(Document):
    """One task of a protocol: ``count`` of its prompts, chosen as ``shuffle`` says, with their first ``turns`` questions."""

    task: str
    count: int = Field(ge=1, description="prompts; it is an error where the task has fewer")
    turns: int | None = Field(default=None, ge=1, description="null: all")
    shuffle: Shuffle | None = Field(default=None, description="null: the first ones")


class Protocol(Document):
    """The settings of a published comparison. What differs from cell to cell is a list: tasks, temperature, batch, forms."""

    about: str
    tasks: list[Part] = Field(min_length=1)
    temperature: list[float] = Field(min_length=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new: int = Field(ge=1, description="tokens of an answer")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    batch: list[int] = Field(default=[1], min_length=1)
    forms: list[str] = Field(min_length=1, description="of a head's drafts, as --tree writes them")
    sampled_drafts: bool = Field(default=False, description="above temperature 0: drafts are drawn from the head")
    tau: Literal["pooled", "mean_over_requests"] = Field(description="what the field's table prints")
    seed: int = 0
    thinking: bool | None = Field(default=None, description="told to templates that ask for enable_thinking; null: not told")
    system: str | None = Field(default=None, description="a system message before every prompt")

    @field_validator("forms")
    @classmethod
    def can_be_drafted(cls, forms: list[str]) -> list[str]:
        try:
            for form in forms:
                parse_or_search(form)
        except UserError as error:
            raise ValueError(str(error)) from error
        return forms

    @field_validator("temperature")
    @classmethod
    def not_negative(cls, temperatures: list[float]) -> list[float]:
        if min(temperatures) < 0:
            raise ValueError("give 0 for greedy decoding or a positive number")
        return temperatures

    def samplings(self) -> list[Sampling]:
        """One for each temperature; the cuts do not apply to greedy decoding."""
        return [Sampling(each, self.top_k, self.top_p) if each else Sampling() for each in self.temperature]


def read_protocol(name: str | Path) -> Protocol:
    """The protocol of a YAML file or a shipped name. Raises UserError for neither, and for a file that is no protocol."""
    return read_document(find(name, "protocol", PROTOCOLS), Protocol)


def protocol_prompts(protocol: Protocol, data_dir: str | Path | None = None) -> dict[str, list[Prompt]]:
    """The prompts of a protocol by task, with its system message, length and thinking mode.

    Raises UserError where a task cannot be read, and where it has fewer prompts than the protocol asks for.
    """
    return {part.task: part_prompts(part, protocol, data_dir) for part in protocol.tasks}


def part_prompts(part: Part, protocol: Protocol, data_dir: str | Path | None) -> list[Prompt]:
    prompts = read_task(part.task, data_dir)
    if len(prompts) < part.count:
        raise UserError(
            f"task {part.task} has {len(prompts)} prompts and the protocol asks for {part.count}: give it its whole file."
        )
    prompts = chosen(prompts, part.count, part.turns, part.shuffle, protocol.seed)
    system = [{"role": "system", "content": protocol.system}] if protocol.system else []
    return [
        replace(each, messages=system + each.messages, max_new=protocol.max_new, thinking=protocol.thinking) for each in prompts
    ]
