"""Lookahead decoding's window and pool, driven by a target that is a rule: what it says can be worked out by hand."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_texts import begun, paths_of, whole

from draftsmith.errors import UserError
from draftsmith.eval.lookahead import Lookahead, Pool
from draftsmith.eval.proposers import Text
from draftsmith.heads.base import Draft

VOCABULARY = 40


Rule = Callable[[tuple[int, ...]], int]


def far(read: tuple[int, ...]) -> int:
    """What a target says that heeds its last three tokens."""
    return (3 * read[-1] + 5 * read[-2] + 7 * read[-3] + 1) % VOCABULARY


def near(read: tuple[int, ...]) -> int:
    """What a target says that heeds its last token alone, and comes round after twelve."""
    return (read[-1] + 1) % 12


def says(text: Text, draft: Draft, rule: Rule) -> torch.Tensor:
    """The target's logits behind every node of a tree."""
    rows = [rule((*text.tokens, *path)) for path in paths_of(draft)]
    return torch.nn.functional.one_hot(torch.tensor(rows), VOCABULARY).float()


def follow(text: Text, draft: Draft, rule: Rule) -> list[int]:
    """The tokens that greedy verification emits."""
    known, path = set(paths_of(draft)), ()
    while (*path, rule((*text.tokens, *path))) in known:
        path = (*path, rule((*text.tokens, *path)))
    return [*path, rule((*text.tokens, *path))]


def decoded(
    proposer: Lookahead, prompt: list[int], passes: int, room: int = 1000, rule: Rule = far
) -> tuple[Text, list[Draft]]:
    text, drafts = begun(proposer, prompt, room), []
    for _ in range(passes):
        drafts.append(draft := proposer.draft(text))
        new = follow(text, draft, rule)
        if draft.aside:
            proposer.learn(text, draft, says(text, draft.aside, rule))
        text.tokens += new
        text.room -= len(new)
    return text, drafts


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=12),
    width=st.integers(2, 6),
    size=st.integers(3, 6),
    guesses=st.integers(1, 4),
    from_text=st.booleans(),
)
def test_every_draft_is_a_tree_of_the_pools_grams(
    prompt: list[int], width: int, size: int, guesses: int, from_text: bool
) -> None:
    proposer = Lookahead(width, size, guesses, from_text)
    text, drafts = decoded(proposer, prompt, 12)
    for step, draft in enumerate(drafts):
        whole(draft)
        assert draft.shape.length <= size - 1 and len(draft.shape.families[0]) <= guesses
        assert draft.aside is not None
        whole_window(draft.aside, width, min(step + 1, size - 1))
    assert all(len(own) <= guesses for own in text.state.pool.grams.values())


def whole_window(aside: Draft, width: int, levels: int) -> None:
    """Level 0 is a chain of the columns behind the root; every column, the root's too, bears a chain of the other levels."""
    assert len(aside.tokens) == width * levels - 1
    ends = sorted(depth for node, depth in enumerate(aside.shape.depths) if not aside.shape.children(node))
    assert ends == list(range(levels - 1 if levels > 1 else width - 1, width + levels - 1))
    assert all(len(aside.shape.children(node)) <= 2 for node in range(aside.shape.nodes + 1))


