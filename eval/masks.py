"""Was a head taught the rows that the right loss mask teaches, or those of a mask that is shifted?"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..data.chat import Encoded
from ..data.template import QUESTION, render, template_of, tokens
from ..heads.base import supervised
from .case import Case, Part
from .walk import first_drafts

SHIFTS = (-1, 1, -2, 2)  # tokens that a mask may be late
APART = 0.15  # of the first draft's acceptance: rows that were taught and rows that were not differ by more
EVERY = 8  # one row of so many inside the right mask is looked at
CLASSES = 4  # of rows, by how sure the target is
INSIDE = "inside"
Known = dict[str, Any]


def mask(case: Case) -> Part:
    """Two looks: at the masks in the store that the run read, and at what the head knows.

    A mask that is late by a token leaves out the first row of every reply and teaches the row behind its end; an early one
    teaches the reply's first token from its header and leaves out its end. A head drafts well where it was taught. That is a
    verdict on early masks alone: what follows an end-of-turn token is so easy that sound heads may know it, too.
    """
    name = "mask"
    if not case.taught:
        return Part(name, "does not apply: there are no training conversations to look at; name them with --data.")
    right = [template_mask(row.ids, case) for row in case.taught] if case.recorded else [row.mask for row in case.taught]
    known = knows(case, right)
    evidence: dict[str, Any] = {"first draft accepted, by shift": {str(shift): found for shift, found in known.items()}}
    shift, beyond = 0, 0.0
    if case.recorded:
        shift = stored_shift(case, right, evidence)
        beyond = float(np.mean([(row.mask & ~own).sum() / row.mask.sum() for row, own in zip(case.taught, right, strict=True)]))
        evidence["stored masks beyond the replies"] = beyond
    seen = next((shift for shift, found in known.items() if shift < 0 and looks_taught(found)), 0)
    if not shift and not seen and beyond < 0.25:
        return Part(name, "the head knows the rows that the right mask teaches, and no others.", 0.0, None, False, evidence)
    step = "mend the mask: a reply counts from its first token through its end-of-turn token, as data extract writes it."
    if shift or seen:
        how = f"{abs(shift or seen)} token too {'late' if (shift or seen) > 0 else 'early'}".replace("2 token", "2 tokens")
        where = "in the store that the run read, replies begin" if shift else "to judge by what the head knows, masks began"
        says = f"{where} {how}; {telling(known[shift or seen])}."
    else:
        says = f"of the tokens that the store supervises, {beyond:.0%} are no reply's."
    return Part(name, says, cost(case, shift or seen), None, True, evidence, step)


def telling(found: Known) -> str:
    """What a head's knowledge of one shift comes to, in words."""
    words = {"gained": "rows that such a mask teaches wrongly", "lost": "rows that it leaves out"}
    seen = [(found[group], found[f"{group}, expected"], what) for group, what in words.items()]
    told = [f"{own:.0%} in {what} ({like:.0%} in others as easy)" for own, like, what in seen if own is not None]
    return f"a drawn first draft is accepted in {' and '.join(told)}"


def cost(case: Case, shift: int) -> float:
    """Tokens per pass lost where the first rows of every reply draft worse than its others: a late mask leaves out the first
    ``shift`` rows. An early one leaves out rows at its end, where there is little left to draft."""
    rows = max(shift, 0)
    long = [one for one in case.own if len(one.accepted) > rows]
    if not rows or not long:
        return 0.0
    others = float(np.concatenate([one.accepted[rows:] for one in long]).mean())
    first = np.array([one.accepted[:rows].mean() for one in long])
    passes = np.mean([len(one.accepted) / (1 + one.accepted.mean()) for one in long])
    return max(0.0, float(others - first.mean()) * rows / float(passes))


def template_mask(ids: np.ndarray, case: Case) -> np.ndarray:
    """The mask [time] that the target's template gives these ids: behind each reply's header, through its end."""
    tokenizer = case.target.tokenizer
    ask, stops = [{"role": "user", "content": QUESTION}], template_of(tokenizer).stops
    asked, fed = (render(ask, tokenizer, "a sample chat", answer_next=answer) for answer in (False, True))
    header, row = tokens(fed.removeprefix(asked), tokenizer), ids.tolist()
    found = np.zeros(len(row), bool)
    for place in range(len(header), len(row)):
        if row[place - len(header) : place] == header:
            end = next((i for i in range(place, len(row)) if row[i] in stops), len(row) - 1)
            found[place : end + 1] = True
    return found


