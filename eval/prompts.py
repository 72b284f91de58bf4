"""The prompts a head is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..console import note
from ..data.chat import prompt_ids
from ..data.conversations import Conversation, read_conversations
from ..data.tally import Tally
from ..target import Target

ID_KEYS = ("id", "question_id", "task_id", "prompt_id", "unique_id", "instance_id", "uid")


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that the target shall write. ``category`` groups results.

    ``later``: the user's further turns, asked on the target's own answers. ``id``: a name by which runs are compared, its
    own in a list of prompts. ``max_new``: tokens of an answer where they are the prompt's own affair. ``stop``: texts that
    end an answer. ``thinking``: what a chat template that knows ``enable_thinking`` is told; None leaves it its default.
    """

    messages: list[dict[str, Any]]
    category: str = "all"
    tools: list[dict[str, Any]] | None = None
    later: tuple[str, ...] = ()
    id: str = ""
    max_new: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None

    def ids(self, target: Target) -> list[int]:
        """Token ids as a server would feed them, with the generation prompt."""
        return prompt_ids(self.messages, target.tokenizer_or_refuse(), self.tools, self.thinking)


def read_prompts(source: str | Path | Sequence[str | Path]) -> list[Prompt]:
    """The questions of every conversation of a source, in any of the readers' shapes and formats.

    Rows without one are left out with a note. Raises UserError for a missing source, a damaged file (with its line or byte),
    and where nothing is left.
    """
    tally = Tally()
    prompts = named([opening(conversation) for conversation in read_conversations(source, tally)])
    if tally.lost:
        note(f"WARNING: not every row of the prompts can be asked: {tally.sentence()}")
    return prompts


def opening(conversation: Conversation) -> Prompt:
    """The messages before the first assistant turn (of questions that were never answered, the first one), and the user's
    turns behind it.

    Behind a tool call nothing can be asked: what the tool will give to the target's own call is unknown.
    """
    messages = conversation.messages
    stop = "user" if conversation.unanswered else "assistant"
    end = next(place for place, message in enumerate(messages) if message["role"] == stop) + conversation.unanswered
    chat = takewhile(lambda message: message["role"] != "tool" and "tool_calls" not in message, messages[end:])
    later = tuple(message["content"] for message in chat if message["role"] == "user")
    category, own = str(conversation.about.get("category") or "all"), own_id(conversation.about)
    return Prompt(messages[:end], category, conversation.tools, later, own)


def own_id(labels: dict[str, Any]) -> str:
    """The name that a row gives itself; "" for none."""
    return next((str(labels[key]) for key in ID_KEYS if labels.get(key) not in (None, "")), "")


def named(prompts: list[Prompt], before: str = "") -> list[Prompt]:
    """The prompts with ``before`` in front of their ids, which are their places, from 1, unless all have one of their own."""
    ids = [prompt.id for prompt in prompts]
    if "" in ids or len(set(ids)) < len(ids):
        ids = [str(place) for place in range(1, len(ids) + 1)]
    return [replace(prompt, id=before + own) for prompt, own in zip(prompts, ids, strict=True)]
