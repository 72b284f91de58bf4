"""One turn of a chat, however it is written down, as a message for a chat template. docs/reading.md has the rules."""

import json
from typing import Any

ROLES = {
    **dict.fromkeys(["system"], "system"),
    **dict.fromkeys(["developer"], "developer"),
    **dict.fromkeys(["user", "human", "prompter"], "user"),
    **dict.fromkeys(["assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"], "assistant"),
    **dict.fromkeys(["function_call", "tool_call"], "call"),
    **dict.fromkeys(["tool", "function", "observation", "tool_response", "ipython"], "tool"),
}
FINISHES = {
    **dict.fromkeys(["stop", "end_turn", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call"], "stop"),
    **dict.fromkeys(["length", "max_tokens"], "length"),
}
TEXT_PARTS = {None, "text", "input_text", "output_text"}
REASONING = ("reasoning_content", "reasoning", "thinking")
TOOL_KEYS = ("type", "function", "name", "description", "parameters")  # in the order in which servers hand them to a template

EMPTY = "empty turns left out"
NUL = "NUL characters left out"
NUMBER = "numbers read as text"
AS_JSON = "tool results written as JSON"
DEVELOPER = "developer read as system"
NULLS = "nulls left out of tool arguments"
PART_WEIGHT = "weights between 0 and 1 read as 1"

BROKEN_CALL = "broken tool call"
NOT_TEXT = "content that is not text"


class Unreadable(Exception):
    """A row that makes no conversation: ``reason``, a short constant phrase, and ``detail``."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def read_turn(raw: Any, changes: set[str]) -> dict[str, Any] | None:
    """The message of one turn {role or from, content or value, ...}; None for an empty one.

    A "finish" of its own stays in the message. What was changed is added to ``changes``. Raises Unreadable.
    """
    if raw is None:
        changes.add(EMPTY)
        return None
    if not isinstance(raw, dict):
        raise Unreadable("turn that is not an object", type(raw).__name__)
    role, content = read_role(raw), raw.get("content", raw.get("value"))
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": read_calls(content)}
    if role == "developer":
        changes.add(DEVELOPER)
        role = "system"
    message = {"role": role, "content": read_text(content, role, changes), **read_names(raw, role)}
    if role == "assistant":
        message |= read_answer(raw, changes)
    if message["content"].strip() or "tool_calls" in message or role == "tool":
        return message
    changes.add(EMPTY)
    return None


def read_role(raw: dict[str, Any]) -> str:
    said = raw.get("role", raw.get("from"))
    if not isinstance(said, str):
        raise Unreadable("turn without a role", ", ".join(raw))
    role = ROLES.get(said.strip().lower())
    if role is None:
        raise Unreadable("unknown role", said)
    return role


def read_names(raw: dict[str, Any], role: str) -> dict[str, str]:
    """The keys beside role and content that templates read as they are."""
    keys = ("tool_call_id", "name") if role == "tool" else ("name",)
    return {key: checked(raw[key]) for key in keys if isinstance(raw.get(key), str) and raw[key]}


def read_answer(raw: dict[str, Any], changes: set[str]) -> dict[str, Any]:
    """What an assistant's turn may hold beside its content: reasoning, tool calls, weight, finish."""
    found: dict[str, Any] = {}
    thoughts = [read_text(raw[key], "assistant", changes) for key in REASONING if raw.get(key)]
    if any(thought.strip() for thought in thoughts):
        found["reasoning_content"] = next(thought for thought in thoughts if thought.strip())
    calls = raw.get("tool_calls") or raw.get("function_call")
    if calls:
        found["tool_calls"] = read_calls(calls, changes)
    weight = raw.get("weight")
    if weight is not None and not isinstance(weight, int | float):
        raise Unreadable("weight that is not a number", repr(weight)[:80])
    if weight == 0:
        found["weight"] = 0
    elif weight not in (None, 1):
        changes.add(PART_WEIGHT)
    finish = read_finish(raw)
    return found | ({"finish": finish} if finish else {})


def read_finish(holder: dict[str, Any]) -> str | None:
    """ "stop" or "length" of a row or a turn; None where it says nothing."""
    said = holder.get("finish") or holder.get("finish_reason")
    if said is None:
        return None
    if not isinstance(said, str) or said not in FINISHES:
        raise Unreadable("unknown finish", repr(said)[:80])
    return FINISHES[said]


def read_text(value: Any, role: str, changes: set[str]) -> str:
    """The text of a content: a string, a number, null, or a list of parts {type: text, text}."""
    if value is None:
        return ""
    if isinstance(value, str):
        return checked(value, changes)
    if isinstance(value, bool | int | float):
        changes.add(NUMBER)
        return json.dumps(value)
    parts = value if isinstance(value, list) else [value]
    strange = [part for part in parts if not (isinstance(part, dict) and part.get("type") in TEXT_PARTS and "text" in part)]
    if strange and role == "tool":
        changes.add(AS_JSON)
        return checked(json.dumps(value, ensure_ascii=False), changes)
    if strange:
        raise Unreadable(NOT_TEXT, str(strange[0].get("type")) if isinstance(strange[0], dict) else type(strange[0]).__name__)
    # as vLLM joins them for a template that wants a string
    return "\n".join(read_text(part["text"], role, changes) for part in parts)


def checked(text: str, changes: set[str] | None = None) -> str:
    """The text without NUL characters. Raises Unreadable for half a surrogate pair."""
    if "\0" in text:
        text = text.replace("\0", "")
        if changes is not None:
            changes.add(NUL)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("half a surrogate pair", f"at character {error.start + 1}") from error
    return text


def read_calls(value: Any, changes: set[str] | None = None) -> list[dict[str, Any]]:
    """Tool calls as [{type, function: {name, arguments}}, ...] with the arguments an object, its keys sorted.

    ``value``: one call or a list of them, each with or without its "function" around it, or the JSON text of that.
    """
    value = parsed(value, BROKEN_CALL)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = parsed(call, BROKEN_CALL)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(BROKEN_CALL, "it names no function")
        arguments = parsed(function.get("arguments", function.get("parameters")) or {}, BROKEN_CALL)
        if not isinstance(arguments, dict):
            raise Unreadable(BROKEN_CALL, "its arguments are not an object")
        bare = without_nulls(arguments)
        if changes is not None and bare != arguments:
            changes.add(NULLS)
        named = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
        calls.append({**named, "type": "function", "function": {"name": function["name"], "arguments": ordered(bare)}})
    checked(json.dumps(calls, ensure_ascii=False))
    return calls


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as [{type, function: {name, description, parameters}}, ...], keys in one order; None for no tools.

    ``value``: a list, one schema, or the JSON text of either; the elements may be JSON text, too.
    """
    value = parsed(value or [], "broken tools")
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        tool = parsed(tool, "broken tools")
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise Unreadable("broken tools", "a schema that is not an object")
        schema = tool if "function" in tool else {"type": "function", "function": tool}
        tools.append(ordered(without_nulls(schema), TOOL_KEYS))
    checked(json.dumps(tools, ensure_ascii=False))
    return tools or None


def parsed(value: Any, reason: str) -> Any:
    """The value of a JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unreadable(reason, f"not valid JSON: {error}") from error


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def ordered(value: Any, first: tuple[str, ...] = ()) -> Any:
    """The same value with the keys of every object sorted, those in ``first`` before all others."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (first.index(key) if key in first else len(first), key))
        return {key: ordered(value[key], first) for key in keys}
    return [ordered(inner, first) for inner in value] if isinstance(value, list) else value
