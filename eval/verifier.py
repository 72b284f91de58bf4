"""Speculative decoding: draft, verify in one target pass, keep what the target would have written.

Nothing is lost, unless typical acceptance is asked for by name. Several sequences may share a pass; each accepts as many
tokens as it can, and a finished one makes room for the next.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import Draft, DraftHead
from ..heads.drafting import Form
from ..sampling import GREEDY, Sampling, draw, probabilities
from ..target import Target
from .proposers import NOTHING, HeadProposer, Proposer, Text
from .typical import Typical, accept_typical


@dataclass(frozen=True)
class Request:
    """A prompt (token ids), how many tokens it may be answered with, and the texts that end the answer where they appear."""

    prompt: list[int]
    max_new: int
    generator: torch.Generator | None = None
    stop: tuple[str, ...] = ()


@dataclass
class Generation:
    """What one prompt gave.

    ``tokens``: emitted ids, the end token included. ``proposed`` and ``accepted``: for every verify pass the draft's depth
    (0: there was none) and how many of its tokens were accepted, counted before the text is cut at its end (as vLLM counts).
    The first token comes from the prefill and belongs to no pass. ``drafted``: tokens of all drafts, side branches included.
    ``seconds``: ``prefill`` and ``total`` by the clock, whoever else was served meanwhile. ``paced``: the tokens that stayed
    and the sequence's share of the seconds of those passes in which as many sequences ran as may run at once.
    """

    tokens: list[int]
    proposed: list[int]
    accepted: list[int]
    ended: bool
    seconds: dict[str, float]
    drafted: int = 0
    paced: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True)
class Pass:
    """One verify pass: how many sequences shared it, the most tokens that one of them read in it, its seconds by part."""

    active: int
    nodes: int
    draft: float
    target: float
    total: float


@dataclass
class Run:
    """What all prompts gave, in their order, and the passes that it took. ``seconds``: prefill and total."""

    generations: list[Generation]
    passes: list[Pass]
    seconds: dict[str, float]


@dataclass
class Stopwatch:
    """Wall clock by part; waits for the device, so that a part's work is counted in that part."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class Running:
    """A sequence under way. ``rows``: how many of its tokens the cache holds. ``kept``: emitted tokens, cut at the end."""

    index: int
    request: Request
    budget: int
    text: Text
    began: float
    prefill: float
    ended: bool = False
    kept: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    paced: tuple[int, float] = (0, 0.0)

    @property
    def rows(self) -> int:
        return len(self.text.tokens) - 1

    def take(self, new: list[int], target: Target) -> int:
        """Take in tokens; returns how many of them stay in the text."""
        self.text.tokens += new
        before, emitted = len(self.kept), self.text.tokens[self.text.prompt :]
        self.kept, self.ended = truncate(emitted, self.budget, target.eos_ids)
        if self.request.stop:
            cut = stopped(target.tokenizer, self.kept, self.request.stop)
            self.kept, self.ended = self.kept[:cut], self.ended or cut is not None
        return len(self.kept) - before

    @property
    def done(self) -> bool:
        return self.ended or len(self.kept) >= self.budget


@torch.inference_mode()
def decode(
    target: Target,
    proposer: Proposer | None,
    requests: Sequence[Request],
    sampling: Sampling = GREEDY,
    batch: int = 1,
    typical: Typical | None = None,
) -> Run:
    """Answer all requests, up to ``batch`` of them at once; without a proposer, plainly.

    Greedy decoding emits the target's own greedy text; sampling emits its own distribution, and from one generator the same
    text at any batch size, as far as rounding allows. ``typical`` acceptance does not. Raises UserError for a prompt that
    leaves no room in the target's context and for what does not go together.
    """
    for request in requests:
        check(target, request.prompt)
    drawn = proposer is not None and proposer.drawn
    if typical and (sampling.greedy or drawn):
        raise UserError(
            "--lossy-typical judges likeliest tokens at a --temperature above 0: set one, without --sampled-drafts."
        )
    if sampling.greedy and drawn:
        raise UserError("--sampled-drafts draws drafts at a --temperature above 0: set one, or leave it out.")
    waiting, running = deque(enumerate(requests)), []
    cache: Any = None
    watch, passes = Stopwatch(target.device), []
    done: dict[int, Generation] = {}
    full = min(batch, len(requests))
    with watch.part("total"):
        while waiting or running:
            while waiting and len(running) < batch:
                with watch.part("prefill"):
                    new, own = admit(target, proposer, *waiting.popleft(), GREEDY if typical else sampling)
                if new.done:
                    done[new.index] = leave(new, proposer)
                else:
                    cache = target.join(cache, own)
                    running.append(new)
            if not running:
                break
            passes.append(advance(target, proposer, running, cache, sampling, typical, full))
            staying = [row for row, each in enumerate(running) if not each.done]
            if len(staying) < len(running):
                done |= {each.index: leave(each, proposer) for each in running if each.done}
                running = [running[row] for row in staying]
                if running:
                    target.select(cache, staying, max(each.rows for each in running))
                else:
                    cache = None
    return Run([done[index] for index in range(len(requests))], passes, watch.seconds)


