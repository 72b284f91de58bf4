"""One row of the table in docs/reading.md after the other, and what becomes of files as a whole."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.conversations import Conversation, Reading, read_conversations
from draftsmith.data.shapes import SHAPES
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reading.md"


def user(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str = "be kind") -> dict[str, Any]:
    return {"role": "system", "content": content}


def tool(content: Any = "4", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def chat(*messages: Any, **row: Any) -> dict[str, Any]:
    return {"messages": list(messages), **row}


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


@dataclass(frozen=True)
class Kept:
    """A row of the table: the record, the messages that come of it, and the changes that are counted."""

    rule: str
    record: Any
    messages: list[dict[str, Any]]
    changes: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # other fields of the conversation


@dataclass(frozen=True)
class Dropped:
    rule: str
    record: Any
    reason: str
    detail: str = ""


SCHEMA = {"name": "add", "description": "sums", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": SCHEMA}]
ADD = call({})
CALLED = [user(), calling(ADD), tool(), answer()]
READ_BACK = ("rendered chats read back",)
EMPTY, JOINED = "empty turns left out", "turns of one role joined"
OPENING = "turns before the first user turn left out"
PAIR = [user(), answer()]
UNANSWERED = {"unanswered": True}

KEPT = [
    Kept("role names", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, PAIR),
    *(
        Kept("role names", {"conversation": [{"from": asks, "value": "hi"}, {"from": answers, "value": "hello"}]}, PAIR)
        for asks, answers in [("User", "ChatGPT"), ("prompter", "bing"), ("human ", "bard"), ("user", "model"), ("user", "AI")]
    ),
    *(
        Kept("role names", chat(user(), calling(ADD), {"from": role, "value": "4"}, answer()), CALLED)
        for role in ["tool", "function", "observation", "tool_response", "ipython"]
    ),
    Kept(
        "developer", chat({"role": "developer", "content": "be kind"}, *PAIR), [system(), *PAIR], ("developer read as system",),
    ),
    Kept(
        "content parts", chat(user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]), answer()),
        [user("a\nb"), answer()],
    ),
    Kept("content parts", chat(user([{"text": "hi"}]), answer({"type": "text", "text": "hello"})), PAIR),
    Kept("number as content", chat(user(1.5), answer(True)), [user("1.5"), answer("true")], ("numbers read as text",)),
    Kept("number as content", {"question": "hi", "answer": 42}, [user(), answer("42")], ("numbers read as text",)),
    Kept("null beside tool calls", chat(user(), answer(None, tool_calls=[ADD]), tool(), answer()), CALLED),
    Kept("empty turn", chat(*PAIR, user(" \n"), answer("")), PAIR, (EMPTY,)),
    Kept("empty turn", chat(None, user(), user(None), answer([]), answer()), PAIR, (EMPTY,)),
    Kept("empty turn", chat(user(), answer(None)), [user()], (EMPTY,), UNANSWERED),
    Kept("reasoning without an answer", chat(*PAIR, user("so"), answer("", reasoning="hm")), [*PAIR, user("so")], (EMPTY,)),
    Kept("empty tool result", chat(user(), calling(ADD), tool(""), answer()), [user(), calling(ADD), tool(""), answer()]),
    Kept(
        "tool result as JSON", chat(user(), calling(ADD), tool({"é": [1]}), tool([1, 2]), answer()),
        [user(), calling(ADD), tool('{"é": [1]}'), tool("[1, 2]"), answer()], ("tool results written as JSON",),
    ),
    Kept(
        "two turns of one role", chat(user("a"), user("b"), answer("c"), answer("d")), [user("a\n\nb"), answer("c\n\nd")],
        (JOINED,),
    ),
    Kept("two turns of one role", chat(system("a"), system("b"), user()), [system("a\n\nb"), user()], (JOINED,), UNANSWERED),
    Kept(
        "two turns of one role", chat(user(), answer("a", weight=0), answer("b")), [user(), answer("a\n\nb", weight=0)],
        (JOINED,),
    ),
    Kept(
        "two turns of one role", chat(user("a", name="Ann"), user("b", name="Ann"), user("c", name="Bo"), answer()),
        [user("a\n\nb\n\nc"), answer()], (JOINED,),
    ),
    Kept(
        "two turns of one role", chat(user(), answer("a", thinking="x"), answer("b", thinking="y"), answer("c")),
        [user(), answer("a\n\nb\n\nc", reasoning_content="x\n\ny")], (JOINED,),
    ),
    Kept(
        "two turns of one role", chat(user("a"), answer(""), user("b"), answer()), [user("a\n\nb"), answer()], (EMPTY, JOINED)
    ),
    Kept(
        "tool results in a row", chat(user(), calling(ADD, ADD), tool("1"), tool("2"), answer()),
        [user(), calling(ADD, ADD), tool("1"), tool("2"), answer()],
    ),
    Kept(
        "turns that call tools", chat(user(), answer("wait"), calling(ADD), calling(ADD), tool(), answer()),
        [user(), answer("wait"), calling(ADD), calling(ADD), tool(), answer()],
    ),
    Kept("opens with the assistant", chat(answer("welcome"), *PAIR), PAIR, (OPENING,)),
    Kept("opens with the assistant", chat(answer("a"), system(), answer("b"), tool(), *PAIR), [system(), *PAIR], (OPENING,)),
    Kept("opens with the assistant", chat(answer("welcome"), user()), [user()], (OPENING,), UNANSWERED),
    Kept("ends with the user", chat(*PAIR, user("bye")), [*PAIR, user("bye")]),
    Kept("no assistant turn", chat(system(), user("a"), user("b")), [system(), user("a"), user("b")], (), UNANSWERED),
    Kept("system in the middle", chat(*PAIR, system(), *PAIR), [*PAIR, system(), *PAIR]),
    Kept("system column", {"system_prompt": "be kind", "question": "hi", "response": "hello"}, [system(), *PAIR]),
    Kept("system column", chat(*PAIR, system="be kind"), [system(), *PAIR]),
    Kept("system column", chat(system("own"), *PAIR, system="be kind"), [system("own"), *PAIR]),
    Kept("system column", {"system": "", "instruction": "hi", "output": "hello"}, PAIR, (EMPTY,)),
    Kept(
        "names", chat(user(name="Ann"), calling({"id": "c1", **ADD}), tool(name="add", tool_call_id="c1"), answer(name="")),
        [user(name="Ann"), calling({"id": "c1", **ADD}), tool(tool_call_id="c1", name="add"), answer()],
    ),
    Kept(
        "tool calls", chat(user(), answer("", tool_calls=[{"name": "add", "arguments": {"b": 1}}]), tool(), answer()),
        [user(), calling(call({"b": 1})), tool(), answer()],
    ),
    Kept(
        "tool calls", chat(user(), answer(None, tool_calls=json.dumps([call({"b": 1})])), tool()),
        [user(), calling(call({"b": 1})), tool()],
    ),
    Kept("tool calls", chat(user(), answer(tool_calls=[])), PAIR),
    Kept("tool calls", chat(user(), answer("text", tool_calls=[ADD])), [user(), {**calling(ADD), "content": "text"}]),
    *(
        Kept(
            "arguments as JSON text", chat(user(), calling(call(arguments))),
            [user(), calling(call({"a": {"x": 1, "y": 2}, "b": [3]}))],
        )
        for arguments in [{"b": [3], "a": {"y": 2, "x": 1}}, '{"b": [3], "a": {"y": 2, "x": 1}}']
    ),
    *(
        Kept("arguments as JSON text", chat(user(), calling(call(none))), [user(), calling(ADD)])
        for none in ["", None, {}, "{}"]
    ),
    *(
        Kept(
            "nulls in arguments", chat(user(), calling(call(nulls))), [user(), calling(call({"a": {}}))],
            ("nulls left out of tool arguments",),
        )
        for nulls in [{"a": {"x": None}, "b": None}, '{"a": {"x": null}, "b": null}']
    ),
    Kept(
        "function_call key", chat(
            user(), answer(None, function_call={"name": "add", "arguments": "{}"}), {**tool(name="add"), "role": "function"}
        ),
        [user(), calling(ADD), tool(name="add")],
    ),
    Kept(
        "function_call turn",
        chat(
            user(), {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "4"},
        ),
        [user(), calling(call({"a": 1})), tool()],
    ),
    *(
        Kept("tools column", {**chat(*PAIR), key: value}, PAIR, (), {"tools": tools})
        for key, value, tools in [
            ("tools", [{**TOOLS[0], "strict": None}], TOOLS), ("functions", [SCHEMA], TOOLS),
            ("tools", json.dumps(TOOLS), TOOLS),
            ("tools", SCHEMA, TOOLS), ("tools", [json.dumps(SCHEMA)], TOOLS), ("tools", [], None),
            ("tools", "", None), ("tools", None, None), ("tools", "[]", None),
        ]
    ),
    *(
        Kept("reasoning fields", chat(user(), answer(**{key: "hm"})), [user(), answer(reasoning_content="hm")])
        for key in ["reasoning_content", "reasoning", "thinking"]
    ),
    Kept("reasoning fields", chat(user(), answer(reasoning_content=None, thinking=" ")), PAIR),
    Kept(
        "reasoning fields", {"question": "hi", "reasoning": "hm", "answer": "hello"}, [user(), answer(reasoning_content="hm")],
    ),
    Kept(
        "thought in the content", chat(user(), answer("<think>\nhm\n</think>\n\nhello")),
        [user(), answer("<think>\nhm\n</think>\n\nhello")],
    ),
    *(
        Kept("unicode", chat(user(text), answer(text)), [user(text), answer(text)])
        for text in ["  \u2028 häß 漢字 👩\u200d🚀\r\n", "\ta", "\ufeff."]
    ),
    Kept("NUL characters", chat(user("h\0i"), answer("\0hello")), PAIR, ("NUL characters left out",)),
    Kept("long turns", chat(user("long " * 200_000), answer()), [user("long " * 200_000), answer()]),
    Kept(
        "weight", chat(user(weight=0), answer(weight=0), user(), answer(weight=1), user(), answer(weight=None)),
        [user(), answer(weight=0), *PAIR, *PAIR],
    ),
    Kept("weight between 0 and 1", chat(user(), answer(weight=0.5)), PAIR, ("weights between 0 and 1 read as 1",)),
    *(
        Kept("finish", record, PAIR, (), {"finish": finish})
        for record, finish in [
            (chat(*PAIR, finish="length"), "length"), (chat(*PAIR, finish_reason="max_tokens"), "length"),
            (chat(*PAIR, finish="stop"), "stop"), (chat(user(), answer(finish_reason="length")), "length"),
            (chat(*PAIR, finish=None), "stop"), (chat(*PAIR, finish_reason="tool_calls"), "stop"),
            (chat(user(), answer(finish_reason="length"), finish="stop"), "stop"),
        ]
    ),
    Kept(
        "earlier answer cut", chat(user(), answer(finish_reason="length"), user("on"), answer(finish_reason="stop")),
        [user(), answer(weight=0), user("on"), answer()], ("answers cut before the last not supervised",),
    ),
    Kept("other keys of a turn", chat(user(id=7, html="<p>"), answer(model="x", logprobs=None)), PAIR),
    Kept(
        "labels",
        chat(
            *PAIR, id="x-1", category="math", score=0.5, good=True, long="a" * 101, lines="a\nb", half="\ud83d", list=[1],
            no=None,
        ),
        PAIR, (), {"about": {"id": "x-1", "category": "math", "score": 0.5, "good": True}},
    ),
    Kept("instruction with input", {"instruction": "add", "input": "1, 2", "output": "3"}, [user("add\n\n1, 2"), answer("3")]),
    Kept(
        "instruction with input", {"instruction": "add", "context": "1, 2", "response": "3"},
        [user("add\n\n1, 2"), answer("3")],
    ),
    Kept("instruction with input", {"instruction": "add", "input": " ", "output": "3"}, [user("add"), answer("3")]),
    Kept("instruction with input", {"input": "hi", "output": "hello"}, PAIR),
    Kept(
        "history", {"instruction": "on", "input": "", "output": "end", "history": [["hi", "hello"]]},
        [*PAIR, user("on"), answer("end")],
    ),
    Kept("history", {"prompt": "hi", "response": "hello", "history": []}, PAIR),
    Kept(
        "prompt as turns", {"prompt": [system(), *PAIR, user("on")], "completion": [answer("end")]},
        [system(), user(), answer(weight=0), user("on"), answer("end")],
    ),
    Kept("prompt as turns", {"prompt": [user()], "completion": "hello"}, PAIR),
    Kept("prompt as turns", {"prompt": [system(), user()]}, [system(), user()], (), UNANSWERED),
    Kept(
        "turns of a benchmark", {"question_id": 81, "turns": ["a", "b"], "reference": ["x"]}, [user("a"), user("b")], (),
        {**UNANSWERED, "about": {"question_id": 81}},
    ),
    Kept("turns of a benchmark", {"turns": PAIR}, PAIR),
    Kept(
        "turns of a benchmark",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n", "test": "\nx"},
        [user("def f():\n")], (), {**UNANSWERED, "about": {"task_id": "HumanEval/0"}},
    ),
    Kept("bare text", {"text": "Once <|im_start|> was"}, [user("Once <|im_start|> was")], (), UNANSWERED),
    *(
        Kept("rendered chat", {"text": text}, [system(), *PAIR], ("rendered chats read back",))
        for text in [
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nhello<|eot_id|><|end_of_text|>",
            "<|system|>\nbe kind<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nhello<|end|>\n<|endoftext|>",
            "<|system|>\nbe kind</s>\n<|user|>\nhi</s>\n<|assistant|>\nhello</s>\n",
        ]
    ),
    Kept(
        "rendered chat", "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nhello<end_of_turn>\n", PAIR,
        READ_BACK,
    ),
    Kept("bare list or string", PAIR, PAIR),
    Kept("bare list or string", "hi", [user()], (), UNANSWERED),
]  # fmt: skip

DROPPED = [
    Dropped("unknown role", chat(user(), {"role": "narrator", "content": "x"}), "unknown role", "narrator"),
    Dropped("turn without a role", chat({"content": "hi"}), "turn without a role", "content"),
    Dropped("turn without a role", chat({"role": 3, "content": "hi"}), "turn without a role"),
    Dropped("turn that is not an object", chat("hi", *PAIR), "turn that is not an object", "str"),
    Dropped(
        "part that is not text", chat(user([{"type": "image_url", "image_url": "x"}])), "content that is not text", "image_url",
    ),
    Dropped("part that is not text", chat(user(["hi"])), "content that is not text", "str"),
    Dropped("part that is not text", {"question": "hi", "answer": ["a", "b"]}, "content that is not text", "str"),
    Dropped("part that is not text", {"prompt": {"a": 1}, "response": "x"}, "content that is not text"),
    Dropped("no user turn", chat(system(), answer()), "no user turn"),
    Dropped("no turns", chat(), "no turns"),
    Dropped("no turns", {"turns": []}, "no turns"),
    Dropped("no turns", chat(None, user("")), "no turns"),
    Dropped("tool results alone", chat(user(), tool()), "tool results without an answer"),
    *(
        Dropped("broken tool call", chat(user(), calling(wrong)), "broken tool call")
        for wrong in [call('{"a": '), call("[1]"), call('"{}"'), call(7), {"function": {"arguments": {}}}, {"function": "add"}]
    ),
    Dropped("broken tool call", chat(user(), answer(tool_calls="add(1)")), "broken tool call"),
    Dropped("broken tool call", chat(user(), {"from": "function_call", "value": "add"}), "broken tool call"),
    Dropped("broken tool call", chat(user(), {"from": "function_call", "value": None}), "broken tool call"),
    Dropped("broken tools", chat(*PAIR, tools="add, subtract"), "broken tools"),
    Dropped("broken tools", chat(*PAIR, tools=[1]), "broken tools"),
    Dropped("half a surrogate pair", chat(user("hi \ud83d"), answer()), "half a surrogate pair", "at character 4"),
    Dropped("half a surrogate pair", chat(user(), calling(call({"a": "\udc00"}))), "half a surrogate pair"),
    Dropped("half a surrogate pair", chat(*PAIR, tools=[{"name": "\udc00"}]), "half a surrogate pair"),
    Dropped("weight that is not a number", chat(user(), answer(weight="low")), "weight that is not a number", "'low'"),
    Dropped("unknown finish", chat(*PAIR, finish="content_filter"), "unknown finish", "'content_filter'"),
    Dropped("unknown finish", chat(user(), answer(finish_reason="cut")), "unknown finish"),
    Dropped("history", {"prompt": "a", "response": "b", "history": ["x"]}, "history that is not a list of pairs"),
    *(
        Dropped("rendered chat that cannot be read back", {"text": text}, "rendered chat that cannot be read back")
        for text in [
            "<s>[INST] hi [/INST] hello</s>",
            "### Human: hi ### Assistant: hello",
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhel",
            "<|im_start|>user\nhi<|im_end|> and <|im_start|>assistant\nhello<|im_end|>",
        ]
    ),
    Dropped("no known shape", {"chosen": "a", "rejected": "b"}, "no known shape", "its keys are chosen, rejected"),
    Dropped("no known shape", 7, "no known shape", "int"),
    Dropped("no known shape", None, "no known shape"),
    Dropped("no known shape", {}, "no known shape", "its keys are none"),
    Dropped("no known shape", {"messages": "hi"}, "no known shape"),
]  # fmt: skip


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, *records: Any, **reading: Any) -> tuple[list[Conversation], Tally]:
    tally = Tally()
    return list(read_conversations(write(path, *records), tally, Reading(**reading))), tally


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.rule)
def test_what_becomes_of_a_row_that_is_kept(tmp_path: Path, case: Kept) -> None:
    path, tally = tmp_path / "a.json", Tally()
    path.write_text(json.dumps([case.record]))
    (found,) = read_conversations(path, tally)
    assert found.messages == case.messages
    assert [list(message) for message in found.messages if message.get("tool_calls")] == [
        list(message) for message in case.messages if message.get("tool_calls")
    ]
    assert (tally.read, tally.kept, tally.changed) == (1, 1, Counter(case.changes))
    plain = {"finish": "stop", "tools": None, "unanswered": False, "about": {}}
    more = {**plain, **case.more}
    assert {key: getattr(found, key) for key in more if key in case.more or key != "about"} == {
        key: value for key, value in more.items() if key in case.more or key != "about"
    }
    assert "null" not in json.dumps(found.messages) and (found.file, found.row) == (str(path), 1)


@pytest.mark.parametrize("case", DROPPED, ids=lambda case: case.rule)
def test_what_becomes_of_a_row_that_is_dropped(tmp_path: Path, case: Dropped) -> None:
    with open(tmp_path / "rejects.jsonl", "w+", encoding="utf-8") as rejects:
        tally = Tally(rejects=rejects)
        path = write(tmp_path / "a.jsonl", chat(*PAIR), case.record, chat(*PAIR))
        assert [found.row for found in read_conversations(path, tally)] == [1, 3]
        rejects.seek(0)
        (rejected,) = map(json.loads, rejects)
    assert (tally.read, tally.kept, tally.dropped) == (3, 2, Counter([case.reason]))
    assert rejected == {"file": str(path), "row": 2, "reason": case.reason, "detail": rejected["detail"], "value": case.record}
    assert case.detail in rejected["detail"]
    with pytest.raises(UserError, match=re.escape(f"{path}, row 2: {case.reason}")):
        list(read_conversations(path, Tally(strict=True)))


def test_the_table_in_the_docs_has_the_rules_that_are_tested() -> None:
    table = DOCS.read_text().split("## Rules")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]
    assert {rule for rule, *_ in rows} == {case.rule for case in [*KEPT, *DROPPED]} | {"not of the given format"}
    counted = {case.rule: f"dropped: {case.reason}" for case in DROPPED}
    changed = {case.rule: f"changed: {case.changes[0]}" for case in KEPT if len(case.changes) == 1}
    said = {rule: outcome for rule, _, outcome in rows if outcome}
    assert all(said[rule] == outcome for rule, outcome in {**changed, **counted}.items() if rule in said)
    assert counted.keys() <= said.keys()


def test_arguments_are_in_sorted_order_and_schemas_in_the_servers(tmp_path: Path) -> None:
    """The order of keys in the file has no effect on what a template writes."""
    upside_down = [{"function": dict(reversed(SCHEMA.items())), "type": "function"}]
    rows = [
        chat(user(), calling(call({"b": 1, "a": 2})), tools=upside_down),
        chat(user(), calling(call('{"a":2,"b":1}')), tools=TOOLS),
    ]
    (first, second), _ = read(tmp_path / "a.jsonl", *rows)
    assert json.dumps(first.messages) == json.dumps(second.messages)
    assert json.dumps(first.tools) == json.dumps(second.tools)
    assert list(first.tools[0]) == ["type", "function"]  # type: ignore[index]
    assert list(first.tools[0]["function"]) == ["name", "description", "parameters"]  # type: ignore[index]


EXAMPLES = {
    "messages": chat(*PAIR),
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "turns": {"turns": ["hi"]},
    "alpaca": {"instruction": "hi", "input": "", "output": "hello"},
    "pair": {"question": "hi", "answer": "hello"},
    "prompt": {"query": "hi"},
    "rendered": {"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"},
    "text": {"text": "hi"},
}


def test_a_format_given_by_name_reads_its_own_shape_and_no_other(tmp_path: Path) -> None:
    assert EXAMPLES.keys() == SHAPES.keys()
    rows = dict(enumerate(EXAMPLES, start=1))
    overlaps = {"pair": {"alpaca"}, "prompt": {"alpaca", "pair"}, "text": {"rendered"}}
    for shape in SHAPES:
        found, tally = read(tmp_path / "a.jsonl", *EXAMPLES.values(), format=shape)
        assert {rows[conversation.row] for conversation in found} == {shape} | overlaps.get(shape, set())
        assert tally.dropped == {"not of the given format": len(EXAMPLES) - len(found)}
    whole, tally = read(tmp_path / "a.jsonl", *EXAMPLES.values())
    assert tally.kept == len(EXAMPLES) and all(found.messages[0] == user() for found in whole)


@pytest.mark.parametrize(
    ("columns", "record"),
    [
        (
            {"messages": "dialog", "role": "speaker", "content": "text"},
            {"dialog": [{"speaker": "user", "text": "hi"}, {"speaker": "bot", "text": "hello"}]},
        ),
        ({"prompt": "problem", "response": "solution"}, {"problem": "hi", "solution": "hello", "id": 3}),
        ({"messages": "chosen"}, {"prompt": "no", "chosen": PAIR, "messages": []}),
        ({"response": "gold"}, {"question": "hi", "answer": "no", "gold": "hello"}),
    ],
)  # fmt: skip
def test_columns_give_a_file_our_names(tmp_path: Path, columns: dict[str, str], record: dict[str, Any]) -> None:
    (found,), tally = read(tmp_path / "a.jsonl", record, columns=columns)
    assert found.messages == PAIR and not tally.changed


@pytest.mark.parametrize(
    ("reading", "sentence"),
    [
        ({"format": "chat"}, "there is no format 'chat': choose auto, messages, sharegpt, turns"),
        ({"columns": {"speaker": "role"}}, "columns cannot name 'speaker': write OURS=THEIRS with one of messages, prompt"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(reading: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        Reading(**reading)


@pytest.mark.parametrize("content", ['[{"messages": [{"role"', '{"data": ['])
def test_a_file_without_one_whole_row_is_told_by_its_damage(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        UserError, match=r"no conversation came out of .*a.json, for .* is damaged at .*: mend or replace the file"
    ):
        list(read_conversations(tmp_path / "a.json", Tally(), Reading(salvage=True)))


def test_a_source_without_a_conversation_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a.jsonl holds no conversation: give at least one row"):
        read(tmp_path / "a.jsonl")
    sentence = r"no row of .*a.jsonl makes a conversation \(no known shape: 2, no turns: 1; its keys are a\): name its"
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / "a.jsonl", {"a": 1}, chat(), {"b": 1})


def test_chats_and_rendered_texts_all_come_out_in_order(tmp_path: Path) -> None:
    """Ten chats, ten texts that a template has rendered: twenty in, twenty out."""
    texts = [f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n" for i in range(10, 20)]
    rows = [*(chat(user(str(i)), answer()) for i in range(10)), *({"text": text} for text in texts)]
    found, tally = read(tmp_path / "a.jsonl", *rows)
    assert [conversation.messages for conversation in found] == [[user(str(i)), answer()] for i in range(20)]
    assert (tally.read, tally.kept, tally.changed_rows) == (20, 20, 10)


CONTENTS = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.integers(),
    st.lists(st.builds(lambda t: {"type": "text", "text": t}, st.text(max_size=4))),
)
ROLE_NAMES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "human", "gpt", "narrator"])
TURNS = st.fixed_dictionaries(
    {"role": ROLE_NAMES, "content": CONTENTS}, optional={"weight": st.sampled_from([0, 1, None]), "reasoning": CONTENTS}
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.one_of(TURNS, st.none()), max_size=6), min_size=1, max_size=8))
def test_every_row_is_kept_in_a_form_that_templates_can_read_or_counted_as_dropped(
    tmp_path_factory: Any, rows: list[Any]
) -> None:
    path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", *(chat(*turns) for turns in [*rows, PAIR]))
    tally = Tally()
    found = list(read_conversations(path, tally))
    assert tally.read == len(rows) + 1 and tally.kept == len(found) and tally.changed_rows <= len(found)
    for conversation in found:
        roles = [message["role"] for message in conversation.messages]
        assert next(role for role in roles if role != "system") == "user" and set(roles) <= {
            "system",
            "user",
            "assistant",
            "tool",
        }
        assert conversation.unanswered == ("assistant" not in roles) <= ("tool" not in roles)
        assert all(
            isinstance(message["content"], str) and (message["content"].strip() or message["role"] == "tool")
            for message in conversation.messages
        )
        assert conversation.unanswered or all(a != b or a == "tool" for a, b in pairwise(roles))
        assert not {"finish", "from", "value"} & {key for message in conversation.messages for key in message}
