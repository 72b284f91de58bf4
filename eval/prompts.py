"""The prompts a head is measured on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.chat import prompt_ids
from ..data.conversations import read_jsonl
from ..errors import UserError
from ..target import Target


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that the target shall write. ``category`` groups results."""

    messages: list[dict[str, Any]]
    category: str = "all"

    def ids(self, target: Target) -> list[int]:
        """Token ids as a server would feed them, with the generation prompt."""
        return prompt_ids(self.messages, target.tokenizer_or_refuse())


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read JSONL: ``messages`` (used up to the first assistant turn), ``prompt`` or ``turns`` (the first is used).

    Raises UserError for a missing file, a broken line (by number) or a line that holds no prompt.
    """
    prompts = [Prompt(opening(row, f"{path}, line {line}"), str(row.get("category", "all"))) for line, row in read_jsonl(path)]
    if not prompts:
        raise UserError(f"{path} holds no prompts: give one JSON object a line, with messages, prompt or turns.")
    return prompts


def opening(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    text = row.get("prompt") or next(iter(row.get("turns") or []), None)
    if isinstance(text, str):
        return [{"role": "user", "content": text}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: no prompt found; write messages, prompt or turns.")
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    if first == 0:
        raise UserError(f"{where}: the conversation opens with the assistant, so there is no prompt; put a user turn first.")
    return messages[:first]