def generate(
    target: Target,
    head: DraftHead | None,
    prompt: list[int],
    form: Form,
    max_new: int,
    sampling: Sampling = GREEDY,
    sampled_drafts: bool = False,
    generator: torch.Generator | None = None,
    typical: Typical | None = None,
) -> Generation:
    """Decode one prompt with a head that drafts in ``form``; without a head or with the form ``none``, plainly."""
    proposer = HeadProposer(head, form, sampled_drafts) if head else None
    return decode(target, proposer, [Request(prompt, max_new, generator)], sampling, typical=typical).generations[0]


def check(target: Target, prompt: list[int]) -> None:
    if not prompt:
        raise UserError("the prompt has no tokens: give at least one.")
    if len(prompt) >= target.max_positions:
        raise UserError(f"the prompt has {len(prompt)} tokens and {target.name}'s context {target.max_positions}: shorten it.")


def admit(target: Target, proposer: Proposer | None, index: int, request: Request, sampling: Sampling) -> tuple[Running, Any]:
    """Read a prompt and emit its first token: the sequence, and its cache."""
    began, cache = time.perf_counter(), target.new_cache()
    state = proposer.begin(request.prompt) if proposer else None
    ids = torch.tensor(request.prompt, device=target.device)
    logits, rows = target.prefill(ids, cache, proposer.taps if proposer else [])
    first = choose(logits, sampling, request.generator)
    text = Text(list(request.prompt), len(request.prompt), state, rows, 0, sampling, request.generator)
    budget = min(request.max_new, target.max_positions - len(request.prompt))
    new = Running(index, request, budget, text, began, time.perf_counter() - began)
    new.take([first], target)
    return new, cache


def leave(ended: Running, proposer: Proposer | None) -> Generation:
    """What a finished sequence gave."""
    if proposer:
        del ended.text.tokens[ended.text.prompt + len(ended.kept) :]  # what ran past the end is no part of the text
        proposer.finish(ended.text)
    seconds = {"prefill": ended.prefill, "total": time.perf_counter() - ended.began}
    return Generation(ended.kept, ended.proposed, ended.accepted, ended.ended, seconds, ended.drafted, ended.paced)


def advance(
    target: Target,
    proposer: Proposer | None,
    running: list[Running],
    cache: Any,
    sampling: Sampling,
    typical: Typical | None,
    full: int,
) -> Pass:
    """Draft for every sequence, verify all drafts in one pass, and let every sequence keep what it accepts."""
    watch = Stopwatch(target.device)
    with watch.part("total"):
        drafts = [NOTHING] * len(running)
        if proposer:
            for each in running:
                each.text.room = target.max_positions - 1 - each.rows
            with watch.part("draft"):
                drafts = proposer.propose([each.text for each in running], target)
        with watch.part("target"):
            lengths = [each.rows for each in running]
            tokens, depths, seen = laid_out(drafts, [each.text.tokens[-1] for each in running], target.device)
            positions = torch.tensor(lengths, device=target.device)[:, None] + depths
            logits, rows = target.verify(tokens, positions, seen, lengths, cache, proposer.taps if proposer else [])
        paths, news = [], []
        for row, (each, draft) in enumerate(zip(running, drafts, strict=True)):
            nodes = len(draft.tokens) + 1
            path, bonus = accept(logits[row, :nodes], draft, sampling, each.text.generator, typical)
            if draft.aside and proposer:
                proposer.learn(each.text, draft, logits[row, nodes : nodes + len(draft.aside.tokens)])
            each.text.fresh = rows.rows((row, path))
            each.proposed.append(draft.shape.length)
            each.accepted.append(len(path) - 1)
            each.drafted += len(draft.tokens)
            paths.append(path)
            news.append([*(draft.tokens[node - 1] for node in path[1:]), bonus])
        target.keep(cache, lengths, paths)
        kept = [each.take(new, target) for each, new in zip(running, news, strict=True)]
    seconds = watch.seconds
    if len(running) == full:
        for each, new in zip(running, kept, strict=True):
            each.paced = (each.paced[0] + new, each.paced[1] + seconds["total"] / full)
    return Pass(len(running), tokens.shape[1], seconds.get("draft", 0.0), seconds["target"], seconds["total"])


