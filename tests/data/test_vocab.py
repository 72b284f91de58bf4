from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.chat import Encoded
from draftsmith.data.vocab import choose, count_tokens, special_ids
from draftsmith.errors import UserError

IDS = [*range(40, 59), 2]  # twenty distinct tokens, the end of turn among them


def corpus() -> list[Encoded]:
    rows = []
    for i in range(12):
        own = np.array([3, 4, *IDS[: i + 8], 2, 5], np.int32)
        mask = np.ones(len(own), bool)
        mask[[0, 1, -1]] = False
        rows.append(Encoded(own, mask))
    return rows


def test_counts_supervised_tokens_only() -> None:
    counts = count_tokens(corpus(), 128)
    assert counts.dtype == torch.int64 and len(counts) == 128
    assert counts[[3, 4, 5]].tolist() == [0, 0, 0]
    assert counts[40] == 12 and counts[2] == 12
    assert counts.sum() == sum(int(example.mask.sum()) for example in corpus())


def test_case_09_holds_the_corpus_and_the_end_ids_in_rising_order() -> None:
    vocabulary = choose(count_tokens(corpus(), 128), 32, always={2, 0, 127})
    assert (vocabulary.d2t.dtype, vocabulary.d2t.shape) == (torch.int64, (32,))
    assert (vocabulary.t2d.dtype, vocabulary.t2d.shape) == (torch.bool, (128,))
    assert int(vocabulary.t2d.sum()) == 32
    targets = (torch.arange(32) + vocabulary.d2t).tolist()
    assert targets == sorted(set(targets)) == vocabulary.target_ids.tolist() == vocabulary.t2d.nonzero().flatten().tolist()
    seen = {int(token) for example in corpus() for token in example.ids[example.mask]}
    assert seen | {0, 2, 127} <= set(targets)
    assert vocabulary.coverage == 1.0


def test_row_order_and_shards_do_not_matter() -> None:
    rows = corpus()
    whole = choose(count_tokens(rows, 128), 10, {2})
    turned = choose(count_tokens(rows[::-1], 128), 10, {2})
    sharded = choose(count_tokens(rows[::2], 128) + count_tokens(rows[1::2], 128), 10, {2})
    assert torch.equal(whole.d2t, turned.d2t) and torch.equal(whole.d2t, sharded.d2t)


def test_ties_go_to_the_lower_id_and_coverage_is_the_share_inside() -> None:
    vocabulary = choose(torch.tensor([0, 5, 1, 5, 5, 4]), 3, {0})
    assert vocabulary.target_ids.tolist() == [0, 1, 3]
    assert vocabulary.coverage == 0.5
    assert choose(torch.tensor([0, 5, 1, 5, 5, 4]), 3, []).target_ids.tolist() == [1, 3, 4]
    assert choose(torch.zeros(4, dtype=torch.int64), 2, []).coverage == 0.0


def test_the_whole_vocabulary_is_the_identity() -> None:
    vocabulary = choose(count_tokens(corpus(), 128), 128, {2})
    assert not vocabulary.d2t.any() and vocabulary.t2d.all() and vocabulary.coverage == 1.0


def test_sizes_that_cannot_be() -> None:
    counts = count_tokens(corpus(), 128)
    with pytest.raises(UserError, match="draft vocabulary of 200 is larger than the target's 128: give at most 128."):
        choose(counts, 200, {2})
    with pytest.raises(
        UserError, match="draft vocabulary of 2 is smaller than the 3 end and template tokens .* give at least 3."
    ):
        choose(counts, 2, {0, 1, 2})
    with pytest.raises(UserError, match="draft vocabulary of 0 is smaller"):
        choose(counts, 0, [])


def test_a_token_beyond_the_vocabulary() -> None:
    with pytest.raises(UserError, match="token 50 is beyond the target's 50 tokens: use the target's own tokenizer"):
        count_tokens(corpus(), 50)
    assert choose(torch.ones(8, dtype=torch.int64), 2, {7, 300}).target_ids.tolist() == [0, 7]


def test_special_ids_are_the_ends_and_what_the_template_writes(tiny_tokenizer_factory: Any) -> None:
    assert special_ids(tiny_tokenizer_factory("strict"), {2}) == {1, 2}
    assert special_ids(tiny_tokenizer_factory("plain"), {0}) == {0, 1, 2}
    assert special_ids(tiny_tokenizer_factory("none"), {2}) == {2}
