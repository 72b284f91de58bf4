"""Losslessness: the greedy text is the library's own, and sampled texts have the target's exact distribution."""

import itertools
from typing import Any

import pytest
import torch
from scripted import ScriptedHead
from tables import NUCLEUS, PROMPT, VOCAB, WARM, TableTarget, exact, look_up, p_value, remember_rows, tables
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval import verifier
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import NONE, chain, full, parse
from draftsmith.eval.verifier import Generation, Request, decode, generate, truncate
from draftsmith.heads.base import DraftHead, Guess, Shape
from draftsmith.heads.drafting import Form
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import GREEDY, Sampling
from draftsmith.target import Features, Target

# -- greedy: token for token, on a real model ------------------------------------------------------------------

SHAPES = [
    "chain:1",
    "chain:2",
    "chain:3",
    "chain:4",
    "chain:5",
    "tree:3x2x1",
    "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,0,0]]",
    "dynamic:12,k=4,depth=5",
    "dynamic:6,k=3,depth=4,stop=0.01",
    "beam:3x4",
    "chain:4,stop=0.1",
]
GRID = [("eagle3", shape) for shape in SHAPES] + [("medusa", shape) for shape in SHAPES if shape != "chain:5"]


def random_head(kind: str, target: Target, depths: int = 4) -> DraftHead:
    torch.manual_seed(0)
    options = KINDS[kind].Options.model_validate({"init_lm_head": "random"})
    return KINDS[kind].create(target, options, None, depths, torch.arange(0, 128, 2)).eval()


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(3, 111, (length,), generator=generator).tolist() for length in [1, *lengths[1:]]]


@torch.no_grad()
def library_text(target: Target, prompt: list[int], new: int, eos: list[int] | None = None) -> list[int]:
    """The greedy continuation by transformers' generate, end token included."""
    ids = torch.tensor([prompt])
    stop: Any = {"eos_token_id": eos} if eos else {}
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **stop
    )
    return out[0, len(prompt) :].tolist()


NEW = 10
PROMPTS = random_prompts(50)


@pytest.fixture(scope="module")
def texts(lively_target: Target) -> list[list[int]]:
    return [library_text(lively_target, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "shape"), GRID)
def test_case_20a_greedy_text_is_the_librarys(lively_target: Target, texts: list[list[int]], kind: str, shape: str) -> None:
    head = random_head(kind, lively_target)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        result = generate(lively_target, head, prompt, parse(shape), NEW)
        assert result.tokens == text and not result.ended
        assert sum(result.accepted) + len(result.accepted) + 1 >= NEW


class Oracle(ScriptedHead):
    """Knows the target's text and says it with a chance of one half, else puts it on another rank."""

    def __init__(self, text: list[int], seed: int = 0) -> None:
        super().__init__(128, torch.arange(128), taps=[1, 3])
        self.text, self.generator = text, torch.Generator().manual_seed(seed)
        self.features: list[Features] = []

    def begin(self, state: dict, features: Features, ids: Tensor, target: Target) -> Guess:
        self.features.append(features)
        return super().begin(state, features, ids, target)

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        row = torch.rand(128, generator=self.generator)
        row[(self.text + [0] * 9)[len(committed) + len(path)]] += float(torch.rand((), generator=self.generator) < 0.5) - 0.005
        return row


def known(prompt: list[int], text: list[int]) -> list[int]:
    """What a head's committed tokens and drafts will be: everything behind the prompt's first token."""
    return [*prompt[1:], *text]


@pytest.mark.parametrize(
    "shape",
    ["chain:1", "chain:3", "chain:5", "tree:3x2x1", "tree:2x2x2x1", "dynamic:8,k=2,depth=4", "beam:3x3", "chain:5,stop=0.0001"],
)
def test_greedy_text_with_half_of_the_drafts_accepted(lively_target: Target, texts: list[list[int]], shape: str) -> None:
    proposed = accepted = 0
    for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        result = generate(lively_target, Oracle(known(prompt, text), i), prompt, parse(shape), NEW)
        assert result.tokens == text
        assert all(0 <= a <= p <= parse(shape).length for a, p in zip(result.accepted, result.proposed, strict=True))
        assert not isinstance(parse(shape), Shape) or set(result.proposed) == {parse(shape).length}
        assert sum(result.proposed) <= result.drafted <= parse(shape).nodes * len(result.proposed)
        proposed, accepted = proposed + len(result.accepted), accepted + sum(a > 0 for a in result.accepted)
    assert 0.3 < accepted / proposed < 0.7


