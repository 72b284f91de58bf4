"""Prompt look-up proposes what its definition says, however the text grew."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_texts import begun, drafted

from draftsmith.errors import UserError
from draftsmith.eval.ngram import NGram


def looked_up(tokens: list[int], length: int, most: int, least: int) -> list[int]:
    """What followed the first occurrence of the longest n-gram at the text's end that occurred before."""
    for size in range(most, least - 1, -1):
        for end in range(size, len(tokens)):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + length]
    return []


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=50),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    length=st.integers(1, 7),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    room=st.integers(0, 8),
)
def test_the_draft_is_the_definitions(
    tokens: list[int], steps: list[int], length: int, sizes: tuple[int, int], room: int
) -> None:
    proposer = NGram(length, max(sizes), min(sizes))
    text = begun(proposer, tokens[: steps[0]], room)
    for step in steps:
        draft = proposer.draft(text)
        assert draft.tokens == looked_up(text.tokens, min(length, room), max(sizes), min(sizes))
        assert draft.shape.is_chain and draft.shape.nodes == len(draft.tokens)
        text.tokens += tokens[len(text.tokens) : len(text.tokens) + step]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 8, 5, 1, 2, 9, 6, 1, 2], [8, 5, 1, 2, 9]),  # the first of two
        ([5, 2, 8, 1, 2, 9, 6, 1, 2], [9, 6, 1, 2]),  # the longer one, though a shorter one came before
        ([7, 7, 7], [7]),  # a match may reach into the end
        ([7, 7, 7, 7, 7, 7], [7, 7]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_which_occurrence_wins(tokens: list[int], expected: list[int]) -> None:
    assert drafted(NGram(5, 4, 1), tokens) == expected


def test_a_match_must_be_long_enough() -> None:
    tokens = [1, 2, 9, 5, 1, 2]
    assert drafted(NGram(2, 4, 2), tokens) == [9, 5]
    assert drafted(NGram(2, 4, 3), tokens) == []


def test_two_texts_do_not_know_each_other() -> None:
    proposer = NGram(3, 2, 1)
    texts = [begun(proposer, [1, 2, 1]), begun(proposer, [1, 5, 1])]
    assert [draft.tokens for draft in proposer.propose(texts, None)] == [[2, 1], [5, 1]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "name"),
    [("", "ngram:5,max=4,min=1"), ("3", "ngram:3,max=4,min=1"), ("7,min=2,max=3", "ngram:7,max=3,min=2")],
)
def test_settings(settings: str, name: str) -> None:
    described = NGram.read(settings).described()
    assert described["name"] == name and described["kind"] == "chain"
    assert described["length"] == described["nodes"] == NGram.read(settings).length
    assert NGram.read(name.removeprefix("ngram:")).described() == described


@pytest.mark.parametrize(
    ("settings", "message"),
    [("x", "cannot be read"), ("0", "below 1"), ("5,most=3", "no setting"), ("5,max=2,min=3", "no larger than max")],
)
def test_what_cannot_be_read_is_refused(settings: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        NGram.read(settings)
