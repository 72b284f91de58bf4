"""Benchmarks and chats of every shape become the questions of each row."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.prompts import Prompt, read_prompts
from draftsmith.target import Target

SYSTEM = {"role": "system", "content": "be kind"}
ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    ("row", "messages", "later", "category", "own"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["hi", "and then?"], "reference": ["x"]},
            [ASK],
            ("and then?",),
            "writing",
            "81",
        ),
        ({"turns": ["hi"], "category": ""}, [ASK], (), "all", "1"),
        ({"task_id": "HumanEval/0", "prompt": "hi", "test": "assert"}, [ASK], (), "all", "HumanEval/0"),
        ({"question": "hi", "answer": "hello"}, [ASK], (), "all", "1"),
        (
            {"id": 0, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            [ASK],
            (),
            "all",
            "0",
        ),
        ({"messages": [SYSTEM, ASK, ANSWER, ASK, ANSWER], "category": 3}, [SYSTEM, ASK], ("hi",), "3", "1"),
        ({"messages": [SYSTEM, ASK, {"role": "user", "content": "another"}]}, [SYSTEM, ASK], ("another",), "all", "1"),
        ({"messages": [ASK, ANSWER, ASK, CALL, RESULT, ANSWER, ASK, ANSWER]}, [ASK], ("hi",), "all", "1"),
        ({"messages": [ASK, CALL, RESULT, ANSWER, ASK, ANSWER]}, [ASK], (), "all", "1"),
        ({"messages": [ANSWER, ASK, ANSWER]}, [ASK], (), "all", "1"),
        ({"text": "hi"}, [ASK], (), "all", "1"),
    ],
)
def test_a_row_is_asked_turn_by_turn(
    tmp_path: Path, row: dict[str, Any], messages: list[Any], later: tuple[str, ...], category: str, own: str
) -> None:
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", row))
    assert (prompt.messages, prompt.later, prompt.category, prompt.id) == (messages, later, category, own)


def test_ids_that_do_not_tell_prompts_apart_are_left(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path / "a.jsonl", *({"id": own, "prompt": "hi"} for own in ("a", "b", "a"))))
    assert [prompt.id for prompt in prompts] == ["1", "2", "3"]


@pytest.mark.parametrize(("thinking", "opening"), [(None, "default"), (True, "thinks"), (False, "does not think")])
def test_a_prompt_tells_the_template_whether_to_think(
    tiny_target: Target, tiny_tokenizer_factory: Any, thinking: bool | None, opening: str
) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %} "
        "{{ 'default' if enable_thinking is not defined else 'thinks' if enable_thinking else 'does not think' }}"
    )
    target = Target(tiny_target.model, tiny_tokenizer_factory(template), "thinking")
    ids = Prompt([ASK], thinking=thinking).ids(target)
    assert target.tokenizer_or_refuse().decode(ids) == f"hi {opening}"


def test_packed_files_text_files_and_several_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "one"}\n'))
    (tmp_path / "b.txt").write_text("two\nthree\n")
    prompts = read_prompts([tmp_path / "a.jsonl.gz", str(tmp_path / "b.txt")])
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["one", "two", "three"]


def test_a_prompt_shows_the_target_its_tools(tmp_path: Path, tiny_target: Target, tiny_tokenizer_factory: Any) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    target = Target(tiny_target.model, tiny_tokenizer_factory(template), "tools")
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", {"messages": [ASK, ANSWER], "tools": TOOLS}))
    text = target.tokenizer_or_refuse().decode(prompt.ids(target))
    assert '"name": "add"' in text and text.endswith("hi")


def test_rows_without_a_question_are_left_out_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read_prompts(write(tmp_path / "a.jsonl", {"prompt": "hi"}, {"messages": []}, {"reference": "x"}))) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "not every row of the prompts can be asked: 3 rows read, 1 kept, 2 dropped (no turns: 1, no known shape: 1)" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"prompt": "hi"}\n{"prompt": \n', "a.jsonl is damaged at line 2 (not valid JSON"),
        ("", "a.jsonl holds no conversation: give at least one row"),
        ('{"reference": "x"}\n', "a.jsonl makes a conversation (no known shape: 1; its keys are reference): name its shape"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_prompts(tmp_path / "a.jsonl")
