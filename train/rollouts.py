"""On-policy batches: texts that the draft itself goes on with, for the target to correct."""

import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.features import PAD, FeatureBatch
from ..heads.base import DraftHead, Shape, scores, supervised
from ..heads.drafting import draft
from ..target import Features, Target


@torch.no_grad()
def rollouts(head: DraftHead, batch: FeatureBatch, target: Target, length: int, seed: int) -> FeatureBatch:
    """Of every line that supervises anything: its text up to a row drawn from ``seed``, and behind it the head's own greedy
    draft of ``length`` tokens, supervised alone.

    What the draft would really write is then taught with what the target says there, right or wrong, as in on-policy
    distillation (GKD, 2306.13649): contexts that the data never shows. The drafted tokens are no labels to learn.
    """
    ids, mask = [], []
    chain = Shape("rollout", tuple(range(length)), (0,) * length)
    drawn = scores(batch.ids, supervised(batch.mask, 1)[0], seed)
    head.eval()
    with head.adapted(target):
        features = target.features(batch.ids, head.config.taps, batch.positions) if head.adapts else batch.features
        for line, (row, score) in enumerate(zip(drawn.argmin(1).tolist(), drawn.amin(1).tolist(), strict=True)):
            if score == 1:  # nothing is supervised here
                continue
            start = row - int(batch.positions[line, row]) if batch.positions is not None else 0
            known = batch.ids[line, start : row + 2]
            read = features.rows((line, slice(start, row + 1)))
            fits = chain.cut(target.max_positions - len(known))
            written = draft(head, head.new_state(), read, known, fits, target).tokens
            ids.append(torch.cat([known, known.new_tensor(written)]))
            mask.append(torch.arange(len(ids[-1]), device=known.device) > row - start)
    head.train()
    return on_the_target(ids, mask, head, batch, target)


def on_the_target(
    ids: list[torch.Tensor], mask: list[torch.Tensor], head: DraftHead, batch: FeatureBatch, target: Target
) -> FeatureBatch:
    """Sequences [time] side by side with the target's states of them; where there are none, the batch without supervision."""
    if not ids:
        return FeatureBatch(batch.ids, torch.zeros_like(batch.mask), batch.features, batch.positions, batch.tokens)
    tokens = sum(len(own) for own in ids)
    lines = pad_sequence(ids, batch_first=True, padding_value=PAD)
    marks = pad_sequence(mask, batch_first=True)
    states: Features = target.features(lines, head.config.taps)
    return FeatureBatch(lines, marks, states, None, tokens)
