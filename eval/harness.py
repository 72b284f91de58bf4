"""Measure a head on prompts: acceptance length with its interval, acceptance by position, speed against plain decoding."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from ..console import Progress
from ..heads.base import DraftHead, Shape
from ..heads.drafting import Adaptive, Form
from ..heads.growing import Dynamic
from ..sampling import GREEDY, Sampling
from ..target import Target
from .prompts import Prompt
from .search import spend
from .tree import NONE, Search, fitted
from .typical import Typical
from .verifier import Generation, generate

NEAR_TIE = 1e-3  # in logits: two tokens closer than this may swap places when sums are taken in another order


def measure(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    form: Form | Search,
    max_new: int,
    sampling: Sampling = GREEDY,
    sampled_drafts: bool = False,
    baseline: int | None = None,
    seed: int = 0,
    show: bool = False,
    typical: Typical | None = None,
) -> dict[str, Any]:
    """Decode every prompt with the head and return one entry of a report's ``results`` (see docs/evaluation.md).

    The first ``baseline`` prompts (all of them by default) are also decoded plainly, prompt by prompt in alternating
    order, for the speed-up and, when greedy, for the proof that the text is the target's own. A ``Search`` takes the first
    quarter of the prompts for itself. A head that trains adapters has them on the target throughout, in plain decoding too.
    """
    generator = torch.Generator().manual_seed(seed)
    found = None
    if isinstance(form, Search):
        with head.adapted(target):
            form, prompts, found = spend(target, head, prompts, form, max_new, sampling, generator, show)
    form = fitted(form, head)
    baseline = len(prompts) if baseline is None else min(baseline, len(prompts))
    drafted: list[Generation] = []
    plain: list[Generation] = []
    ties: list[dict[str, Any]] = []
    with head.adapted(target), Progress("decoding", len(prompts), show=show) as bar:
        for i, prompt in enumerate(prompts):
            ids = prompt.ids(target)
            runs = [False, True][:: 1 if i % 2 else -1] if i < baseline else [True]
            for with_head in runs:
                if with_head:
                    out = generate(target, head, ids, form, max_new, sampling, sampled_drafts, generator, typical)
                    drafted.append(out)
                else:
                    plain.append(generate(target, None, ids, NONE, max_new, sampling, generator=generator))
            if i < baseline and sampling.greedy and drafted[-1].tokens != plain[-1].tokens:
                ties.append({"prompt": i, **divergence(target, ids, drafted[-1].tokens, plain[-1].tokens)})
            bar.advance(1, f"τ {tau(drafted):.3f}")
    compared = drafted[:baseline]
    lossless = all(tie["margin"] < NEAR_TIE for tie in ties) if baseline and sampling.greedy else None
    return {
        "proposer": head.kind,
        "target": target.name,
        "prompts": len(prompts),
        "categories": {
            name: tau([g for g, p in zip(drafted, prompts, strict=True) if p.category == name])
            for name in sorted({p.category for p in prompts})
        },
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "draft": {**described(form, head), "sampled": sampled_drafts, **sizes(drafted)},
        "search": found,
        "batch": 1,
        "emitted_tokens": sum(len(g.tokens) for g in drafted),
        "verify_passes": sum(len(g.accepted) for g in drafted),
        "tau": tau(drafted),
        "tau_interval": tau_interval(drafted, seed),
        "accepted_per_position": per_position(drafted, form.length),
        "tokens_per_s": speed(compared),
        "baseline_prompts": baseline,
        "baseline_tokens_per_s": speed(plain),
        "speedup": speed(compared) / speed(plain) if plain else None,
        "time": shares(drafted),
        "lossless": False if typical else lossless,
        "lossless_to": "the target with the head's adapters" if head.adapts else "the target",
        "near_ties": ties,
        "lossy": typical and typical.name,
    }


def described(form: Form, head: DraftHead) -> dict[str, Any]:
    """A draft's form: how long and large at most, a static tree's paths, and what ends a chain or branch early."""
    stop = form.stop if isinstance(form, Adaptive | Dynamic) else 0
    by = "the confidence head" if isinstance(form, Adaptive) and head.confidence else "the draft's own probability"
    return {
        "kind": form.kind,
        "name": form.name,
        "length": form.length,
        "nodes": form.nodes,
        "paths": form.paths if isinstance(form, Shape) else None,
        "stop": {"below": stop, "by": by} if stop else None,
    }


def sizes(generations: Sequence[Generation]) -> dict[str, float]:
    """The drafts as they were: mean depth and mean tokens of a verify pass."""
    passes = sum(len(g.proposed) for g in generations) or 1
    return {
        "mean_length": sum(sum(g.proposed) for g in generations) / passes,
        "mean_nodes": sum(g.drafted for g in generations) / passes,
    }


def tau(generations: Sequence[Generation]) -> float:
    """Acceptance length pooled over verify passes: 1 + accepted drafts / passes."""
    passes = sum(len(g.accepted) for g in generations)
    return 1 + sum(sum(g.accepted) for g in generations) / passes if passes else 1.0


def tau_interval(generations: Sequence[Generation], seed: int, draws: int = 2000) -> list[float]:
    """The 95 % bootstrap interval of the pooled τ, resampling prompts."""
    rng = random.Random(seed)
    counts = [(sum(g.accepted), len(g.accepted)) for g in generations]
    taus = []
    for _ in range(draws):
        drawn = rng.choices(counts, k=len(counts))
        passes = sum(n for _, n in drawn)
        taus.append(1 + sum(a for a, _ in drawn) / passes if passes else 1.0)
    taus.sort()
    return [taus[round(0.025 * (draws - 1))], taus[round(0.975 * (draws - 1))]]


def per_position(generations: Sequence[Generation], length: int) -> list[float]:
    """Unconditional acceptance: accepted at position i / drafts that proposed position i, as vLLM counts."""
    rounds = [pair for g in generations for pair in zip(g.proposed, g.accepted, strict=True)]
    shares = []
    for position in range(1, length + 1):
        proposed = sum(p >= position for p, _ in rounds)
        shares.append(sum(a >= position for _, a in rounds) / proposed if proposed else 0.0)
    return shares


def speed(generations: Sequence[Generation]) -> float:
    """Output tokens per second behind the prefill and its token."""
    seconds = sum(g.seconds["total"] - g.seconds["prefill"] for g in generations)
    return sum(len(g.tokens) - 1 for g in generations) / seconds if seconds else 0.0


def shares(generations: Sequence[Generation]) -> dict[str, float]:
    """Where the time behind the prefill went: target, draft and bookkeeping (all the rest), as shares of 1."""
    total = sum(g.seconds["total"] - g.seconds["prefill"] for g in generations)
    if not total:
        return {"target": 0.0, "draft": 0.0, "bookkeeping": 0.0}
    target, draft = (sum(g.seconds[part] for g in generations) / total for part in ("target", "draft"))
    return {"target": target, "draft": draft, "bookkeeping": 1 - target - draft}


@torch.inference_mode()
def divergence(target: Target, prompt: list[int], ours: list[int], plain: list[int]) -> dict[str, Any]:
    """Where two greedy texts part, and how far the worse of their two tokens is behind the target's best one there.

    A text that just stops has no token there and ties with nothing: its margin is the row's whole range.
    """
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    ids = torch.tensor(prompt + plain[:at], device=target.device)
    logits = target.prefill(ids, target.new_cache(), [])[0].float()
    pair = ours[at : at + 1] + plain[at : at + 1]
    worse = logits[pair].min() if len(pair) == 2 else logits.min()
    return {"token": at, "ours": ours[at : at + 1], "plain": plain[at : at + 1], "margin": float(logits.max() - worse)}