@pytest.mark.parametrize("rule", [far, near])
@pytest.mark.parametrize("size", [3, 4, 6])
def test_a_level_is_what_the_target_said_behind_the_level_below(size: int, rule: Rule) -> None:
    """Told by places: column i of level j is i + j behind the last token, and stays where it is while the text grows."""
    proposer, width = Lookahead(4, size, guesses=3), 4
    text = begun(proposer, [5, 17, 3, 29])
    window, known, grew = text.state, {}, set()
    for _ in range(30):
        draft = proposer.draft(text)
        end = len(text.tokens) - 1
        assert draft.aside is not None and window.levels[0][0] == text.tokens[-1]
        levels = [{end + i + j: token for i, token in enumerate(level)} for j, level in enumerate(window.levels)]
        for j, level in enumerate(levels):
            assert all(known.get((j, place), token) == token for place, token in level.items() if j or place > end)
        proposer.learn(text, draft, says(text, draft.aside, rule))
        said = {}
        for i in range(0 if len(levels) > 1 else 1, width):  # the last token's own column is empty below level 1
            column = [levels[0][end + k] for k in range(1, i + 1)] + [levels[j][end + i + j] for j in range(1, len(levels))]
            said[end + i + len(levels)] = rule((*text.tokens, *column))
            assert window.found[i] == said[end + i + len(levels)]
            if len(levels) == size - 1:
                gram = [level[end + i + j] for j, level in enumerate(levels)] + [window.found[i]]
                assert tuple(gram[1:]) in window.pool.behind(gram[0])
        fallen = len(levels) == size - 1
        known = {(j - fallen, place): token for j, level in enumerate([*levels, said]) for place, token in level.items()}
        new = follow(text, draft, rule)
        grew.add(len(new))
        text.tokens += new
    assert len(window.levels) == size - 1 and (rule is far or max(grew) > 1)


def test_what_the_window_found_is_accepted() -> None:
    """Without the text's own n-grams, so that all drafts come out of the window."""
    text, _ = decoded(Lookahead(5, 4, 5, from_text=False), [1, 2, 3], 20, rule=near)
    assert len(text.tokens) - 3 > 1.5 * 20
    assert text.tokens == [(1 + i) % 12 for i in range(len(text.tokens))]


def test_the_prompts_grams_are_known_at_once_unless_refused() -> None:
    prompt = [1, 2, 3, 4, 5, 1]
    assert paths_of(Lookahead(2, 4).draft(begun(Lookahead(2, 4), prompt))) == [(2,), (2, 3), (2, 3, 4)]
    assert not Lookahead(2, 4, from_text=False).draft(begun(Lookahead(2, 4, from_text=False), prompt)).tokens


@pytest.mark.parametrize("room", [0, 1, 2, 5, 6, 7])
def test_nothing_is_deeper_than_the_room(room: int) -> None:
    proposer = Lookahead(5, 4)
    draft = proposer.draft(begun(proposer, [1, 2, 3, 4, 5, 1], room))
    assert draft.shape.length == min(3, room)
    assert (draft.aside is None) == (room < 6)
    _, drafts = decoded(proposer, [1, 2, 3, 4, 5, 1], 4 + room, room + 8)
    assert any(draft.aside is None for draft in drafts)


def test_the_pool_keeps_the_latest() -> None:
    pool = Pool(2)
    for gram in [(1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3), (1, 6, 7)]:
        pool.add(gram)
    assert pool.behind(1) == [(6, 7), (2, 3)] and pool.behind(2) == [(9, 9)] and pool.behind(3) == []


def test_a_text_is_drafted_alike_every_time() -> None:
    runs = []
    for _ in range(2):
        text, drafts = decoded(Lookahead(), [5, 17, 3, 29], 20)
        runs.append((text.tokens, [(draft.tokens, draft.aside and draft.aside.tokens) for draft in drafts]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ("", "lookahead:5x4,guesses=5"),
        ("7x5,guesses=7", "lookahead:7x5,guesses=7"),
        ("2x3,prompt=no", "lookahead:2x3,guesses=5,prompt=no"),
    ],
)
def test_settings(settings: str, name: str) -> None:
    described = Lookahead.read(settings).described()
    assert described["name"] == name and described["kind"] == "tree"
    assert Lookahead.read(name.removeprefix("lookahead:")).described() == described
    assert described["nodes"] == described["length"] * int(name.split("guesses=")[1].split(",")[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("5", "cannot be read"),
        ("5x4,prompt=maybe", "must be yes or no"),
        ("1x4", "no window"),
        ("5x2", "no window"),
        ("5x4,pool=3", "no setting"),
    ],
)
def test_what_cannot_be_read_is_refused(settings: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Lookahead.read(settings)