def stored_shift(case: Case, right: Sequence[np.ndarray], evidence: dict[str, Any]) -> int:
    """By how many tokens most of the stored masks are late; 0 where they are not, or not alike."""
    late = [last_start(row.mask) - last_start(own) for row, own in zip(case.taught, right, strict=True) if own.any()]
    counted = Counter(late)
    evidence["stored masks, by tokens late"] = {str(shift): count / len(late) for shift, count in counted.most_common(5)}
    shift, count = counted.most_common(1)[0] if counted else (0, 0)
    return shift if count > len(late) / 2 and abs(shift) <= max(SHIFTS) else 0


def last_start(own: np.ndarray) -> int:
    """Where the last stretch of a mask begins."""
    return int(np.flatnonzero(own & ~shifted(own, 1))[-1])


def shifted(own: np.ndarray, shift: int) -> np.ndarray:
    """A mask [time], ``shift`` tokens late."""
    pad = np.zeros(abs(shift), bool)
    return np.concatenate([pad, own[:-shift]]) if shift > 0 else np.concatenate([own[-shift:], pad])


def knows(case: Case, right: Sequence[np.ndarray]) -> dict[int, Known]:
    """For every shift the mean chance that a drawn first draft is accepted: in rows that the shifted mask teaches and the right
    one does not (``gained``), and in those it leaves out (``lost``); each beside the mean that rows inside the right mask would
    have where the target is as sure (``expected``). None where there are no such rows.
    """
    seen: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row, own in zip(case.taught, right, strict=True):
        now = rows_of(own)
        wanted: dict[Any, np.ndarray] = {INSIDE: np.flatnonzero(now)[2::EVERY]}
        for shift in SHIFTS:
            then = rows_of(shifted(own, shift))
            wanted[shift, "gained"] = np.flatnonzero(then & ~now)
            wanted[shift, "lost"] = np.flatnonzero(now & ~then & (shift > 0 or ended(row, own, case)))
        places = np.unique(np.concatenate(list(wanted.values())))
        with case.head.adapted(case.target):
            found = first_drafts(case.target, case.head, row.ids.tolist(), places.tolist())
        for key, rows in wanted.items():
            seen[key] += [found[i] for i in np.searchsorted(places, rows)]
    if not seen[INSIDE]:
        return {}
    chance, sure = np.array(seen[INSIDE]).T
    edges = np.quantile(sure, np.linspace(0, 1, CLASSES + 1)[1:-1])
    classes = np.digitize(sure, edges)
    usual = [float(chance[classes == each].mean()) if (classes == each).any() else 0.0 for each in range(CLASSES)]
    known: dict[int, Known] = {shift: {} for shift in SHIFTS}
    for shift, group in ((shift, group) for shift in SHIFTS for group in ("gained", "lost")):
        own = seen[shift, group]
        known[shift][group] = float(np.mean([one for one, _ in own])) if own else None
        known[shift][f"{group}, expected"] = float(np.mean([usual[np.digitize(p, edges)] for _, p in own])) if own else None
    return known


def ended(row: Encoded, own: np.ndarray, case: Case) -> bool:
    """Whether a row's last reply has its end: where it was cut, an early mask leaves out a row like any other."""
    return not own[-1] or int(row.ids[-1]) in case.target.eos_ids


def rows_of(own: np.ndarray) -> np.ndarray:
    """The rows [time] that a mask teaches at depth 0."""
    return supervised(torch.tensor(own)[None], 1)[0][0].numpy()


def looks_taught(found: Known) -> bool:
    """Whether a head knows a shifted mask's rows: it drafts there as well as in others as easy, and worse in those left out."""
    gained, lost = found["gained"], found["lost"]
    if gained is None or lost is None:
        return False
    return lost < found["lost, expected"] - APART and gained > found["gained, expected"] - APART
