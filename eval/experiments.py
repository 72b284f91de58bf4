"""What costs a head acceptance: one experiment for each cause, on text that nobody trained on.

An experiment changes one thing, counts again what the verifier would accept (walk.py), and calls the difference the cause's
share of τ. Shares overlap: two causes may explain the same lost token. The template's experiment is in renderings.py, the
mask's in masks.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.chat import Encoded
from .case import Case, Part, between, interval
from .curve import outlook
from .walk import Likelihood, Text, Walked, by_depth, likelihood, tau

SURPRISE = 0.1  # nats a token by which a text may surprise the target more than its own choice would
FEW_STEPS = 50
CLASSES = 6  # of places, by how sure the target is
FEEDS_BACK = {"eagle", "eagle3", "hydra", "mlp_speculator", "mtp", "redrafter"}  # kinds that read their own states


def responses(case: Case) -> Part:
    """Did the target write the training responses, and does the head draft better on text like them than on the target's?"""
    name = "responses"
    if not case.taught:
        return Part(name, "does not apply: there are no training conversations to look at; name them with --data.")
    theirs = [likelihood(case.target, reply(row)) for row in case.taught]
    ours = [likelihood(case.target, text) for text in case.texts]
    low, high = interval(theirs, surprise)
    other = case.walked(case.unseen, "the data's replies")
    evidence: dict[str, Any] = {
        "training tokens that are the target's greedy choice": mean(theirs, "agrees"),
        "the same of its own text": mean(ours, "agrees"),
        "nll of training tokens": mean(theirs, "nll"),
        "nll of its own": mean(ours, "nll"),
        "surprise, nats a token": surprise(theirs),
        "surprise, interval": [low, high],
        "tau on its own text": tau(case.own),
    }
    gap, bounds = 0.0, None
    if other:
        gap = at_equal_ease(case.own, other) - tau(case.own)
        bounds = between(case.own, other, lambda own, data: at_equal_ease(own, data) - tau(own))
        evidence |= {"tau on the data's replies": tau(other), "the same at equal ease": tau(case.own) + gap}
    agrees = f"{mean(theirs, 'agrees'):.0%} of the training responses' tokens are the target's own choice"
    if low <= SURPRISE:
        return Part(name, f"{agrees}: it wrote them, so they cost nothing.", 0.0, bounds, False, evidence)
    says = f"{agrees}, and {mean(ours, 'agrees'):.0%} of its own text's: another wrote them."
    step = "let the target answer the prompts itself (draftsmith data regenerate), and train on its answers."
    return Part(name, says, max(0.0, gap), bounds, True, evidence, step)


def reply(row: Encoded, most: int | None = None) -> Text:
    """The last supervised reply of a row without its end token, cut to ``most`` tokens."""
    stop = start = int(np.flatnonzero(row.mask)[-1])
    while start > 1 and row.mask[start - 1]:
        start -= 1
    return Text(row.ids[: stop if most is None else min(stop, start + most)].tolist(), start)


def surprise(found: Sequence[Likelihood]) -> float:
    """Nats a token by which texts are less likely than what the target would draw itself; 0 or less for its own."""
    return float(np.concatenate([one.nll - one.entropy for one in found]).mean())


def mean(found: Sequence[Any], what: str) -> float:
    return float(np.concatenate([getattr(one, what) for one in found]).mean())


def at_equal_ease(own: Sequence[Walked], other: Sequence[Walked]) -> float:
    """τ on ``other`` texts, were the target as sure at their places as it is at those of ``own`` (direct standardisation over
    classes of its certainty)."""
    (sure, room, _), (their_sure, their_room, accepted) = (
        [np.concatenate([getattr(one, what) for one in found]) for what in ("sure", "room", "accepted")]
        for found in (own, other)
    )
    edges = np.quantile(sure, np.linspace(0, 1, CLASSES + 1)[1:-1])
    ours, theirs = np.digitize(sure, edges), np.digitize(their_sure, edges)
    total = 1.0
    for depth in range(1, int(their_room.max()) + 1):
        there = their_room >= depth
        seen = [each for each in range(CLASSES) if (there & (theirs == each)).any()]
        weights = [float(((ours == each) & (room >= depth)).sum()) for each in seen]
        right = [float((accepted[there & (theirs == each)] >= depth).mean()) for each in seen]
        total += float(np.average(right, weights=weights)) if any(weights) else 0.0
    return total


def vocabulary(case: Case) -> Part:
    """What τ would be if every token outside the draft vocabulary had been drafted: an upper bound, for it counts the rest of
    the path as it was."""
    name, size = "vocabulary", case.head.config.draft_vocab_size
    if size == case.target.vocab_size:
        return Part(name, "the head can name every token.", 0.0)
    outside = mean(case.own, "outside")
    share = tau(case.own, "excused") - tau(case.own)
    bounds = interval(case.own, lambda some: tau(some, "excused") - tau(some))
    evidence = {"draft vocabulary": size, "tokens outside": outside, "tau had those been hits": tau(case.own, "excused")}
    says = f"{outside:.1%} of the target's tokens are outside the {size} that the head can name."
    step = "raise head.draft_vocab, or count it on conversations like these prompts."
    return Part(name, says, share, bounds, False, evidence, step)


