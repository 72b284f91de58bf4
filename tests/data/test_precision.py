import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.precision import BLOCK, DTYPES, bytes_per_token, dequantize, group_size, hadamard, narrow, quantize, widen
from draftsmith.errors import UserError
from draftsmith.target import Features

HIDDEN = 96
GROUP = 32  # what group_size makes of it
ERROR = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}  # of a number, relative


def states(*shape: int, massive: float = 1.0) -> torch.Tensor:
    """Normal numbers, and in one dim of one token a massive activation."""
    draw = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    if draw.numel():
        draw[0, 3] = massive
    return draw


def back(states: torch.Tensor, group: int) -> torch.Tensor:
    return dequantize(*quantize(states, group), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("massive", [1.0, 1e4])
def test_round_trip_within_the_dtypes_error(dtype: str, massive: float) -> None:
    features = Features(states(70, 2 * HIDDEN, massive=massive), states(70, HIDDEN))
    packed = narrow(features, dtype, GROUP, "row 0")
    found = widen(packed, torch.float32)
    for ours, true in ((found.taps, features.taps), (found.last, features.last)):
        assert ours.dtype == torch.float32 and ours.shape == true.shape
        if dtype == "int8":
            assert ((ours - true).norm(dim=-1) <= 0.007 * true.norm(dim=-1)).all()
        else:
            assert ((ours - true).abs() <= true.abs() * ERROR[dtype] + 1e-7).all()
    kept = sum(tensor.nbytes for tensor in packed.values())
    assert kept == 70 * bytes_per_token(HIDDEN, 2, dtype)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32), st.integers(-36, 36).map(lambda power: 10.0**power))
def test_int8_is_off_by_at_most_half_a_step_at_any_magnitude(numbers: list[float], scale: float) -> None:
    true = (torch.tensor(numbers, dtype=torch.float64) * scale).float().reshape(2, 16)
    whole, scales = quantize(true, 8)
    assert whole.dtype == torch.int8 and whole.shape == (2, 16) and scales.shape == (2, 2)
    norm = true.double().unflatten(-1, (2, 8)).norm(dim=-1)
    error = (dequantize(whole, scales, torch.float32).double() - true.double()).unflatten(-1, (2, 8)).norm(dim=-1)
    assert (error <= norm * 8**0.5 / 254 * 1.005 + 1e-36).all()


@pytest.mark.parametrize("size", [1, 2, 32, 64])
def test_the_turn_is_its_own_inverse_and_spreads_a_spike_evenly(size: int) -> None:
    turn = hadamard(size, torch.device("cpu"))
    torch.testing.assert_close(turn @ turn, torch.eye(size))
    assert turn.abs().unique().tolist() == pytest.approx([size**-0.5])


def test_a_massive_activation_stays_in_its_own_group_and_token() -> None:
    calm, massive = states(4, 128), states(4, 128, massive=1e5)
    error = (back(massive, 64) - massive).abs()
    untouched = (back(calm, 64) - calm).abs()
    assert torch.equal(error[1:], untouched[1:]) and torch.equal(error[0, 64:], untouched[0, 64:])
    assert error.isfinite().all() and error[0, :64].norm() < 0.007 * 1e5


def test_many_tokens_are_packed_as_few_are() -> None:
    many = states(2 * BLOCK // 64 + 5, 64)  # more than are worked on at once
    whole, scales = quantize(many, 64)
    few = quantize(many[-7:], 64)
    assert torch.equal(whole[-7:], few[0]) and torch.equal(scales[-7:], few[1])
    torch.testing.assert_close(back(many, 64)[-7:], back(many[-7:], 64))


def test_outliers_cost_less_than_plain_rounding_would() -> None:
    outlying = states(200, 64)
    outlying[:, ::40] *= 30  # the same few dims of every token, as in real targets
    error = (back(outlying, 64) - outlying).norm()
    scales = outlying.abs().amax(-1, keepdim=True) / 127
    plain = ((outlying / scales).round() * scales - outlying).norm()
    assert error < 0.5 * plain


@pytest.mark.parametrize("zeros", [0.0, -0.0, 1e-45])
def test_rows_of_nothing_stay_nothing(zeros: float) -> None:
    found = back(torch.full((3, 8), zeros), 4)
    assert found.abs().max() < 1e-38 and found.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, HIDDEN), (5, 0)])
def test_no_tokens_and_no_taps(dtype: str, shape: tuple[int, int]) -> None:
    time = shape[0]
    back = widen(narrow(Features(states(*shape), states(time, HIDDEN)), dtype, GROUP, "row 0"), torch.bfloat16)
    assert back.taps.shape == shape and back.last.shape == (time, HIDDEN) and back.taps.dtype == torch.bfloat16


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_is_a_copy(source: torch.dtype, dtype: str) -> None:
    features = Features(states(3, HIDDEN).to(source), states(3, HIDDEN).to(source))
    packed = narrow(features, dtype, GROUP, "row 0")
    before = widen(packed, torch.float32)
    features.taps.zero_()
    features.last.zero_()
    assert torch.equal(widen(packed, torch.float32).taps, before.taps) and before.taps.any()
    widen(packed, DTYPES[dtype] if dtype != "int8" else torch.float32).taps.zero_()
    assert torch.equal(widen(packed, torch.float32).taps, before.taps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["taps", "last"])
def test_states_that_are_not_finite_are_refused(dtype: str, bad: float, where: str) -> None:
    features = Features(states(3, HIDDEN), states(3, HIDDEN))
    getattr(features, where)[2, 5] = bad
    with pytest.raises(UserError, match="^row 7 holds NaN or infinity: load the target in bfloat16 or float32, or leave"):
        narrow(features, dtype, GROUP, "row 7")


@pytest.mark.parametrize("value", [70_000.0, -70_000.0])
def test_float16_overflow_is_refused_and_the_other_dtypes_hold_it(value: float) -> None:
    features = Features(states(3, HIDDEN, massive=value), states(3, HIDDEN))
    with pytest.raises(UserError, match="^row 7 reaches 70000, and float16 ends at 65504: use bfloat16.$"):
        narrow(features, "float16", GROUP, "row 7")
    with pytest.raises(UserError, match="^row 7 reaches 1e.37, and int8 ends at 5.31691e.36: use bfloat16.$"):
        narrow(Features(states(3, HIDDEN, massive=1e37), states(3, HIDDEN)), "int8", GROUP, "row 7")
    for dtype in ("float32", "bfloat16", "int8"):
        back = widen(narrow(features, dtype, GROUP, "row 7"), torch.float32)
        assert back.taps[0, 3].item() == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("hidden", [576, 2048, 2880, 3584, 4096, 5120, 8192])
def test_int8_takes_at_most_52_of_100_bytes_of_bfloat16(hidden: int) -> None:
    peers = 4 * hidden * 2  # three taps and the last state in bfloat16
    assert bytes_per_token(hidden, 3, "bfloat16") == peers
    assert bytes_per_token(hidden, 3, "int8") <= 0.52 * peers
    assert hidden % group_size(hidden) == 0 and group_size(HIDDEN) == GROUP
