"""Which turns the target answers, and what becomes of its answers: docs/regenerate.md's table, row by row."""

import pytest

from draftsmith.data.conversations import Conversation
from draftsmith.data.loops import ends_in_a_loop, is_a_loop
from draftsmith.data.rewriting import CUT, EMPTY, LOOP, NOTHING_TO_ANSWER, Answer, Rewrite, Settings, plan, whole_thought
from draftsmith.errors import UserError

CALL = [{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
PROSE = "the river rises early in spring and the fields below the mill stand under water until the first warm days of april"


def messages(letters: str) -> list[dict]:
    """s, u, a, t: a turn of that role; c: a call of a tool; w: an assistant turn of weight 0. Contents are numbered."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "w": "assistant", "t": "tool"}
    extras = {"c": {"tool_calls": CALL}, "w": {"weight": 0}}
    return [{"role": roles[letter], "content": f"{letter}{i}", **extras.get(letter, {})} for i, letter in enumerate(letters)]


def shape(letters: str, unanswered: bool = False) -> str:
    """The plan in letters: A where the target answers, k for an assistant turn that is kept with weight 0."""
    turns = plan(Conversation(messages(letters), "f", 1, unanswered=unanswered))
    assert [turn["content"] for turn in turns if turn] == [
        m["content"] for m in messages(letters) if m["content"] in str(turns)
    ]
    kept = [turn for turn in turns if turn and turn["role"] == "assistant"]
    assert all(turn["weight"] == 0 for turn in kept)
    return "".join("A" if turn is None else "k" if turn["role"] == "assistant" else turn["role"][0] for turn in turns)


@pytest.mark.parametrize(
    ("letters", "planned"),
    [
        ("ua", "uA"),
        ("suaua", "suAuA"),
        ("u", "uA"),  # ends with the user: answered
        ("uau", "uAuA"),
        ("uaa", "uA"),  # answers in a row are one
        ("uaaua", "uAuA"),
        ("uucta", "uuktA"),  # a call stays, its result too, what follows is written
        ("uct", "uktA"),
        ("ucta" + "ua", "uktAuA"),
        ("uc", "uk"),  # nothing to answer
        ("au", "kuA"),  # nobody asked for a greeting
        ("saua", "skuA"),
        ("uwua", "uAuA"),  # what was not to be learned from becomes the target's own
        ("a", "k"),
        ("s", "s"),
        ("us", "usA"),
    ],
)
def test_which_turns_the_target_writes(letters: str, planned: str):
    assert shape(letters) == planned


def test_unanswered_turns_are_answered_one_by_one():
    assert shape("suuu", unanswered=True) == "suAuAuA"


def rewritten(letters: str, *answers: Answer) -> Rewrite:
    rewrite = Rewrite(Conversation(messages(letters), "f", 1, about={"id": 7}), 3, 0.5)
    for answer in answers:
        assert rewrite.due
        rewrite.take(answer)
    assert not rewrite.due
    return rewrite


def said(text: str, finish: str = "stop", reread: bool | None = True) -> Answer:
    return Answer(text, finish, len(text.split()) + 1, reread=reread)


def test_a_row_holds_the_target_s_words_and_where_they_belong():
    rewrite = rewritten("suaua", said(" one "), said("two\n", reread=False))
    contents = [message["content"] for message in rewrite.messages]
    assert contents == ["s0", "u1", " one ", "u3", "two\n"]  # white space is what the target wrote
    assert rewrite.row() == {"id": 7, "messages": rewrite.messages, "finish": "stop", "temperature": 0.5, "row": 3}
    assert (rewrite.answers, rewrite.tokens, rewrite.retokenized, rewrite.ids_known) == (2, 4, 1, True)


@pytest.mark.parametrize(
    ("letters", "answers", "left", "finish", "cause", "unwritten"),
    [
        ("uaua", [said("one"), said("two")], 4, "stop", None, 0),
        ("ua", [said("one", "length")], 2, "length", None, 0),  # cut, and nothing was due after it
        ("uauau", [said("one", "length")], 2, "length", CUT, 2),
        ("uauc", [said("one", "length")], 2, "length", None, 0),  # no kept turn follows an answer that was cut
        ("uauaua", [said("one"), said(" \n")], 2, "stop", EMPTY, 2),  # ends at the last good answer
        ("uaucta", [said("one"), said("no " * 40)], 2, "stop", LOOP, 1),
        ("uaua", [said("<think>\nhm\n</think>\n\n")], 0, "stop", EMPTY, 2),  # a thought is no answer
        ("ua", [said("no " * 40, "length")], 0, "stop", LOOP, 1),  # a loop, whether or not it was cut
        ("ucta", [said("")], 0, "stop", EMPTY, 1),
        ("uc", [], 0, "stop", NOTHING_TO_ANSWER, 0),
    ],
)
def test_how_a_conversation_ends(letters: str, answers: list, left: int, finish: str, cause: str | None, unwritten: int):
    rewrite = rewritten(letters, *answers)
    assert (len(rewrite.messages), rewrite.finish, rewrite.cause, rewrite.unwritten) == (left, finish, cause, unwritten)
    assert (rewrite.answers == 0) == (left == 0)
    assert rewrite.tokens == sum(answer.tokens for answer in answers)  # paid for, kept or not


@pytest.mark.parametrize(
    ("prompt", "text", "whole"),
    [
        ("a\n", "hello", "hello"),
        ("a\n<think>\n", "hm\n</think>\n\nhello", "<think>\nhm\n</think>\n\nhello"),
        ("a\n<think>", " hm</think>hello", "<think> hm</think>hello"),
        ("a\n<think>\n", "hm", "<think>\nhm"),  # cut inside the thought
        ("a\n<think>\n\n</think>\n\n", "hello", "hello"),  # the prompt closed it
        ("a\n", "<think>hm</think>hello", "<think>hm</think>hello"),
        ("", "hm</think>hello", "<think>\nhm</think>hello"),  # from a server: its prompt is not known
        ("a\n<think>\n", "", ""),
    ],
)
def test_a_thought_that_the_prompt_opened_is_whole(prompt: str, text: str, whole: str):
    assert whole_thought(prompt, text) == whole


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        (PROSE, False),
        ("yes and no or " * 12, True),
        ("!" * 100, True),
        (PROSE + "\n" + "-" * 40, False),  # a ruler
        (" ".join(f"{PROSE} {i}" for i in range(3)), True),  # words repeat throughout
        (PROSE + "1, 2; " * 30, True),
        ("1, 2; " * 5, False),
        ("", False),
    ],
)
def test_loops_are_told_from_prose(text: str, loops: bool):
    assert is_a_loop(text) == loops


def test_a_loop_at_the_end_of_a_long_answer():
    numbered = " ".join(f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i * 7 % 26)}" for i in range(600))
    again = " I hope this helps you with the question."
    assert not is_a_loop(numbered + again * 3)
    assert ends_in_a_loop(numbered + again * 4) and ends_in_a_loop(numbered + again * 5 + " I hope")


def test_temperatures_are_drawn_by_seed_and_place():
    settings = Settings(temperatures=(0.0, 0.7, 1.0), seed=5)
    drawn = [settings.temperature(index) for index in range(300)]
    assert drawn == [settings.temperature(index) for index in range(300)] and set(drawn) == {0.0, 0.7, 1.0}
    assert min(map(drawn.count, set(drawn))) > 60
    assert drawn != [Settings(temperatures=(0.0, 0.7, 1.0), seed=6).temperature(index) for index in range(300)]
    with pytest.raises(UserError, match="temperature is -1"):
        Settings(temperatures=(0.5, -1))
