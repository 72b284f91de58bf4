"""Read conversations, and say in plain words what is wrong with a file that holds none."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError

FINISHES = ("stop", "length")


@dataclass(frozen=True)
class Conversation:
    """Turns of a chat, oldest first, and where they came from.

    ``messages``: dicts with a string ``role`` and a string ``content``; other keys are handed on to the chat template, and
    an assistant's ``weight`` of 0 means that its turn is read and not supervised. ``row``: the place in ``file``, from 1.
    ``finish`` "length" means that the last answer was cut at a token limit, so the target wrote no end of turn there.
    ``tools``: the tool schemas that the chat template shows to the model. ``unanswered``: the messages are user turns alone,
    each to be answered before the next one is asked. ``about``: the row's own labels, such as id and category.
    """

    messages: list[dict[str, Any]]
    file: str
    row: int
    finish: str = "stop"
    tools: list[dict[str, Any]] | None = None
    unanswered: bool = False
    about: dict[str, Any] = field(default_factory=dict)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line of a JSONL file; blank lines and a byte-order mark are skipped.

    Raises UserError for a missing file, for bytes that are not UTF-8 and for a line that is not a JSON object.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file: give the path of a JSONL file.")
    with open(path, "rb") as file:
        for row, line in enumerate(file, start=1):
            where = f"{path}, line {row}"
            try:
                text = line.decode("utf-8-sig" if row == 1 else "utf-8").strip()
                value = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 (byte {error.start + 1}): save the file as UTF-8.") from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{where} is not valid JSON ({error}): mend or remove the line.") from error
            if not text:
                continue
            if not isinstance(value, dict):
                raise UserError(f"{where} is not a JSON object: write one object in braces on each line.")
            yield row, value


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read lines ``{"messages": [{"role": ..., "content": ...}, ...], "finish": "stop" | "length"}``, in file order.

    ``finish`` may be left out and then is "stop". Raises UserError, naming file, line and mend, for anything else.
    """
    conversations = []
    for row, value in read_jsonl(path):
        where = f"{path}, line {row}"
        messages, finish = value.get("messages"), value.get("finish", "stop")
        check_messages(messages, where)
        if all(message["role"] != "assistant" for message in value["messages"]):
            raise UserError(f"{where} has no assistant turn, so nothing to learn from: add the answer or remove the line.")
        if finish not in FINISHES:
            raise UserError(f'{where} has the finish {finish!r}: write "stop", or "length" for an answer that was cut.')
        conversations.append(Conversation(value["messages"], str(path), row, finish))
    if not conversations:
        raise UserError(f"{path} holds no conversation: give a file with at least one line of messages.")
    return conversations


def check_messages(messages: Any, where: str) -> None:
    """Raise UserError unless ``messages`` is a non-empty list of objects with a string role and content."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where} has no list of messages: write {{"messages": [{{"role": ..., "content": ...}}, ...]}}.')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {number} is not an object: give it a role and a content.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(f'{where}: message {number} has no text under "{key}": give it a string.')
        if any("\ud800" <= letter <= "\udfff" for letter in message["content"]):
            raise UserError(f"{where}: message {number} holds half a surrogate pair: remove the broken \\ud escape.")
