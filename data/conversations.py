"""Read conversations, whatever their shape, and count what becomes of every row. docs/reading.md has the rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from .records import STDIN, TURN_KEYS, read_records
from .shapes import ANSWERS, EXTRAS, PROMPTS, SHAPES, SYSTEMS, Row, is_turns, system_of
from .tally import Tally, listed
from .turns import REASONING, Unreadable, read_finish, read_tools, read_turn

ROW_COLUMNS = ("messages", "prompt", "response", "instruction", "input", "output", "turns", "text", "system", "tools", "finish")
TURN_COLUMNS = ("role", "content", "reasoning_content", "tool_calls", "name", "weight")
LABEL = 100  # characters; longer texts are no labels
NO_LABELS = {
    *PROMPTS,
    *ANSWERS,
    *EXTRAS,
    *SYSTEMS,
    *REASONING,
    "text",
    "finish",
    "finish_reason",
    "weight",
    "tools",
    "functions",
}

JOINED = "turns of one role joined"
OPENING = "turns before the first user turn left out"
CUT = "answers cut before the last not supervised"
READ_BACK = "rendered chats read back"


@dataclass(frozen=True)
class Conversation:
    """Turns of a chat, oldest first, and where they came from.

    ``messages``: dicts with a ``role`` (system, user, assistant, tool) and a string ``content``, which is empty only beside
    tool calls and for a tool that gave nothing. An assistant's may have ``reasoning_content``, ``tool_calls`` ([{"type":
    "function", "function": {"name", "arguments": object}}, ...]) and a ``weight`` of 0: read, not supervised. Nothing is None.
    ``row``: the place in ``file``, from 1. ``finish`` "length" means that the last answer was cut at a token limit, so the
    target wrote no end of turn there. ``tools``: the tool schemas that the chat template shows to the model. ``unanswered``:
    there are user turns alone (and system turns), each to be answered before the next one is asked. ``about``: the row's own
    labels, such as id and category.
    """

    messages: list[dict[str, Any]]
    file: str
    row: int
    finish: str = "stop"
    tools: list[dict[str, Any]] | None = None
    unanswered: bool = False
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """How to read a source: the ``format`` is a shape's name or "auto"; ``columns`` maps our names to the file's own;
    ``salvage`` goes on behind damage; ``split`` is the part of a data set.

    Raises UserError for an unknown format or an unknown name among the columns.
    """

    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    salvage: bool = False
    split: str = "train"

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in SHAPES:
            raise UserError(f"there is no format {self.format!r}: choose auto, {', '.join(SHAPES)}.")
        for ours in self.columns:
            if ours not in ROW_COLUMNS + TURN_COLUMNS:
                names = ", ".join(ROW_COLUMNS + TURN_COLUMNS)
                raise UserError(f"columns cannot name {ours!r}: write OURS=THEIRS with one of {names} before the sign.")


def read_conversations(
    source: str | Path | Sequence[str | Path], tally: Tally, reading: Reading | None = None
) -> Iterator[Conversation]:
    """Yield the conversations of a source (see ``read_records``), in order; ``tally`` counts every row.

    Raises UserError for a damaged file unless ``reading.salvage``, for a dropped row if ``tally.strict``, and when not one
    conversation comes out.
    """
    reading, kept, first = reading or Reading(), 0, ""
    turn_keys = TURN_KEYS | {reading.columns.get("role", "role")}
    for file, row, value in read_records(source, tally, reading.salvage, reading.split, turn_keys):
        tally.read += 1
        changes: set[str] = set()
        try:
            conversation = read_row(value, file, row, reading, changes)
        except Unreadable as error:
            tally.drop(file, row, error.reason, error.detail, value)
            first = first or error.detail
            continue
        tally.change(sorted(changes))
        kept += 1
        yield conversation
    if not kept:
        given = [source] if isinstance(source, str | Path) else source
        named = ", ".join("stdin" if str(one) == STDIN else str(one) for one in given)
        if tally.damaged and set(tally.dropped) <= {"damaged"}:
            said = tally.damaged["message"].rstrip(".")
            raise UserError(f"no conversation came out of {named}, for {said}: mend or replace the file.")
        if tally.dropped:
            why = f"no row of {named} makes a conversation ({listed(tally.dropped)}{f'; {first}' if first else ''})"
            raise UserError(f"{why}: name its shape with --format, or its columns with --columns.")
        raise UserError(f"{named} holds no conversation: give at least one row with messages, a prompt or a text.")


def read_row(value: Any, file: str, row: int, reading: Reading, changes: set[str]) -> Conversation:
    """The conversation of one record; ``changes`` collects what is not as the record has it. Raises Unreadable."""
    record = as_object(value, reading.columns)
    turns = [renamed(turn, reading.columns, TURN_COLUMNS) for turn in find_turns(record, reading.format, changes)]
    messages = [message for turn in turns if (message := read_turn(turn, changes)) is not None]
    messages = from_first_user(messages, changes)
    roles = {message["role"] for message in messages}
    if "assistant" not in roles and "tool" in roles:
        raise Unreadable("tool results without an answer")
    apart = {"tool"} if "assistant" in roles else {"tool", "user"}
    messages = joined(messages, apart, changes)
    finish = settle_finish(messages, record, changes)
    tools = read_tools(record.get("tools") or record.get("functions"))
    return Conversation(messages, file, row, finish, tools, "assistant" not in roles, labels(record))


def as_object(value: Any, columns: dict[str, str]) -> Row:
    """The record with our names for its columns; a bare text or list of turns is put into one."""
    if isinstance(value, str):
        value = {"text": value}
    if is_turns(value):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise Unreadable("no known shape", type(value).__name__)
    return renamed(value, columns, ROW_COLUMNS)


def renamed(value: Any, columns: dict[str, str], ours: tuple[str, ...]) -> Any:
    """The object with those of its keys renamed that ``columns`` gives one of our names; anything else as it is."""
    if not isinstance(value, dict):
        return value
    names = {theirs: our for our, theirs in columns.items() if our in ours and theirs in value}
    rest = {key: inner for key, inner in value.items() if key not in names}
    return {**rest, **{our: value[theirs] for theirs, our in names.items()}}


def find_turns(record: Row, shape: str, changes: set[str]) -> list[Any]:
    """The turns of the record, those of a system column first. Raises Unreadable where its shape is another or unknown."""
    found = ((name, SHAPES[name](record)) for name in (SHAPES if shape == "auto" else [shape]))
    name, turns = next(((name, turns) for name, turns in found if turns is not None), ("", None))
    if turns is None:
        reason = "no known shape" if shape == "auto" else "not of the given format"
        raise Unreadable(reason, f"its keys are {', '.join(record) or 'none'}"[:300])
    if name == "rendered":
        changes.add(READ_BACK)
    opens_with_system = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role", turns[0].get("from")) == "system"
    return turns if opens_with_system else system_of(record) + turns


def from_first_user(messages: list[dict[str, Any]], changes: set[str]) -> list[dict[str, Any]]:
    """The messages without what others than the system say before the first user does."""
    if not messages:
        raise Unreadable("no turns")
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise Unreadable("no user turn")
    opening = [message for message in messages[:first] if message["role"] == "system"]
    if len(opening) < first:
        changes.add(OPENING)
    return opening + messages[first:]


def joined(messages: list[dict[str, Any]], apart: set[str], changes: set[str]) -> list[dict[str, Any]]:
    """The messages with neighbours of one role made one; roles in ``apart`` and turns that call tools stay as they are."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role, last = message["role"], out[-1] if out else None
        if not last or last["role"] != role or role in apart or "tool_calls" in last or "tool_calls" in message:
            out.append(message)
            continue
        changes.add(JOINED)
        texts = {
            key: f"{last[key]}\n\n{message[key]}" for key in ("content", "reasoning_content") if key in last and key in message
        }
        out[-1] = {**last, **message, **texts}
        if last.get("name") != message.get("name"):
            out[-1].pop("name", None)
    return out


def settle_finish(messages: list[dict[str, Any]], record: Row, changes: set[str]) -> str:
    """The finish of the last answer. An earlier one that was cut is read and not supervised: its end is not the target's."""
    answers = [message for message in messages if message["role"] == "assistant"]
    finishes = [message.pop("finish", None) for message in answers]
    for message, finish in zip(answers[:-1], finishes, strict=False):
        if finish == "length" and "weight" not in message:
            message["weight"] = 0
            changes.add(CUT)
    return read_finish(record) or next(iter(finishes[-1:]), None) or "stop"


def labels(record: Row) -> dict[str, Any]:
    """The record's short scalar values that are no part of the chat."""
    scalars = {key: value for key, value in record.items() if isinstance(value, str | int | float) and key not in NO_LABELS}
    return {key: value for key, value in scalars.items() if is_label(str(key)) and is_label(str(value)) and value == value}


def is_label(text: str) -> bool:
    return len(text) <= LABEL and text.isprintable()
