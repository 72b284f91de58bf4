"""Data files become tables of ids and masks: exact, cached under everything that matters, and nothing lost in silence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.data.chat import encode
from draftsmith.data.conversations import Reading, read_conversations
from draftsmith.data.examples import Examples, prepare
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError

WORDS = ["yes", "no", "it is so", "perhaps", "ask again", "never", "ten", "of course not"]


def row(i: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": WORDS[i % len(WORDS)]}]
    return {"messages": turns * (1 + i % 3)}


def unanswered(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"question {i}"}]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def content(examples: Examples) -> list[tuple[list[int], list[bool]]]:
    return [(example.ids.tolist(), example.mask.tolist()) for example in examples]


@pytest.fixture
def tokenizer(tiny_tokenizer_factory: Callable[..., Any]) -> Any:
    return tiny_tokenizer_factory()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_row_comes_out_in_order_as_encode_gives_it(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    path, tally = write(tmp_path / "a.jsonl", [row(i) for i in range(20)]), Tally()
    examples = prepare(path, tokenizer, 128, 60, tally, workers=workers)
    expected = [encode(conversation, tokenizer, 60) for conversation in read_conversations(path, Tally())]
    assert content(examples) == [(each.ids.tolist(), each.mask.tolist()) for each in expected]
    assert (tally.read, tally.kept, tally.lost) == (20, 20, 0)
    assert examples.lengths.tolist() == [len(each.ids) for each in expected] and examples.lengths.dtype == np.int32
    assert (examples[3].ids.dtype, examples[3].mask.dtype) == (np.int32, np.bool_)
    assert [e.ids.tolist() for e in examples[4:6]] == [expected[4].ids.tolist(), expected[5].ids.tolist()]
    whole = [encode(conversation, tokenizer, None) for conversation in read_conversations(path, Tally())]
    assert tally.changed["cut at max_length"] == sum(len(each.ids) > 60 for each in whole) > 0
    with pytest.raises(IndexError):
        examples[20]


def test_the_second_time_comes_from_the_cache(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [*map(row, range(9)), unanswered(9)])
    first, again = Tally(), Tally()
    examples = prepare(path, tokenizer, 128, 60, first)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is read or encoded twice")

    monkeypatch.setattr("draftsmith.data.examples.read_conversations", refuse)
    monkeypatch.setattr("draftsmith.data.examples.encode", refuse)
    cached = prepare(path, tokenizer, 128, 60, again)
    assert content(cached) == content(examples) and cached.fingerprint == examples.fingerprint
    assert again.as_json() == first.as_json()


def test_case_10_the_cache_key_holds_all_that_matters(tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any]) -> None:
    rows = [row(i) for i in range(6)]
    path = write(tmp_path / "a.jsonl", rows)

    def made(tokenizer: Any, max_length: int = 60, only_last: bool = False, reading: Reading | None = None) -> Examples:
        return prepare(path, tokenizer, 128, max_length, Tally(), reading, only_last)

    plain, other = tiny_tokenizer_factory(), tiny_tokenizer_factory(pad="<|im_end|>")
    merged = tiny_tokenizer_factory()
    merged.add_tokens(["question"])
    found = [
        made(plain),
        made(tiny_tokenizer_factory("generation")),
        made(other),
        made(merged),
        made(plain, max_length=50),
        made(plain, only_last=True),
        made(plain, reading=Reading(format="messages")),
    ]
    write(tmp_path / "a.jsonl", [*rows[:-1], row(7)])
    found.append(made(plain))
    assert len({examples.fingerprint for examples in found}) == len(found)
    assert content(found[3])[0][0] != content(found[0])[0][0], "the added token is used"
    assert [m for _, m in content(found[5])] != [m for _, m in content(found[0])]
    write(tmp_path / "a.jsonl", rows)
    assert made(plain).fingerprint == found[0].fingerprint


def test_rows_that_teach_nothing_are_counted_and_kept_aside(tmp_path: Path, tokenizer: Any, capfd: Any) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 70}, {"role": "assistant", "content": "late"}]}
    path = write(tmp_path / "a.jsonl", [row(0), unanswered(1), row(2), long])
    for _ in range(2):  # the second time from the cache
        with open(tmp_path / "rejects.jsonl", "w") as rejects:
            tally = Tally(rejects=rejects)
            assert len(prepare(path, tokenizer, 128, 60, tally)) == 2
        assert tally.dropped == {"no assistant turn": 1, "no supervised tokens": 1}
        rejected = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
        assert [(each["row"], each["reason"]) for each in rejected] == [(2, "no assistant turn"), (4, "no supervised tokens")]
        assert rejected[1]["value"] == long and rejected[0]["file"] == path
        tally.warn()
        assert "WARNING: 50% of the rows are lost: 4 rows read, 2 kept" in " ".join(capfd.readouterr().err.split())
    with pytest.raises(UserError, match=re.escape(f"{path}, row 2: no assistant turn: mend or remove the row")):
        prepare(path, tokenizer, 128, 60, Tally(strict=True))


def test_a_changed_row_that_is_dropped_counts_as_dropped_alone(tmp_path: Path, tokenizer: Any) -> None:
    greeted = {"messages": [{"role": "assistant", "content": "welcome"}, *row(0)["messages"]]}
    asked = {"messages": [{"role": "assistant", "content": "welcome"}, *unanswered(1)["messages"]]}
    asked["messages"] += [{"role": "assistant", "content": "no", "weight": 0}]
    tally = Tally()
    assert len(prepare(write(tmp_path / "a.jsonl", [row(0), greeted, asked]), tokenizer, 128, 60, tally)) == 2
    assert tally.as_json()["rows"] == {"read": 3, "kept": 2, "changed": 1, "dropped": 1}


def test_a_row_that_the_template_refuses_is_dropped_with_its_reason(
    tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any]
) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}, *row(0)["messages"]]}
    path, tally = write(tmp_path / "a.jsonl", [row(0), system, row(1)]), Tally()
    assert len(prepare(path, tiny_tokenizer_factory("strict"), 128, 60, tally)) == 2
    (reason,) = tally.dropped
    assert "refuses" in reason and tally.lost == 1


def test_tokens_beyond_the_model_cost_their_row_and_a_padded_vocabulary_nothing(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<surplus>"])  # id 111
    odd = {"messages": [{"role": "user", "content": "what is <surplus>?"}, *row(0)["messages"][1:]]}
    path = write(tmp_path / "a.jsonl", [row(0), odd, row(1)])
    for vocab_size, kept in ((111, 2), (112, 3), (128, 3)):
        tally = Tally()
        assert len(prepare(path, tokenizer, vocab_size, 60, tally)) == kept
        assert tally.dropped == ({"a token beyond the target's vocabulary": 1} if kept == 2 else {})
    with pytest.raises(UserError, match="the chat template writes .* beyond the target's 50 tokens"):
        prepare(path, tokenizer, 50, 60, Tally())


def test_a_file_of_which_nothing_is_left_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [unanswered(i) for i in range(3)])
    with pytest.raises(
        UserError,
        match="no conversation of .*a.jsonl is left to learn from .3 rows read, 0 kept, .*: let the target answer them first",
    ):
        prepare(path, tokenizer, 128, 60, Tally())


def test_case_08_chats_and_ready_texts_side_by_side(tmp_path: Path, tokenizer: Any) -> None:
    """Twenty in, twenty out, in order: ten chats, ten rows of prompt and response."""
    texts = [{"prompt": f"question {i}", "response": WORDS[i % len(WORDS)]} for i in range(10)]
    chats = [{"messages": row(3 * i)["messages"]} for i in range(10)]
    mixed = [each for pair in zip(chats, texts, strict=True) for each in pair]
    tally = Tally()
    examples = prepare(write(tmp_path / "a.jsonl", mixed), tokenizer, 128, 60, tally)
    assert (len(examples), tally.lost) == (20, 0) and min(examples.lengths) > 2
    for i, example in enumerate(examples):
        assert f"question {3 * (i // 2) if i % 2 == 0 else i // 2}" in tokenizer.decode(example.ids)


CALLING = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ 'call ' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("workers", [1, 2])
def test_case_07_tool_calls_in_any_notation(tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any], workers: int) -> None:
    """Arguments as an object or as JSON text give the same ids, key order has no say, and no row gets another row's keys."""

    def talk(arguments: Any, tool: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "is it wet?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "it rains"},
            {"role": "assistant", "content": "yes."},
        ]
        return {"messages": turns, "tools": [tool]}

    there = {"name": "look", "description": "look at the sky", "parameters": {"type": "object", "properties": {}}}
    back = {key: there[key] for key in reversed(there)}
    rows = [
        talk({"b": 1, "a": "x"}, there),
        talk('{"a": "x", "b": 1}', back),
        talk({"other": 2}, there),
    ]
    tokenizer = tiny_tokenizer_factory(CALLING)
    examples = prepare(write(tmp_path / "a.jsonl", rows), tokenizer, 128, None, Tally(), workers=workers)
    first, second, third = examples
    assert first.ids.tolist() == second.ids.tolist() and first.mask.tolist() == second.mask.tolist()
    assert tokenizer.decode(first.ids[first.mask]) == 'call look {"a": "x", "b": 1}<|im_end|>yes.<|im_end|>'
    assert tokenizer.decode(third.ids[third.mask]) == 'call look {"other": 2}<|im_end|>yes.<|im_end|>'
    assert "null" not in tokenizer.decode(third.ids)
