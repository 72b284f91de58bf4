"""How hidden states are kept as numbers: cast to a float type, or rounded to int8 with scales of their own."""

import torch
from torch import Tensor

from ..errors import UserError
from ..target import Features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
SCALES = torch.bfloat16  # float16 ends at 65504 and fades out below 6e-5: a scale must follow a state wherever it goes
WIDEST = 128
STEPS = 127  # int8's range, kept symmetric
TINIEST = torch.finfo(torch.float32).tiny  # the scale of zeros


def group_size(hidden: int) -> int:
    """How many neighbouring dims share a scale: the largest divisor of ``hidden`` up to 128.

    Scales belong to a token, a tap and a group, so a massive activation coarsens its own group and nothing else.
    """
    return max(size for size in range(1, WIDEST + 1) if hidden % size == 0)


def bytes_per_token(hidden: int, n_taps: int, dtype: str) -> float:
    """Bytes that one token's taps and last state take in a store of this dtype."""
    numbers = (n_taps + 1) * hidden
    scales = numbers // group_size(hidden) * SCALES.itemsize if dtype == "int8" else 0
    return numbers * DTYPES[dtype].itemsize + scales


def pack(features: Features, dtype: str, group: int, what: str) -> dict[str, Tensor]:
    """States [time, ...] as the tensors a store keeps: ``taps`` and ``last``, under int8 with ``taps_scales``, ``last_scales``,
    in memory of their own.

    Raises UserError for NaN, infinity and what the dtype cannot hold; ``what`` names the states in it.
    """
    packed: dict[str, Tensor] = {}
    for name, states in (("taps", features.taps), ("last", features.last)):
        _refuse_unfit(states, dtype, what)
        if dtype == "int8":
            packed[name], packed[f"{name}_scales"] = quantize(states, group)
        else:
            packed[name] = states.to(DTYPES[dtype], copy=True)
    return packed


def unpack(packed: dict[str, Tensor], dtype: torch.dtype) -> Features:
    """The states of ``pack`` again, in ``dtype`` and in memory of their own."""
    states = []
    for name in ("taps", "last"):
        scales = packed.get(f"{name}_scales")
        kept = packed[name]
        states.append(kept.to(dtype, copy=True) if scales is None else dequantize(kept, scales).to(dtype))
    return Features(*states)


def quantize(states: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """States [time, dims] as int8 [time, dims] and scales [time, dims / group]; dims may be none.

    Symmetric, to the nearest step: off by at most half a scale, which is the group's largest magnitude / 127 to within 0.4 %.
    """
    groups = states.float().unflatten(-1, (-1, group))  # [time, groups, group]
    scales = (groups.abs().amax(-1) / STEPS).clamp_min(TINIEST).to(SCALES)
    whole = (groups / scales.float()[..., None]).round_().clamp_(-STEPS, STEPS)
    return whole.to(torch.int8).flatten(-2), scales


def dequantize(whole: Tensor, scales: Tensor) -> Tensor:
    """The float32 states [time, dims] of ``quantize``."""
    if not whole.numel():
        return whole.float()
    groups = whole.unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None]).flatten(-2)


def _refuse_unfit(states: Tensor, dtype: str, what: str) -> None:
    if not states.numel():
        return
    low, high = torch.aminmax(states)
    largest = torch.maximum(-low, high).item()  # NaN wins
    if largest != largest or largest == float("inf"):
        raise UserError(f"{what} holds NaN or infinity: load the target in bfloat16 or float32, or leave that row out.")
    if dtype != "int8" and largest > torch.finfo(DTYPES[dtype]).max:
        raise UserError(
            f"{what} reaches {largest:.0f}, and {dtype} ends at {torch.finfo(DTYPES[dtype]).max:.0f}: use bfloat16."
        )
