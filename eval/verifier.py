"""Speculative decoding: draft, verify in one target pass, keep what the target would have written.

Nothing is lost, unless typical acceptance is asked for by name.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import Draft, DraftHead, Shape
from ..heads.drafting import Form
from ..heads.drafting import draft as write_draft
from ..heads.growing import Beam, Dynamic
from ..sampling import GREEDY, Sampling, draw, probabilities
from ..target import Target
from .tree import NONE, fitted
from .typical import Typical, accept_typical

NOTHING = Draft([], NONE)


@dataclass
class Generation:
    """What one prompt gave.

    ``tokens``: emitted ids, the end token included. ``proposed`` and ``accepted``: for every verify pass the draft's depth
    and how many of its tokens were accepted, counted before the text is cut at its end (as vLLM counts). The first token
    comes from the prefill and belongs to no pass. ``seconds``: wall clock by part. ``drafted``: tokens of all drafts, side
    branches included.
    """

    tokens: list[int]
    proposed: list[int]
    accepted: list[int]
    ended: bool
    seconds: dict[str, float]
    drafted: int = 0


@dataclass
class Stopwatch:
    """Wall clock by part; waits for the device, so that a part's work is counted in that part."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "draft", "target", "total"), 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start


@torch.inference_mode()
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
    """Decode ``prompt`` (token ids) for at most ``max_new`` tokens, drafting in ``form`` with ``head``.

    Greedy decoding emits the target's own greedy text; sampling emits its own distribution. ``sampled_drafts`` draws the
    drafts from the head instead of taking its most likely ones; both are lossless. ``typical`` is not. Without a head or
    with the form ``none`` this is plain decoding. Raises UserError for a prompt that leaves no room in the target's context
    and for what does not go together.
    """
    check(target, prompt, form, sampling, sampled_drafts, typical)
    form = fitted(form, head)
    budget = min(max_new, target.max_positions - len(prompt))
    taps = head.config.taps if head else []
    state = head.new_state() if head else None
    cache, watch = target.new_cache(), Stopwatch(target.device)
    device, shape = target.device, NONE
    seen, depths = ancestry(shape, device)
    proposed: list[int] = []
    accepted: list[int] = []
    drafted = 0
    drawn = sampling if sampled_drafts else None
    with watch.part("total"):
        with watch.part("prefill"):
            logits, rows = target.prefill(torch.tensor(prompt, device=device), cache, taps)
            emitted = [choose(logits, GREEDY if typical else sampling, generator)]
        new, ids = emitted, [*prompt, *emitted]  # ids: the token of every new row, and the one behind the last
        while len(emitted) < budget and not target.eos_ids.intersection(new):
            past = len(prompt) + len(emitted) - 1  # rows in the cache; the last emitted token is not among them
            cut = form.cut(target.max_positions - 1 - past)
            draft = NOTHING
            if head is not None and cut.length:
                with watch.part("draft"):
                    known = torch.tensor(ids, device=device)
                    draft = write_draft(head, state, rows, known, cut, target, drawn, generator)
            if draft.shape is not shape:
                shape = draft.shape
                seen, depths = ancestry(shape, device)
            tokens = [emitted[-1], *draft.tokens]
            with watch.part("target"):
                logits, rows = target.verify(torch.tensor(tokens, device=device), past + depths, seen, cache, taps)
                path, bonus = accept(logits, draft, sampling, generator, typical)
            index = torch.tensor(path, device=device)
            target.keep(cache, past, index)
            rows = rows.rows(index)
            ids = [*(tokens[node] for node in path), bonus]
            new = ids[1:]
            emitted = emitted + new
            if draft.tokens:
                proposed.append(shape.length)
                accepted.append(len(path) - 1)
                drafted += len(draft.tokens)
    emitted, ended = truncate(emitted, budget, target.eos_ids)
    return Generation(emitted, proposed, accepted, ended, watch.seconds, drafted)


def check(
    target: Target, prompt: list[int], form: Form, sampling: Sampling, sampled_drafts: bool, typical: Typical | None
) -> None:
    if not prompt:
        raise UserError("the prompt has no tokens: give at least one.")
    if len(prompt) >= target.max_positions:
        raise UserError(f"the prompt has {len(prompt)} tokens and {target.name}'s context {target.max_positions}: shorten it.")
    if sampled_drafts and isinstance(form, Dynamic | Beam):
        raise UserError(f"{form.name} takes the head's likeliest tokens: leave out --sampled-drafts or draft a chain or tree.")
    if typical and (sampled_drafts or sampling.greedy):
        raise UserError(
            "--lossy-typical judges likeliest tokens at a --temperature above 0: set one, without --sampled-drafts."
        )
    if sampled_drafts and sampling.greedy:
        raise UserError("--sampled-drafts draws drafts at a --temperature above 0: set one, or leave it out.")


def ancestry(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Who sees whom: bool [nodes, nodes], True for ancestors and self; and every node's depth [nodes]."""
    seen = np.eye(len(shape.depths), dtype=bool)
    for node, parent in enumerate(shape.parents, start=1):
        seen[node] |= seen[parent]
    return torch.from_numpy(seen).to(device), torch.tensor(shape.depths, device=device)


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