def laid_out(drafts: list[Draft], roots: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of a pass side by side: tokens and depths [batch, nodes] and who sees whom [batch, nodes, nodes].

    Every row is its root, the draft, the draft's aside, and filling that sees itself alone.
    """
    sizes = [1 + len(draft.tokens) + (len(draft.aside.tokens) if draft.aside else 0) for draft in drafts]
    tokens = np.zeros((len(drafts), max(sizes)), dtype=np.int64)
    depths = np.zeros_like(tokens)
    seen = np.broadcast_to(np.eye(max(sizes), dtype=bool), (len(drafts), max(sizes), max(sizes))).copy()
    for row, (draft, root) in enumerate(zip(drafts, roots, strict=True)):
        tokens[row, 0] = root
        first = 1
        for part in (draft, draft.aside):
            if part is None or not part.tokens:
                continue
            here = slice(first, first + len(part.tokens))
            tokens[row, here], depths[row, here] = part.tokens, part.shape.depths[1:]
            seen[row, here, 0], seen[row, here, here] = True, part.shape.seen[1:, 1:]
            first = here.stop
    return (*(torch.from_numpy(array).to(device) for array in (tokens, depths, seen)),)  # type: ignore[return-value]


def stopped(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """How many tokens it takes until one of the texts appears; None where none does."""
    written = tokenizer.decode(tokens)
    if not any(text in written for text in stop):
        return None
    return next(end for end in range(1, len(tokens) + 1) if any(text in tokenizer.decode(tokens[:end]) for text in stop))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The target's next token from a row of logits [V]."""
    return int(logits.argmax()) if sampling.greedy else draw(probabilities(logits, sampling).cpu(), generator)


def accept(
    logits: Tensor, draft: Draft, sampling: Sampling, generator: torch.Generator | None, typical: Typical | None = None
) -> tuple[list[int], int]:
    """Walk the verified tree from its root. Returns the accepted nodes (root first) and the token that follows them.

    ``logits`` [nodes + 1, V]. Drafts that were chosen deterministically: draw the target's token y at each node and follow
    the child equal to y. Drafts that were sampled: recursive rejection with residuals (Leviathan et al., 2211.17192; for
    siblings without replacement, SpecInfer, 2305.09781, and EAGLE). Both emit exactly the target's distribution;
    ``typical`` acceptance does not.
    """
    if typical:
        return accept_typical(logits, probabilities(logits, sampling), draft, typical)
    path = [0]
    greedy = logits.argmax(-1).tolist() if sampling.greedy else None
    while True:
        node = path[-1]
        children = draft.shape.children(node)
        if greedy is not None:
            token = greedy[node]
            child = matching(children, draft.tokens, token)
        else:
            p = probabilities(logits[node], sampling).cpu()
            if draft.q is None or not children:
                token = draw(p, generator)
                child = matching(children, draft.tokens, token)
            else:
                child, token = reject(p, draft.q[node].clone(), children, draft.tokens, generator)
        if child is None:
            return path, token
        path.append(child)


def matching(children: Sequence[int], tokens: list[int], token: int) -> int | None:
    return next((child for child in children if tokens[child - 1] == token), None)


def reject(
    p: Tensor, q: Tensor, children: Sequence[int], tokens: list[int], generator: torch.Generator | None
) -> tuple[int | None, int]:
    """Try sampled siblings in the order they were drawn: the accepted child and its token, or None and a residual token.

    p [V] is the target's row, q [V] the draft's; both are changed along the way.
    """
    for child in children:
        token = tokens[child - 1]
        if q[token] <= 0:  # fewer tokens than siblings: this one was never drawn
            continue
        if torch.rand((), generator=generator) * q[token] < p[token]:
            return child, token
        p = residual(p, q)
        q[token] = 0
        q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return None, draw(p, generator)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of the target's row after a rejection: max(p - q, 0), normalised; p itself where nothing is left."""
    left = (p - q).clamp_min(0)
    mass = left.sum()
    return left / mass if mass > 0 else p


def truncate(tokens: list[int], budget: int, eos_ids: frozenset[int]) -> tuple[list[int], bool]:
    """Cut behind the first end token and at the budget; whether an end token is what ended it."""
    tokens = tokens[:budget]
    end = next((i for i, token in enumerate(tokens) if token in eos_ids), None)
    return (tokens, False) if end is None else (tokens[: end + 1], True)
