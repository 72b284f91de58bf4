import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.packed import DTYPES, bytes_per_token, dequantize, group_size, pack, quantize, unpack
from draftsmith.errors import UserError
from draftsmith.target import Features

HIDDEN = 96
ERROR = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}  # of a number, relative


def states(*shape: int, massive: float = 1.0) -> torch.Tensor:
    """Normal numbers, and in one dim of one token a massive activation."""
    draw = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    if draw.numel():
        draw[0, 3] = massive
    return draw


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_within_the_dtypes_error(dtype: str) -> None:
    features = Features(states(7, 2 * HIDDEN, massive=1e4), states(7, HIDDEN))
    packed = pack(features, dtype, group_size(HIDDEN), "row 0")
    back = unpack(packed, torch.float32)
    for ours, true in ((back.taps, features.taps), (back.last, features.last)):
        assert ours.dtype == torch.float32 and ours.shape == true.shape
        if dtype == "int8":
            groups = true.unflatten(-1, (-1, HIDDEN))
            bound = (groups.abs().amax(-1, keepdim=True) / 254 * 1.004).expand_as(groups).flatten(-2)
        else:
            bound = true.abs() * ERROR[dtype]
        assert ((ours - true).abs() <= bound + 1e-7).all()
    kept = sum(tensor.nbytes for tensor in packed.values())
    assert kept == 7 * bytes_per_token(HIDDEN, 2, dtype)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16),
    st.integers(-38, 38).map(lambda power: 10.0**power),
)
def test_int8_is_off_by_at_most_half_a_step_at_any_magnitude(numbers: list[float], scale: float) -> None:
    true = torch.tensor(numbers).mul(scale).clamp(-3e38, 3e38).reshape(2, 8)
    whole, scales = quantize(true, 4)
    assert whole.dtype == torch.int8 and whole.shape == (2, 8) and scales.shape == (2, 2)
    largest = true.unflatten(-1, (2, 4)).abs().amax(-1, keepdim=True)
    error = (dequantize(whole, scales) - true).unflatten(-1, (2, 4)).abs()
    assert (error.double() <= largest.double() / 254 * 1.004 + 1e-38).all()


def test_a_massive_activation_coarsens_its_own_group_and_token_alone() -> None:
    calm, massive = states(4, 256), states(4, 256, massive=1e5)
    error = (dequantize(*quantize(massive, 128)) - massive).abs()
    untouched = (dequantize(*quantize(calm, 128)) - calm).abs()
    assert torch.equal(error[1:], untouched[1:]) and torch.equal(error[0, 128:], untouched[0, 128:])
    assert error.isfinite().all() and 1 < error[0, :128].max() <= 1e5 / 254 * 1.004


@pytest.mark.parametrize("zeros", [0.0, -0.0, 1e-45])
def test_rows_of_nothing_stay_nothing(zeros: float) -> None:
    back = dequantize(*quantize(torch.full((3, 8), zeros), 4))
    assert back.abs().max() < 1e-38 and back.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, HIDDEN), (5, 0)])
def test_no_tokens_and_no_taps(dtype: str, shape: tuple[int, int]) -> None:
    time = shape[0]
    back = unpack(pack(Features(states(*shape), states(time, HIDDEN)), dtype, HIDDEN, "row 0"), torch.bfloat16)
    assert back.taps.shape == shape and back.last.shape == (time, HIDDEN) and back.taps.dtype == torch.bfloat16


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_is_a_copy(source: torch.dtype, dtype: str) -> None:
    features = Features(states(3, HIDDEN).to(source), states(3, HIDDEN).to(source))
    packed = pack(features, dtype, HIDDEN, "row 0")
    before = unpack(packed, torch.float32)
    features.taps.zero_()
    features.last.zero_()
    assert torch.equal(unpack(packed, torch.float32).taps, before.taps) and before.taps.any()
    unpack(packed, DTYPES[dtype] if dtype != "int8" else torch.float32).taps.zero_()
    assert torch.equal(unpack(packed, torch.float32).taps, before.taps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["taps", "last"])
def test_states_that_are_not_finite_are_refused(dtype: str, bad: float, where: str) -> None:
    features = Features(states(3, HIDDEN), states(3, HIDDEN))
    getattr(features, where)[2, 5] = bad
    with pytest.raises(UserError, match="^row 7 holds NaN or infinity: load the target in bfloat16 or float32, or leave"):
        pack(features, dtype, HIDDEN, "row 7")


@pytest.mark.parametrize("value", [70_000.0, -70_000.0])
def test_float16_overflow_is_refused_and_the_other_dtypes_hold_it(value: float) -> None:
    features = Features(states(3, HIDDEN, massive=value), states(3, HIDDEN))
    with pytest.raises(UserError, match="^row 7 reaches 70000, and float16 ends at 65504: use bfloat16.$"):
        pack(features, "float16", HIDDEN, "row 7")
    for dtype in ("float32", "bfloat16", "int8"):
        back = unpack(pack(features, dtype, HIDDEN, "row 7"), torch.float32)
        assert back.taps[0, 3].item() == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize("hidden", [576, 2048, 2880, 3584, 4096, 5120, 8192])
def test_int8_takes_at_most_52_of_100_bytes_of_bfloat16(hidden: int) -> None:
    peers = 4 * hidden * 2  # three taps and the last state in bfloat16
    assert bytes_per_token(hidden, 3, "bfloat16") == peers
    assert bytes_per_token(hidden, 3, "int8") <= 0.52 * peers
    assert hidden % group_size(hidden) == 0