def growth(case: Case) -> Part:
    """What τ would be if every depth read the target's own states, as depth 0 does, in place of the head's."""
    name, kind, depths = "error growth", case.head.kind, case.head.config.depths
    if kind not in FEEDS_BACK:
        return Part(name, f"does not apply: {kind} does not read states of its own drafts in place of the target's.")
    share = tau(case.own, "renewed") - tau(case.own)
    bounds = interval(case.own, lambda some: tau(some, "renewed") - tau(some))
    evidence = {
        "tau with true features": tau(case.own, "renewed"),
        "right down to each depth": by_depth(case.own),
        "the same with true features": by_depth(case.own, "renewed"),
        "depths trained": depths,
    }
    says = f"with the target's states at every depth τ would be {tau(case.own, 'renewed'):.2f}."
    step = f"train more depths than {depths} (head.depths)" if depths < case.length else "train longer on the head's own states"
    return Part(name, says, max(0.0, share), bounds, False, evidence, f"{step}; see objective.depth_decay and head.options.")


def training(case: Case) -> Part:
    """What as many steps again would bring, by the run's own learning curve."""
    name = "training"
    if not case.curve:
        return Part(name, "does not apply: there is no metrics.jsonl to read a learning curve from.")
    steps = int(max(row["step"] for row in case.curve))
    held_out, train = (points(case.curve, part) for part in ("held_out", "train"))
    for part, (x, y) in (("held-out", held_out), ("training", train)):
        ahead = outlook(x, y, case.head.config.depths + 1)
        if ahead and steps >= FEW_STEPS:
            evidence = {"curve": part, "steps": steps, "gain of twice the steps": ahead.doubled, "gain ever": ahead.ever}
            evidence["gain ever, interval"] = list(ahead.ever_interval)
            says = f"by the {part} curve, {steps} more steps bring τ {ahead.doubled:+.2f}."
            return Part(name, says, ahead.doubled, ahead.doubled_interval, False, evidence, "train for more steps or epochs.")
    x, y = train if len(train[0]) > len(held_out[0]) else held_out
    late = float(y[-1] - np.interp(x[-1] / 2, x, y)) if len(x) > 1 else None
    evidence = {"steps": steps, "gain of the last half": late}
    if steps >= FEW_STEPS:
        says = f"the {steps} steps left too few points to extrapolate; set train.eval_every and train.log_every lower."
        return Part(name, says, max(0.0, late or 0.0), None, False, evidence, "train for more steps or epochs.")
    says = f"the run has {steps} steps: too few for a learning curve, let alone for its end."
    step = "train for an epoch or more before looking for another cause."
    return Part(name, says, max(0.0, late or 0.0), None, True, evidence, step)


def points(curve: Sequence[dict[str, Any]], part: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps above 0 and the simulated τ of one part of a metrics.jsonl."""
    rows = [row for row in curve if row["part"] == part and row["step"] > 0]
    return np.array([float(row["step"]) for row in rows]), np.array([float(row["tau_sim"]) for row in rows])


def temperature(case: Case) -> Part:
    """τ on replies drawn at the temperature in use against τ on greedy ones."""
    name = "temperature"
    evidence = {"drawn first draft accepted, greedy text": mean(case.own, "overlap")}
    if not case.hot:
        return Part(name, "does not apply: decoding is greedy; ask with --temperature.", evidence=evidence)
    share = tau(case.own) - tau(case.hot)
    bounds = between(case.own, case.hot, lambda own, hot: tau(own) - tau(hot))
    evidence |= {"tau at 0": tau(case.own), "tau at it": tau(case.hot), "drawn first draft accepted": mean(case.hot, "overlap")}
    says = f"at temperature {case.temperature:g} τ is {tau(case.hot):.2f}, at 0 it is {tau(case.own):.2f}."
    step = f"train with objective.temperature={case.temperature:g}, draw drafts (--sampled-drafts), or serve cooler."
    return Part(name, says, max(0.0, share), bounds, False, evidence, step)


def domain(case: Case) -> Part:
    """τ on these prompts against τ on prompts as the run was trained on, and by category."""
    name = "domain"
    names = sorted({one.category for one in case.own})
    by = {each: tau([one for one in case.own if one.category == each]) for each in names}
    evidence: dict[str, Any] = {"tau by category": by}
    worst = min(by, key=lambda each: by[each])
    step = f"add training conversations like those of the worst category ({worst})."
    if case.home:
        share = tau(case.home) - tau(case.own)
        bounds = between(case.own, case.home, lambda own, home: tau(home) - tau(own))
        evidence["tau on the run's own held-out prompts"] = tau(case.home)
        says = f"on the run's own held-out prompts τ is {tau(case.home):.2f}, on these {tau(case.own):.2f}."
        return Part(name, says, max(0.0, share), bounds, False, evidence, step)
    shared = [each for each in names if case.mix.get(each)]
    if len(names) < 2 or not shared:
        return Part(name, "does not apply: the prompts are the run's own, of one category; name others with --prompts.")

    def shift(some: Sequence[Walked]) -> float:
        taus = {each: tau([one for one in some if one.category == each]) for each in shared}
        return sum(case.mix[each] * taus[each] for each in shared) / sum(case.mix[each] for each in shared) - tau(some)

    evidence["training rows by category"] = case.mix
    says = f"mixed as the training rows are, the prompts' categories would give τ {tau(case.own) + shift(case.own):.2f}."
    return Part(name, says, max(0.0, shift(case.own)), interval(case.own, shift), False, evidence, step)