def test_the_head_reads_the_features_of_the_accepted_path(lively_target: Target, texts: list[list[int]]) -> None:
    for prompt, text in zip(PROMPTS[:10], texts, strict=False):
        head = Oracle(known(prompt, text))
        generate(lively_target, head, prompt, full([3, 2, 2]), NEW)
        plain = lively_target.features(torch.tensor([prompt + text]), head.config.taps)
        for part in ("taps", "last"):
            rows = torch.cat([getattr(features, part) for features in head.features])
            assert len(rows) >= len(prompt) + 3
            torch.testing.assert_close(rows, getattr(plain, part)[0, : len(rows)], atol=1e-4, rtol=1e-4)


class Sure(Oracle):
    """Knows the text and says it."""

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        row = torch.zeros(128)
        row[(self.text + [0] * 9)[len(committed) + len(path)]] = 1
        return row


def sure_run(target: Target, prompt: list[int], shape: str, new: int) -> tuple[list[int], Generation]:
    """A long text by the library, and ours with a head that knows it."""
    text = library_text(target, prompt, 20)
    return text, generate(target, Sure(known(prompt, text)), prompt, parse(shape), new)


@pytest.mark.parametrize("shape", ["chain:4", "tree:2x2x1x1"])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 6, 8])
def test_the_budget_ends_inside_a_draft(lively_target: Target, shape: str, new: int) -> None:
    text, result = sure_run(lively_target, PROMPTS[1], shape, new)
    assert result.tokens == text[:new] and not result.ended
    passes = -(-(new - 1) // 5)
    assert result.accepted == result.proposed == [4] * passes  # counted before the cut, as vLLM counts


@pytest.mark.parametrize("shape", ["chain:4", "tree:2x2x1x1"])
@pytest.mark.parametrize("at", range(8))
def test_an_end_token_inside_an_accepted_draft(
    lively_target: Target, monkeypatch: pytest.MonkeyPatch, shape: str, at: int
) -> None:
    text = library_text(lively_target, PROMPTS[1], 20)
    at = text.index(text[at])
    monkeypatch.setattr(lively_target, "eos_ids", frozenset([text[at], 127]))
    assert library_text(lively_target, PROMPTS[1], 20, eos=[text[at], 127]) == text[: at + 1]
    _, result = sure_run(lively_target, PROMPTS[1], shape, 20)
    assert result.tokens == text[: at + 1] and result.ended
    assert result.accepted == [4] * -(-at // 5)


def test_end_tokens_with_random_heads(lively_target: Target, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    eos = [texts[0][4], texts[1][6], texts[2][2]]
    monkeypatch.setattr(lively_target, "eos_ids", frozenset(eos))
    ended = 0
    for prompt in PROMPTS[:15]:
        result = generate(lively_target, random_head("eagle3", lively_target), prompt, full([2, 2]), NEW)
        assert result.tokens == library_text(lively_target, prompt, NEW, eos)
        assert result.ended == (result.tokens[-1] in eos)
        ended += result.ended
    assert ended >= 3


@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:2x2x1", "dynamic:6,k=2,depth=4", "beam:2x4", "chain:4,stop=0.001"])
@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_the_context_limit_cuts_drafts_and_text(
    lively_target: Target, monkeypatch: pytest.MonkeyPatch, shape: str, room: int
) -> None:
    """The target has 64 positions: a prompt of 64 - room leaves room for that many tokens, whatever was asked."""
    prompt = (PROMPTS[3] * 64)[: 64 - room]
    expected = library_text(lively_target, prompt, room)
    verify, furthest = lively_target.verify, [0]
    monkeypatch.setattr(lively_target, "verify", lambda t, at, *rest: furthest.append(int(at.max())) or verify(t, at, *rest))
    for head in (random_head("eagle3", lively_target), Sure(known(prompt, expected))):
        result = generate(lively_target, head, prompt, parse(shape), 30)
        assert result.tokens == expected and not result.ended
    assert max(furthest) < 64


def test_what_cannot_be_decoded_is_refused(lively_target: Target) -> None:
    medusa = random_head("medusa", lively_target, depths=2)
    with pytest.raises(UserError, match="context 64"):
        generate(lively_target, None, [5] * 64, NONE, 1)
    with pytest.raises(UserError, match="no tokens"):
        generate(lively_target, None, [], NONE, 1)
    for shape in (chain(3), full([1, 1, 1])):
        with pytest.raises(UserError, match="deeper than this medusa head's 2 depths"):
            generate(lively_target, medusa, [5], shape, 4)
    assert len(generate(lively_target, medusa, [5], chain(2), 4).tokens) == 4
    for form in (parse("beam:2x3"), parse("chain:3,stop=0.5")):
        with pytest.raises(UserError, match="deeper than this medusa head's 2 depths"):
            generate(lively_target, medusa, [5], form, 4)
    assert max(generate(lively_target, medusa, [5], parse("dynamic:9,k=3"), 6).proposed) <= 2  # it goes as deep as it can


@pytest.mark.parametrize("form", ["dynamic:4", "beam:2x2"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "T=1"])
def test_a_form_of_likeliest_tokens_is_not_drawn(lively_target: Target, form: str, sampling: Sampling) -> None:
    with pytest.raises(UserError, match=f"{form}.*--sampled-drafts"):
        generate(lively_target, random_head("eagle3", lively_target), [5], parse(form), 4, sampling, sampled_drafts=True)


@pytest.mark.parametrize("shape", [NONE, chain(3)])
def test_without_a_head_decoding_is_plain(lively_target: Target, texts: list[list[int]], shape: Shape) -> None:
    for prompt, text in zip(PROMPTS[:5], texts, strict=False):
        result = generate(lively_target, None, prompt, shape, NEW)
        assert result.tokens == text and set(result.accepted) == set(result.proposed) == {0}
    head = random_head("eagle3", lively_target)
    result = generate(lively_target, head, PROMPTS[0], NONE, NEW)
    assert result.tokens == texts[0] and set(result.proposed) == {0}


def test_every_pass_reads_only_new_tokens(lively_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One verify pass per step, one catch-up of the head per step, and no prefix read twice."""
    text = library_text(lively_target, PROMPTS[1], 20)
    head, seen = Sure(known(PROMPTS[1], text)), []
    verify, begin = lively_target.verify, head.begin
    monkeypatch.setattr(
        lively_target, "verify", lambda tokens, *rest: seen.append(("verify", tokens.shape[1])) or verify(tokens, *rest)
    )
    monkeypatch.setattr(head, "begin", lambda s, f, ids, t: seen.append(("begin", len(f.last))) or begin(s, f, ids, t))
    generate(lively_target, head, PROMPTS[1], chain(3), 9)
    assert seen == [("begin", len(PROMPTS[1])), ("verify", 4), ("begin", 4), ("verify", 4)]


# -- several sequences in a pass -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:3x2x1", "dynamic:8,k=2,depth=4", "chain:5,stop=0.01"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_batch_writes_what_every_sequence_writes_alone(
    lively_target: Target, texts: list[list[int]], kind: str, shape: str, batch: int
) -> None:
    if kind == "medusa" and shape.startswith("chain:5"):
        shape = "chain:4,stop=0.01"
    proposer = HeadProposer(random_head(kind, lively_target), parse(shape))
    budgets = [1 + i % NEW for i in range(len(PROMPTS))]  # so that they end at different times
    asked = [Request(prompt, budget) for prompt, budget in zip(PROMPTS, budgets, strict=True)]
    run = decode(lively_target, proposer, asked, batch=batch)
    assert [g.tokens for g in run.generations] == [t[:n] for t, n in zip(texts, budgets, strict=True)]
    assert max(each.active for each in run.passes) == batch
    alone = [generate(lively_target, proposer.head, r.prompt, parse(shape), r.max_new) for r in asked[:12]]
    assert [g.accepted for g in run.generations[:12]] == [g.accepted for g in alone]


class Knowing(Oracle):
    """Knows the texts of several prompts, each half of the time."""

    def __init__(self, known_texts: list[list[int]]) -> None:
        super().__init__([])
        self.known = known_texts

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        read = [*committed, *path]
        text = next(t for t in self.known if t[: len(committed)] == committed)
        row = torch.zeros(128)
        row[([*text, *[0] * 9])[len(read)] if hash(tuple(read)) % 2 else 0] = 1
        return row


@pytest.mark.parametrize("batch", [2, 4])
def test_sequences_of_a_batch_accept_different_lengths(lively_target: Target, batch: int) -> None:
    """With drafts that are right half of the time: cache, features and texts stay each sequence's own."""
    asked = [Request(prompt, 24) for prompt in PROMPTS[:9]]
    plain = decode(lively_target, None, asked).generations
    head = Knowing([known(r.prompt, g.tokens) for r, g in zip(asked, plain, strict=True)])
    run = decode(lively_target, HeadProposer(head, parse("chain:3")), asked, batch=batch)
    assert [g.tokens for g in run.generations] == [g.tokens for g in plain]
    spread = {accepted for g in run.generations for accepted in g.accepted}
    assert spread == {0, 1, 2, 3}
    for generation in run.generations:
        assert generation.paced[0] <= len(generation.tokens) - 1
    assert sum(g.paced[1] for g in run.generations) == pytest.approx(
        sum(p.total for p in run.passes if p.active == batch), rel=1e-6
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sequences_own_generator_gives_its_text_at_any_batch_size(sampled: bool) -> None:
    target: Any = TableTarget()
    head = TableHead(tables(1) + tables(2, 0.7), [0, 1, 2, 4, 5, 7])

    def texts_at(batch: int) -> list[list[int]]:
        asked = [Request(PROMPT, 5 + i, torch.Generator().manual_seed(i)) for i in range(9)]
        found = decode(target, HeadProposer(head, full([2, 2]), sampled), asked, WARM, batch).generations
        return [generation.tokens for generation in found]

    assert texts_at(1) == texts_at(3) == texts_at(4)
    assert len({tuple(text[:5]) for text in texts_at(1)}) > 3


def test_a_text_ends_where_a_stop_text_appears(tiny_target: Target) -> None:
    prompt = tiny_target.tokenizer("tell me", add_special_tokens=False)["input_ids"]
    plain = generate(tiny_target, None, prompt, NONE, 20).tokens
    text = tiny_target.tokenizer.decode(plain)
    stop = text[3:5]
    (found,) = decode(tiny_target, None, [Request(prompt, 20, stop=(stop, "never written"))]).generations
    assert found.ended and found.tokens == plain[: len(found.tokens)]
    assert stop in tiny_target.tokenizer.decode(found.tokens) and stop not in tiny_target.tokenizer.decode(found.tokens[:-1])


@pytest.mark.parametrize(
    ("budget", "tokens", "ended"),
    [(9, [1, 2, 3, 4], False), (2, [1, 2], False), (3, [1, 2, 3], False), (0, [], False)],
)
def test_truncate_at_the_budget(budget: int, tokens: list[int], ended: bool) -> None:
    assert truncate([1, 2, 3, 4], budget, frozenset()) == (tokens, ended)


def test_truncate_at_the_first_end_token() -> None:
    assert truncate([1, 2, 3, 4], 9, frozenset([3, 2])) == ([1, 2], True)
    assert truncate([1, 2, 3, 4], 2, frozenset([2])) == ([1, 2], True)
    assert truncate([1, 2, 3, 4], 1, frozenset([2])) == ([1], False)


# -- sampling: the exact distribution, on fixed tables ---------------------------------------------------------

DRAWS = 20_000


class TableHead(ScriptedHead):
    """Drafts from a table of its own, over ``ids`` of the vocabulary."""

    def __init__(self, table: Tensor, ids: list[int]) -> None:
        super().__init__(VOCAB, torch.tensor(ids))
        self.table = table

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        return look_up(self.table, [PROMPT[0], *committed, *path])


def texts_drawn(target: Any, head: DraftHead, shape: Form, sampling: Sampling, sampled: bool, draws: int = DRAWS) -> Tensor:
    """How often every text of three tokens was emitted: [V ** 3]."""
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(VOCAB**3, dtype=torch.float64)
    for _ in range(draws):
        a, b, c = generate(target, head, PROMPT, shape, 3, sampling, sampled, generator).tokens
        counts[(a * VOCAB + b) * VOCAB + c] += 1
    return counts


@pytest.fixture
def remembered_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_rows(monkeypatch)


# The third token is a draft, a bonus behind an accepted draft, or what follows a rejection.
STOPPING = parse("chain:2,stop=0.25")  # between the chances of the table's second drafts, so that it ends some chains alone
DRAWN = [chain(2), parse("[[0],[1],[2],[0,0],[0,1]]"), STOPPING]
LAWS = [
    *itertools.product(DRAWN[:2], [False, True], [WARM, NUCLEUS]),
    *((STOPPING, sampled, sampling) for sampled, sampling in ((False, WARM), (True, WARM), (True, NUCLEUS))),
    (parse("dynamic:5,k=3,depth=2"), False, NUCLEUS),
    (parse("beam:3x2"), False, WARM),
]


def named(value: Any) -> str:
    words = {False: "likeliest", True: "drawn", WARM: "T=1", NUCLEUS: "T=0.7,top_p=0.9"}
    return words[value] if isinstance(value, bool | Sampling) else value.name


@pytest.mark.parametrize(("shape", "sampled", "sampling"), LAWS, ids=named)
def test_the_texts_have_the_targets_distribution(remembered_rows: None, shape: Form, sampled: bool, sampling: Sampling) -> None:
    target: Any = TableTarget()
    head = TableHead(tables(1) + tables(2, 0.7), [0, 1, 2, 4, 5, 7])  # near the target's, and without two of its tokens
    counts = texts_drawn(target, head, shape, sampling, sampled)
    chances = exact(target, sampling, 3)
    assert p_value(counts, chances) > 1e-3
    shares = (counts / counts.sum()).view(VOCAB, VOCAB, VOCAB)
    wanted = chances.view(VOCAB, VOCAB, VOCAB)
    for others in ((1, 2), (0, 2), (0, 1)):  # case 20b: the total variation of every single token
        assert (shares.sum(others) - wanted.sum(others)).abs().sum() / 2 < 0.02


def test_a_stopping_chain_of_the_tables_stops_sometimes() -> None:
    """Otherwise the test of its distribution would be that of a chain."""
    target: Any = TableTarget()
    head, generator = TableHead(tables(1) + tables(2, 0.7), [0, 1, 2, 4, 5, 7]), torch.Generator().manual_seed(0)
    for sampled in (False, True):
        proposed = generate(target, head, PROMPT, STOPPING, 400, WARM, sampled, generator).proposed
        assert 0.1 < sum(length == 1 for length in proposed) / len(proposed) < 0.9


@pytest.mark.parametrize("shape", DRAWN, ids=lambda shape: shape.name)
def test_the_test_of_the_distribution_can_fail(remembered_rows: None, monkeypatch: pytest.MonkeyPatch, shape: Form) -> None:
    """Without the residual step a rejected token may come back: the same test sees it at once."""
    monkeypatch.setattr(verifier, "residual", lambda p, q: p)
    target: Any = TableTarget()
    head = TableHead(tables(1) + tables(2, 0.7), [0, 1, 2, 4, 5, 7])
    assert p_value(texts_drawn(target, head, shape, WARM, True, 6000), exact(target, WARM, 3)) < 1e-6


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(1.0, top_p=0.5), Sampling(1.0, top_k=2)], ids=str)
def test_siblings_beyond_the_drafts_support(remembered_rows: None, sampling: Sampling) -> None:
    """Where the head's own cut leaves fewer tokens than siblings, the others count for nothing; no token outside the cut."""
    target: Any = TableTarget()
    head = TableHead(tables(5), [1, 2, 3, 6])
    counts = texts_drawn(target, head, full([4, 2]), sampling, True, 2000)
    assert p_value(counts, exact(target, sampling, 3)) > 1e-3


@pytest.mark.parametrize("sampling", [WARM, NUCLEUS, Sampling(2.0, top_k=3)], ids=str)
def test_drafts_sampled_from_the_targets_own_rows_are_all_accepted(sampling: Sampling) -> None:
    target: Any = TableTarget()
    head, generator = TableHead(target.table, list(range(VOCAB))), torch.Generator().manual_seed(0)
    for _ in range(100):
        result = generate(target, head, PROMPT, chain(4), 21, sampling, True, generator)
        assert result.accepted == result.proposed == [4] * 4


def test_greedy_decoding_refuses_to_sample_its_drafts() -> None:
    target: Any = TableTarget()
    head = TableHead(tables(1) + tables(2, 0.7), list(range(VOCAB)))
    with pytest.raises(UserError, match="--sampled-drafts draws drafts at a --temperature above 0"):
        generate(target, head, PROMPT, full([2, 2]), 12, GREEDY, True)


def test_a_seed_gives_the_same_text() -> None:
    target: Any = TableTarget()
    head = TableHead(tables(2), [0, 1, 2, 5])
    for sampled in (False, True):
        runs = [
            generate(target, head, PROMPT, full([2, 2]), 30, WARM, sampled, torch.Generator().manual_seed(seed)).tokens
            for seed in (3, 3, 4)
        ]
        assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("p", "q", "left"),
    [
        ([0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [1.0, 0.0, 0.0]),
        ([0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [4 / 6, 2 / 6, 0.0]),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),
    ],
)
def test_residual(p: list[float], q: list[float], left: list[float]) -> None:
    torch.testing.assert_close(verifier.residual(torch.tensor(p), torch.tensor(q)), torch.tensor(left))
