"""A head walked along texts that are already written: what it would have drafted at every place, and whether that was right.

The target's greedy token is the label everywhere, as in training's own metrics. On a text that the target wrote greedily the
label is the text itself, and the walk tells what the verifier would accept from every place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..console import Progress
from ..data.generation import continue_batch
from ..heads.base import DraftHead
from ..sampling import GREEDY, Sampling
from ..target import Target
from .tree import chain

BATCH = 16  # replies that the target writes side by side


@dataclass(frozen=True)
class Text:
    """Token ids, of which those from ``start`` on are the reply; ``category`` is its prompt's."""

    ids: list[int]
    start: int
    category: str = "all"


def written(
    target: Target,
    head: DraftHead,
    prompts: Sequence[list[int]],
    categories: Sequence[str],
    max_new: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> list[Text | None]:
    """What the target writes behind each prompt; None where that is nothing, or where the prompt leaves no room."""
    fits = [i for i, ids in enumerate(prompts) if len(ids) + max_new < target.max_positions]
    found: list[Text | None] = [None] * len(prompts)
    with head.adapted(target), torch.random.fork_rng():
        torch.manual_seed(seed)
        for first in range(0, len(fits), BATCH):
            some = fits[first : first + BATCH]
            for i, text in zip(some, continue_batch(target, [prompts[i] for i in some], sampling, max_new), strict=True):
                found[i] = Text(prompts[i] + text.ids, len(prompts[i]), categories[i]) if text.ids else None
    return found


@dataclass(frozen=True)
class Walked:
    """One text's record. Row r is the place behind the reply's token r, where a draft would begin.

    ``accepted`` int [rows]: greedy drafts right in a row from there. ``excused`` int [rows]: the same, had every label outside
    the draft vocabulary been drafted. ``room`` int [rows]: how many drafts could have been right at most: the draft's length,
    or what is left of the text. ``sure`` [rows]: the target's probability of the first label. ``outside`` bool [rows]: that
    label is not in the draft vocabulary. ``overlap`` [rows]: the chance that the first draft is accepted if it is drawn,
    sum_v min(p_v, q_v).
    """

    accepted: np.ndarray
    excused: np.ndarray
    room: np.ndarray
    sure: np.ndarray
    outside: np.ndarray
    overlap: np.ndarray
    category: str

    @property
    def renewed(self) -> np.ndarray:
        """``accepted``, had every draft been made from the target's own features of the place before it: int [rows]."""
        run, found = 0, np.zeros_like(self.accepted)
        for row in range(len(found) - 1, -1, -1):
            run = run + 1 if self.accepted[row] else 0
            found[row] = min(run, self.room[row])
        return found


def walk_all(
    target: Target,
    head: DraftHead,
    texts: Sequence[Text],
    length: int,
    temperature: float = 1.0,
    title: str = "reading",
    show: bool = False,
) -> list[Walked]:
    """``walk`` for every text."""
    found = []
    with head.adapted(target), Progress(title, len(texts), show=show) as bar:
        for text in texts:
            found.append(walk(target, head, text, length, temperature))
            bar.advance()
    return found


@torch.inference_mode()
def walk(target: Target, head: DraftHead, text: Text, length: int, temperature: float = 1.0) -> Walked:
    """Draft a greedy chain of ``length`` behind every token of the reply, reading the text's tokens and not the drafts.

    A chain is followed to its first wrong token: what comes behind is never accepted. ``temperature`` divides the logits of
    ``overlap`` (0 counts as 1: greedy drafts overlap in whole or not at all).
    """
    ids = torch.tensor(text.ids, device=target.device)
    features = target.features(ids[None], head.config.taps)
    logits = target.logits(features.last[0, text.start - 1 :]).float()  # [reply + 1, V]: row r is of the place of label r
    best = logits.argmax(-1)
    known = torch.zeros(logits.shape[-1], dtype=torch.bool)
    known[head.target_ids.cpu()] = True
    labels, inside = best.tolist(), known[best.cpu()].tolist()
    rows = len(text.ids) - text.start
    accepted, excused, room = (np.zeros(rows, np.int64) for _ in range(3))
    overlap = np.zeros(rows)
    state, shape, first = head.new_state(), chain(length), 0
    for row in range(rows):
        place = text.start - 1 + row
        read = features.rows((0, slice(first, place + 1)))
        guess, first = head.begin(state, read, ids[first : place + 2], target), place + 1
        overlap[row] = shared(logits[row + 1], guess.logits[0], head.target_ids, temperature or 1.0)
        room[row], misses = min(length, rows - row), 0
        for depth in range(int(room[row])):
            if depth:
                guess = head.deepen(state, [depth], ids[place + 1 + depth, None], shape, target)
            label = row + 1 + depth
            if not inside[label]:
                misses += 1
            elif int(head.target_ids[guess.logits[0].argmax()]) != labels[label]:
                break
            excused[row] += 1
            accepted[row] += not misses
    sure = logits[1:].softmax(-1).max(-1).values.cpu().numpy()
    return Walked(accepted, excused, room, sure, ~np.array(inside[1:], bool), overlap, text.category)


@dataclass(frozen=True)
class Likelihood:
    """What the target thinks of a reply's own tokens, all [reply tokens]: ``nll`` and, of its whole distribution there,
    ``entropy`` in nats; ``agrees``: the token is its greedy one.

    On what the target itself wrote, nll and entropy are the same on average at temperature 1, and nll is lower below.
    """

    nll: np.ndarray
    entropy: np.ndarray
    agrees: np.ndarray


@torch.inference_mode()
def likelihood(target: Target, text: Text) -> Likelihood:
    """How likely the target finds a reply."""
    ids = torch.tensor(text.ids, device=target.device)
    logits = target.logits(target.features(ids[None], []).last[0, text.start - 1 : -1]).float()
    likely, own = logits.log_softmax(-1), ids[text.start :]
    nll = -likely.gather(1, own[:, None])[:, 0]
    entropy = -(likely.exp() * likely).nan_to_num(0).sum(-1)
    return Likelihood(*(each.cpu().numpy() for each in (nll, entropy, logits.argmax(-1) == own)))


@torch.inference_mode()
def first_drafts(target: Target, head: DraftHead, ids: list[int], rows: Sequence[int]) -> list[tuple[float, float]]:
    """At some rows t rising, where x_t+1 is known and x_t+2 is drafted: the chance that a drawn draft is accepted, and the
    target's probability of its own greedy token there."""
    tokens = torch.tensor(ids, device=target.device)
    features = target.features(tokens[None], head.config.taps)
    state, first, found = head.new_state(), 0, []
    for row in rows:
        guess = head.begin(state, features.rows((0, slice(first, row + 1))), tokens[first : row + 2], target)
        logits = target.logits(features.last[0, row + 1]).float()
        found.append((shared(logits, guess.logits[0], head.target_ids, 1.0), float(logits.softmax(-1).max())))
        first = row + 1
    return found


def shared(p: Tensor, q: Tensor, target_ids: Tensor, temperature: float) -> float:
    """sum_v min(p_v, q_v) of the target's logits [V] and the draft's [draft vocab]."""
    q = (q.float() / temperature).softmax(-1)
    return float(torch.minimum((p / temperature).softmax(-1)[target_ids], q).sum())


def tau(found: Sequence[Walked], what: str = "accepted") -> float:
    """1 + the sum over depths of the share of places whose drafts down to there are all right: joint counts, as in training.

    ``what``: accepted, excused or renewed.
    """
    return 1 + sum(by_depth(found, what))


def replayed(found: Sequence[Walked]) -> float:
    """τ as the verifier counts it on texts that the target wrote: each pass drafts behind what the one before it emitted."""
    passes = emitted = 0
    for one in found:
        row = 0
        while row < len(one.accepted):
            passes, emitted = passes + 1, emitted + int(one.accepted[row]) + 1
            row += int(one.accepted[row]) + 1
    return emitted / passes if passes else 1.0


def by_depth(found: Sequence[Walked], what: str = "accepted") -> list[float]:
    """The share of places whose drafts are all right down to each depth, of those with room for it; ``what`` as for ``tau``."""
    values = np.concatenate([getattr(one, what) for one in found]) if found else np.zeros(0)
    room = np.concatenate([one.room for one in found]) if found else np.zeros(0)
    depths = range(1, int(room.max(initial=0)) + 1)
    return [float((values >= depth).sum() / (room >= depth).sum()) for depth in depths]
