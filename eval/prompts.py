"""The prompts a head is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import note
from ..data.chat import prompt_ids
from ..data.conversations import Conversation, read_conversations
from ..data.tally import Tally
from ..target import Target


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that the target shall write. ``category`` groups results."""

    messages: list[dict[str, Any]]
    category: str = "all"
    tools: list[dict[str, Any]] | None = None

    def ids(self, target: Target) -> list[int]:
        """Token ids as a server would feed them, with the generation prompt."""
        return prompt_ids(self.messages, target.tokenizer_or_refuse(), self.tools)


def read_prompts(source: str | Path | Sequence[str | Path]) -> list[Prompt]:
    """The first question of every conversation of a source, in any of the readers' shapes and formats.

    Rows without one are left out with a note. Raises UserError for a missing source, a damaged file (with its line or byte),
    and where nothing is left.
    """
    tally = Tally()
    prompts = [opening(conversation) for conversation in read_conversations(source, tally)]
    if tally.lost:
        note(f"WARNING: not every row of the prompts can be asked: {tally.sentence()}")
    return prompts


def opening(conversation: Conversation) -> Prompt:
    """The messages before the first assistant turn; of questions that were never answered, the first one."""
    messages = conversation.messages
    stop = "user" if conversation.unanswered else "assistant"
    end = next(place for place, message in enumerate(messages) if message["role"] == stop) + conversation.unanswered
    return Prompt(messages[:end], str(conversation.about.get("category") or "all"), conversation.tools)
