"""The draft vocabulary: the target's tokens that a head can name."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .chat import Encoded, render, tokens


@dataclass
class DraftVocabulary:
    """Which target tokens a head can draft, in rising order.

    ``d2t`` int64 [draft_vocab] holds OFFSETS: target id = draft id + d2t[draft id]. ``t2d`` bool [vocab] is True on the
    tokens inside. ``coverage`` is the share (0 to 1) of the supervised tokens that are inside.
    """

    d2t: Tensor
    t2d: Tensor
    coverage: float

    @property
    def target_ids(self) -> Tensor:
        """The target id of each draft id: int64 [draft_vocab], rising."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def count_tokens(examples: Iterable[Encoded], vocab_size: int) -> Tensor:
    """How often each target token is supervised: int64 [vocab_size]. Counts of disjoint shards may be summed.

    Raises UserError for a token beyond the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for example in examples:
        supervised = example.ids[example.mask]
        if supervised.size and supervised.max() >= vocab_size:
            raise UserError(
                f"token {supervised.max()} is beyond the target's {vocab_size} tokens: use the target's own tokenizer."
            )
        counts += np.bincount(supervised, minlength=vocab_size)
    return torch.from_numpy(counts)


def choose(counts: Tensor, size: int, always: Iterable[int]) -> DraftVocabulary:
    """The ``size`` most frequent tokens of counts [vocab], ids in ``always`` first; ties go to the lower id.

    Raises UserError when ``size`` is larger than the vocabulary or does not hold ``always``.
    """
    vocab = len(counts)
    forced = {i for i in always if i < vocab}  # a tokenizer may know more tokens than the model can write
    if size > vocab:
        raise UserError(f"draft vocabulary of {size} is larger than the target's {vocab}: give at most {vocab}.")
    if size < max(len(forced), 1):
        raise UserError(
            f"draft vocabulary of {size} is smaller than the {len(forced)} end and template tokens it must hold: "
            f"give at least {max(len(forced), 1)}."
        )
    rank = counts.clone()
    rank[sorted(forced)] = torch.iinfo(torch.int64).max
    target_ids = rank.sort(descending=True, stable=True).indices[:size].sort().values
    return holding(target_ids, counts)


def holding(target_ids: Tensor, counts: Tensor) -> DraftVocabulary:
    """The vocabulary of exactly these ids, int64 [draft_vocab] rising, with its coverage of counts [vocab]."""
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[target_ids] = True
    coverage = float(counts[t2d].sum()) / max(int(counts.sum()), 1)
    return DraftVocabulary(target_ids - torch.arange(len(target_ids)), t2d, coverage)


def special_ids(tokenizer: Any, eos_ids: Iterable[int]) -> set[int]:
    """The end-of-sequence ids and those special or added tokens that the chat template writes around a chat."""
    if not tokenizer.chat_template:
        return set(eos_ids)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    asked = render([*chat, chat[0]], tokenizer, "a sample chat", answer_next=True)
    written = set(tokens(asked, tokenizer)) | set(tokens(render(chat, tokenizer, "a sample chat"), tokenizer))
    return set(eos_ids) | (written & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
