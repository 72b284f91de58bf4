"""How hidden states are kept as numbers: cast to a float type, or turned and rounded to int8 with scales of their own."""

import functools
import math

import torch
from torch import Tensor

from ..errors import UserError
from ..target import Features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
SCALES = torch.bfloat16  # float16 ends at 65504 and fades out below 6e-5: a scale must follow a state wherever it goes
WIDEST = 64
STEPS = 127  # int8's range, kept symmetric
BLOCK = 2**20  # numbers worked on at once: they stay in a processor's cache, which more than halves the time
TINIEST = torch.finfo(torch.float32).tiny  # the scale of zeros
LARGEST = {
    **{name: torch.finfo(dtype).max for name, dtype in DTYPES.items() if dtype.is_floating_point},
    "int8": torch.finfo(torch.float32).max / WIDEST,  # a group is summed up
}


def group_size(hidden: int) -> int:
    """How many neighbouring dims share a scale: the largest power of two up to 64 that divides ``hidden``."""
    return math.gcd(hidden, WIDEST)


def bytes_per_token(hidden: int, n_taps: int, dtype: str) -> float:
    """Bytes that one token's taps and last state take in a store of this dtype."""
    numbers = (n_taps + 1) * hidden
    scales = numbers // group_size(hidden) * SCALES.itemsize if dtype == "int8" else 0
    return numbers * DTYPES[dtype].itemsize + scales


def narrow(features: Features, dtype: str, group: int, what: str) -> dict[str, Tensor]:
    """States [time, ...] as the tensors a store keeps: ``taps`` and ``last``, under int8 with ``taps_scales``, ``last_scales``,
    in memory of their own.

    Raises UserError for NaN, infinity and what the dtype cannot hold; ``what`` names the states in it.
    """
    stored: dict[str, Tensor] = {}
    for name, states in (("taps", features.taps), ("last", features.last)):
        _refuse_unfit(states, dtype, what)
        if dtype == "int8":
            stored[name], stored[f"{name}_scales"] = quantize(states, group)
        else:
            stored[name] = states.to(DTYPES[dtype], copy=True)
    return stored


def widen(stored: dict[str, Tensor], dtype: torch.dtype) -> Features:
    """The states of ``narrow`` again, in ``dtype`` and in memory of their own."""
    states = []
    for name in ("taps", "last"):
        scales = stored.get(f"{name}_scales")
        kept = stored[name]
        states.append(kept.to(dtype, copy=True) if scales is None else dequantize(kept, scales, dtype))
    return Features(*states)


def quantize(states: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """States [time, dims] as int8 [time, dims] and scales [time, dims / group]; dims may be none.

    Each group is turned by a Hadamard matrix first, then divided by its scale and rounded to the nearest step. Hidden states
    have few dims that are far larger than the rest; turned, they are spread over their group, whose largest number is then
    little above its mean one, and so is the step. What is left of one token's group is off by at most sqrt(group) / 254 of
    the group's norm, and by a tenth of that as a rule.
    """
    blocks = [_quantize(block, group) for block in states.split(_tokens_at_once(states))]
    return torch.cat([whole for whole, _ in blocks]), torch.cat([scales for _, scales in blocks])


def _quantize(states: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = states.float().unflatten(-1, (-1, group)) @ hadamard(group, states.device)  # [time, groups, group]
    scales = (groups.abs().amax(-1) / STEPS).clamp_min(TINIEST).to(SCALES)
    whole = (groups / scales.float()[..., None]).round_().clamp_(-STEPS, STEPS)
    return whole.to(torch.int8).flatten(-2), scales


def dequantize(whole: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [time, dims] of ``quantize``, in ``dtype``."""
    states = torch.empty(whole.shape, dtype=dtype, device=whole.device)
    if states.numel():
        turn = hadamard(whole.shape[-1] // scales.shape[-1], whole.device)
        size = _tokens_at_once(whole)
        for block, kept, own in zip(states.split(size), whole.split(size), scales.split(size), strict=True):
            groups = kept.unflatten(-1, (own.shape[-1], -1)) * own.float()[..., None]  # [time, groups, group]
            block.copy_((groups @ turn).flatten(-2))
    return states


def _tokens_at_once(states: Tensor) -> int:
    return max(1, BLOCK // max(1, states.shape[-1]))


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The symmetric orthogonal matrix [size, size] of numbers +-1 / sqrt(size), its own inverse; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)


def _refuse_unfit(states: Tensor, dtype: str, what: str) -> None:
    if not states.numel():
        return
    low, high = torch.aminmax(states)
    largest = torch.maximum(-low, high).item()  # NaN wins
    if largest != largest or largest == float("inf"):
        raise UserError(f"{what} holds NaN or infinity: load the target in bfloat16 or float32, or leave that row out.")
    if largest > LARGEST[dtype]:
        raise UserError(f"{what} reaches {largest:g}, and {dtype} ends at {LARGEST[dtype]:g}: use bfloat16.")
