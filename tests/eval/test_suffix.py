"""Suffix decoding drafts what counting by hand finds, from an automaton that grows with the text."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_texts import begun, drafted, paths_of, whole

from draftsmith.errors import UserError
from draftsmith.eval.automaton import Automaton
from draftsmith.eval.suffix import Suffix
from draftsmith.eval.verifier import Request, decode
from draftsmith.target import Target

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def followers(texts: list[list[int]], run: list[int]) -> Counter[int]:
    """How often every token followed a run, in the order they first did."""
    size = len(run)
    return Counter(text[at] for text in texts for at in range(size, len(text)) if text[at - size : at] == run)


def best_path(texts: list[list[int]], tokens: list[int], length: int, factor: float, least: float) -> tuple[float, list[int]]:
    """Every end of the text that was followed by something, longest first: its draft by counting, the best score first."""
    found: tuple[float, list[int]] = (0.0, [])
    for size in range(len(tokens), 0, -1):
        path: list[int] = []
        chance, score = 1.0, 0.0
        while len(path) < min(length, int(size * factor)):
            counts = followers(texts, tokens[-size:] + path)
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            if len(counts) > 1:
                chance *= count / counts.total()
            if chance < least:
                break
            path.append(token)
            score += chance
        if score > found[0]:
            found = (score, path)
    return found


def grown_texts(tokens: list[int], steps: list[int]) -> list[list[int]]:
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    return [tokens[:end] for end in ends]


@settings(max_examples=150, deadline=None)
@given(
    tokens=TOKENS,
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    length=st.integers(1, 9),
    factor=st.sampled_from([0.5, 1.0, 2.5, 4.0]),
    least=st.sampled_from([0.01, 0.1, 0.4, 0.9]),
    room=st.integers(0, 10),
)
def test_the_chain_is_the_one_that_counting_gives(
    tokens: list[int], steps: list[int], length: int, factor: float, least: float, room: int
) -> None:
    proposer = Suffix(length, factor, least)
    text = begun(proposer, tokens[: steps[0]], room)
    for so_far in grown_texts(tokens, steps):
        text.tokens[:] = so_far
        draft = proposer.draft(text)
        assert draft.tokens == best_path([so_far], so_far, min(length, room), factor, least)[1]
        assert draft.shape.is_chain and draft.shape.nodes == len(draft.tokens)


@settings(max_examples=100, deadline=None)
@given(responses=st.lists(TOKENS, min_size=1, max_size=4), tokens=TOKENS, factor=st.sampled_from([1.0, 3.0]))
def test_earlier_responses_are_drafted_where_their_score_is_better(
    responses: list[list[int]], tokens: list[int], factor: float
) -> None:
    proposer = Suffix(6, factor, 0.1, memory=10)
    for response in responses:
        ended = begun(proposer, [9, 8, 9, 8])  # its prompt is no response
        ended.tokens += response
        proposer.finish(ended)
    own = best_path([tokens], tokens, 6, factor, 0.1)
    earlier = best_path(responses, tokens, 6, factor, 0.1)
    assert drafted(proposer, tokens) == (earlier if earlier[0] > own[0] else own)[1]
    assert drafted(Suffix(6, factor, 0.1), tokens) == own[1]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TOKENS, min_size=1, max_size=4), probe=TOKENS)
def test_the_automaton_counts_every_run(texts: list[list[int]], probe: list[int]) -> None:
    automaton = Automaton()
    for text in texts:
        automaton.restart()
        automaton.extend(text)
    assert len(automaton.link) <= 2 * sum(map(len, texts)) + 1
    known = [size for size in range(1, len(probe) + 1) if any(followers([[*text, 9]], probe[-size:]) for text in texts)]
    found = list(automaton.matches(probe))
    assert [length for _, length in found][:1] == known[-1:]
    for state, length in found:
        run = probe[-length:]
        counts = followers(texts, run)
        ending = sum(text[-length:] == run for text in texts)
        assert automaton.count[state] == counts.total() + ending
        assert {token: automaton.count[after] for token, after in automaton.follow[state].items()} == dict(counts)
        assert list(automaton.follow[state]) == list(counts)  # in the order they first came


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, nodes=st.integers(1, 12), room=st.integers(1, 5), least=st.sampled_from([0.01, 0.1, 0.3]))
def test_trees_hold_the_likeliest_paths(tokens: list[int], nodes: int, room: int, least: float) -> None:
    """No path that was left out beats one that was drafted, seen from the match that was chosen."""
    proposer = Suffix(8, 100.0, least, nodes=nodes)
    draft = proposer.draft(begun(proposer, tokens, room))
    whole(draft)
    assert len(draft.tokens) <= nodes and draft.shape.length <= room
    if not draft.tokens:
        assert not followers([tokens], tokens[-1:]) or max(followers([tokens], tokens[-1:]).values()) < len(tokens)
        return
    paths = paths_of(draft)
    matches = [size for size in range(len(tokens), 0, -1) if tree_by_counting(tokens, size, nodes, room, least) == set(paths)]
    best = max(
        sum(chances(tokens, size, tree_by_counting(tokens, size, nodes, room, least)).values())
        for size in range(1, len(tokens) + 1)
    )
    assert matches and sum(chances(tokens, matches[0], set(paths)).values()) == pytest.approx(best)


def chances(tokens: list[int], size: int, paths: set[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The chance of every path behind the text's last ``size`` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for path in sorted(paths, key=len):
        counts = followers([tokens], tokens[-size:] + list(path[:-1]))
        found[path] = found[path[:-1]] * (counts[path[-1]] / counts.total())
    return {path: chance for path, chance in found.items() if path}


def tree_by_counting(tokens: list[int], size: int, nodes: int, deepest: int, least: float) -> set[tuple[int, ...]]:
    """Grow the likeliest path, always; among equals the one that was met first."""
    met: dict[tuple[int, ...], float] = {}
    chosen: dict[tuple[int, ...], float] = {(): 1.0}
    last: tuple[int, ...] = ()
    while len(chosen) <= nodes:
        counts = followers([tokens], tokens[-size:] + list(last)) if len(last) < deepest else Counter()
        for token, count in counts.items():
            if (chance := chosen[last] * (count / counts.total())) >= least:
                met[*last, token] = chance
        if not met:
            break
        last = max(met, key=lambda path: met[path])
        chosen[last] = met.pop(last)
    return set(chosen) - {()}


def test_frequency_decides_and_a_doubtful_path_ends() -> None:
    tokens = [1, 2, 5, 1, 3, 5, 1, 2, 6, 1, 3, 7, 1, 2, 4, 9, 1]
    assert drafted(Suffix(4, 1.0, 0.1), tokens) == [2]  # three of five
    assert drafted(Suffix(4, 4.0, 0.1), tokens)[:2] == [2, 5]
    assert drafted(Suffix(4, 4.0, 0.3), tokens) == [2]  # what follows has a chance of 0.6 / 3
    assert drafted(Suffix(4, 4.0, 0.7), tokens) == []


def test_only_so_many_responses_are_remembered() -> None:
    proposer = Suffix(4, 4.0, 0.1, memory=3)
    for first in range(0, 100, 10):
        ended = begun(proposer, [200])
        ended.tokens += [first, first + 1, first + 2]
        proposer.finish(ended)
    known = [first for first in range(0, 100, 10) if drafted(proposer, [first])]
    assert known == [60, 70, 80, 90] and drafted(proposer, [90]) == [91, 92]


def test_two_texts_do_not_know_each_other() -> None:
    proposer = Suffix()
    texts = [begun(proposer, [1, 2, 1]), begun(proposer, [1, 5, 1])]
    assert [draft.tokens for draft in proposer.propose(texts, None)] == [[2, 1], [5, 1]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", ["", "16", "8,factor=2,min=0.3", "8,memory=5", "8,nodes=12", "8,factor=1.5,min=0.25,memory=5,nodes=12"]
)
def test_settings(settings: str) -> None:
    proposer = Suffix.read(settings)
    described = proposer.described()
    assert Suffix.read(described["name"].removeprefix("suffix:")).described() == described
    assert described["length"] == proposer.length == int(settings.split(",")[0] or 32)
    assert described["kind"] == ("tree" if "nodes" in settings else "chain")
    for setting in settings.split(",")[1:]:
        assert setting in described["name"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("x", "cannot be read"),
        ("8,factor=0", "factor is 0"),
        ("8,min=2", "min is 2"),
        ("8,nodes=0", "below 1"),
        ("8,k=2", "no setting"),
    ],
)
def test_what_cannot_be_read_is_refused(settings: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Suffix.read(settings)


def test_memory_holds_the_answers_without_what_ran_past_their_end(tiny_target: Target) -> None:
    """The tiny target repeats itself, so that long drafts are accepted past the budget."""
    proposer = Suffix(memory=10)
    run = decode(tiny_target, proposer, [Request([5, 9, 5], budget) for budget in (7, 12, 9)], batch=2).generations
    assert any(sum(g.accepted) + len(g.accepted) + 1 > len(g.tokens) for g in run)
    assert proposer.memory and sorted(proposer.memory.responses) == sorted(g.tokens for g in run)
