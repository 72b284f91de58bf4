"""From a row of logits to a row of probabilities, and from there to a token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy: the probability row is one-hot at the argmax.

    ``top_k`` 0 and ``top_p`` 1.0 switch the cuts off. The order is temperature, top-k, top-p, as in transformers and vLLM.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}: give 0 for greedy decoding or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a number above 0 and at most 1 (1 switches it off).")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give 0 to switch it off or a positive count.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Warp logits [..., V] into the probabilities [..., V] (float32) that tokens are drawn from.

    Top-p keeps the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al., 2019), so the
    best token always stays.
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        beyond = ranked.cumsum(-1) - ranked >= sampling.top_p  # the mass before this token is enough already
        probs = probs.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, generator: torch.Generator | None = None) -> int:
    """Draw one token id from a probability row [V]."""
    return int(torch.multinomial(probs, 1, generator=generator))
