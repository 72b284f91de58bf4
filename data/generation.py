"""How the target goes on from a batch of prompts: token ids in, token ids and their text out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ..sampling import Sampling
from ..target import Target
from .template import letters_behind

CONTEXT = 8  # prompt tokens that a decoder sees before the first written one: enough to know whether it opens the text


@dataclass(frozen=True)
class Continuation:
    """What the target wrote after a prompt: its ``ids`` without the one that ends the text, and whether it ``ended`` it."""

    ids: list[int]
    ended: bool


@torch.inference_mode()
def continue_batch(target: Target, prompts: Sequence[list[int]], sampling: Sampling, limit: int) -> list[Continuation]:
    """Continue each prompt by at most ``limit`` tokens, left-padded in one batch; in the prompts' order.

    Draws from torch's global generator. Only ``sampling`` shapes the choice: the penalties and cuts that a model's own
    generation config may hold are set aside. A text ends at the first of ``target.eos_ids``.
    """
    width, pad = max(map(len, prompts)), min(target.eos_ids, default=0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=target.device)
    chosen: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    ends = sorted(target.eos_ids) or None
    with generating(target.model, GenerationConfig(max_new_tokens=limit, eos_token_id=ends, pad_token_id=pad, **chosen)):
        written = target.model.generate(ids, attention_mask=mask)[:, width:]
    return [_until_the_end(row, target.eos_ids) for row in written.tolist()]


@contextmanager
def generating(model: Any, config: GenerationConfig) -> Iterator[None]:
    """``config`` in place of the model's own, which generate would otherwise fill in wherever ours says nothing."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _until_the_end(row: list[int], ends: frozenset[int]) -> Continuation:
    end = next((i for i, token in enumerate(row) if token in ends), None)
    return Continuation(row[:end], end is not None)


def text_after(prompt: Sequence[int], ids: list[int], tokenizer: Any) -> str:
    """The text of ``ids`` as it stands behind the prompt, special tokens and outer whitespace included.

    Some tokenizers drop the space before the first word of what they decode, so the prompt's last tokens are decoded too.
    """
    return letters_behind(list(prompt[-CONTEXT:]), ids, tokenizer)
