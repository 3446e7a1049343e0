"""quantize and dequantize against the definition, element by element, and the properties that others rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.qtensor import QTensor, QuantScheme, codes_for, dequantize, float8_scheme, grid, int_scheme, quantize

SMALLEST = 2.0**-14  # the smallest normal float16

schemes = st.builds(int_scheme, st.sampled_from([4, 8]), st.sampled_from([-1, 1, 3, 8, 32]), st.booleans())
# Groups of every kind: mixed, one sign, constant, zero, tiny (below the smallest scale), with an outlier.
elements = st.one_of(
    st.sampled_from([0.0, 1e-7, -1e-7, 1e4, 0.5]),
    st.floats(-2, 2, width=32),
    st.floats(-1e5, 1e5, width=32),
)
weights = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=elements).map(
    torch.from_numpy
)


def naive(q: QTensor, row: int, column: int) -> tuple[float, int, int]:
    """(scale, zero, code) of one element."""
    size = q.codes.shape[1] if q.scheme.group_size == -1 else q.scheme.group_size
    group = column // size
    return float(q.scales[row, group]), int(q.zeros[row, group]), int(q.codes[row, column])


@settings(max_examples=40, deadline=None)
@given(weights, schemes)
def test_error_is_at_most_half_a_step(weight: torch.Tensor, scheme: QuantScheme) -> None:
    q = quantize(weight, scheme)
    assert q.scheme == scheme
    assert q.codes.shape == weight.shape
    assert q.codes.dtype == q.zeros.dtype == torch.uint8
    assert q.scales.dtype == torch.float16
    assert q.scales.shape == q.zeros.shape == (weight.shape[0], scheme.num_groups(weight.shape[1]))
    restored = dequantize(q)
    assert restored.dtype == torch.float32
    for (row, column), value in np.ndenumerate(weight.numpy()):
        scale, zero, code = naive(q, row, column)
        assert SMALLEST <= scale < math.inf
        assert 0 <= code <= scheme.max_code
        assert 0 <= zero <= scheme.max_code
        assert not scheme.symmetric or zero == 1 << (scheme.bits - 1)
        assert float(restored[row, column]) == np.float32((code - zero) * scale)
        # The float16 rounding of the scale moves the grid's end by at most max_code * 2^-11 steps.
        slack = scheme.max_code * 2.0**-11 + 1e-4
        assert abs(float(restored[row, column]) - float(value)) <= scale * (0.5 + slack)
        if value == 0:
            assert restored[row, column] == 0


@settings(max_examples=40, deadline=None)
@given(weights, schemes)
def test_grid_is_the_definition(weight: torch.Tensor, scheme: QuantScheme) -> None:
    q = quantize(weight, scheme)
    size = weight.shape[1] if scheme.group_size == -1 else scheme.group_size
    for (row, column), value in np.ndenumerate(weight.numpy()):
        group = weight.numpy()[row, column // size * size :][:size]
        low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
        if scheme.symmetric:
            high = max(-low, high)
            low = -high
        scale = max(np.float16((high - low) / np.float32(scheme.max_code)), np.float16(SMALLEST))
        steps = np.float32(scale)
        zero = 1 << (scheme.bits - 1) if scheme.symmetric else int(np.clip(np.rint(-low / steps), 0, scheme.max_code))
        code = int(np.clip(np.rint(value / steps) + zero, 0, scheme.max_code))
        assert naive(q, row, column) == (float(scale), zero, code)


@settings(max_examples=30, deadline=None)
@given(weights, schemes, st.randoms(use_true_random=False))
def test_rows_are_independent(weight: torch.Tensor, scheme: QuantScheme, random: object) -> None:
    order = list(range(weight.shape[0]))
    random.shuffle(order)  # type: ignore[attr-defined]
    whole, permuted = quantize(weight, scheme), quantize(weight[order], scheme)
    assert torch.equal(whole.codes[order], permuted.codes)
    assert torch.equal(whole.scales[order], permuted.scales)
    assert torch.equal(whole.zeros[order], permuted.zeros)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(-3, 3), schemes)
def test_powers_of_two_scale_only_the_scale(seed: int, power: int, scheme: QuantScheme) -> None:
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)) + 0.5
    # Away from the smallest scale, which an almost constant group of one would meet.
    weight = weight.sign() * weight.abs().clamp(min=0.25) * 4
    q, scaled = quantize(weight, scheme), quantize(weight * 2.0**power, scheme)
    assert torch.equal(q.codes, scaled.codes)
    assert torch.equal(q.zeros, scaled.zeros)
    assert torch.equal(q.scales * 2.0**power, scaled.scales)


@settings(max_examples=30, deadline=None)
@given(weights, schemes)
def test_dequantized_weights_keep_their_codes(weight: torch.Tensor, scheme: QuantScheme) -> None:
    q = quantize(weight, scheme)
    assert torch.equal(codes_for(dequantize(q), q.scales, q.zeros, scheme), q.codes)


def test_known_answer() -> None:
    weight = torch.tensor([[-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1.0]])
    q = quantize(weight, int_scheme(4, 8))
    assert q.codes.tolist() == [[0, 2, 4, 6, 8, 10, 12, 15]]
    assert q.zeros.tolist() == [[6]]
    assert float(q.scales[0, 0]) == float(np.float16(1.75 / 15))
    assert float(dequantize(q)[0, 7]) == pytest.approx(1.0497, abs=1e-4)


def test_symmetric_known_answer() -> None:
    q = quantize(torch.tensor([[-1.5, 0.0, 0.75, 1.5]]), int_scheme(4, -1, symmetric=True))
    assert float(q.scales[0, 0]) == float(np.float16(0.2))
    assert q.codes.tolist() == [[0, 8, 12, 15]]


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_of_one_sign_do_not_saturate(sign: int) -> None:
    weight = sign * torch.linspace(10, 11, 16)[None]  # far from zero: a grid of [10, 11] could not hold it
    q = quantize(weight, int_scheme(4, 16))
    assert (dequantize(q) - weight).abs().max() <= float(q.scales.max()) * 0.51


def test_short_last_group_is_a_group_of_its_own() -> None:
    weight = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) + 3
    whole = quantize(weight, int_scheme(4, 16))
    parts = quantize(weight[:, :16], int_scheme(4, -1)), quantize(weight[:, 16:], int_scheme(4, -1))
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts], 1))
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts], 1))
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts], 1))


@settings(max_examples=40, deadline=None)
@given(weights, schemes, st.floats(0.1, 1))
def test_clip_replaces_the_range(weight: torch.Tensor, scheme: QuantScheme, shrink: float) -> None:
    size = weight.shape[1] if scheme.group_size == -1 else scheme.group_size
    groups = weight.split(size, dim=1)
    low = torch.stack([group.amin(1) for group in groups], 1) * shrink
    high = torch.stack([group.amax(1) for group in groups], 1) * shrink
    wide = [bound.repeat_interleave(size, 1)[:, : weight.shape[1]] for bound in (low, high)]
    clipped, clamped = quantize(weight, scheme, clip=(low, high)), quantize(weight.clamp(*wide), scheme)
    assert torch.equal(clipped.scales, clamped.scales)
    assert torch.equal(clipped.zeros, clamped.zeros)
    inside = (weight >= wide[0]) & (weight <= wide[1])
    assert torch.equal(clipped.codes[inside], clamped.codes[inside])
    error, other = ((dequantize(q) - weight).abs() for q in (clipped, clamped))
    assert (error <= other).all()


def test_candidates_broadcast() -> None:
    scheme = int_scheme(4, 8)
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    ranges = torch.rand(5, 4, 2, generator=torch.Generator().manual_seed(2)) + 0.1
    scales, zeros = grid(weight, scheme, (-ranges, ranges))
    codes = codes_for(weight, scales, zeros, scheme)
    assert codes.shape == (5, 4, 16)
    for i in range(5):
        assert torch.equal(codes[i], quantize(weight, scheme, clip=(-ranges[i], ranges[i])).codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(2, 32).to(dtype)
    assert torch.equal(quantize(weight, int_scheme(4, 32)).codes, quantize(weight.float(), int_scheme(4, 32)).codes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(value: float) -> None:
    weight = torch.ones(3, 40)
    weight[1, 37] = value
    with pytest.raises(CheckpointError, match=r"\[1, 37\]"):
        quantize(weight, int_scheme(4, 16))
    clip = (-torch.ones(3, 3), torch.ones(3, 3))
    with pytest.raises(CheckpointError, match=r"\[1, 37\]"):
        quantize(weight, int_scheme(4, 16), clip=clip)


@pytest.mark.parametrize("value", [1e6, 3e38])
def test_refuses_what_no_float16_scale_reaches(value: float) -> None:
    with pytest.raises(UnsupportedError, match="float16"):
        quantize(torch.tensor([[value, -value]]), int_scheme(4, -1))
    assert dequantize(quantize(torch.tensor([[9e5]]), int_scheme(4, -1)))[0, 0] == pytest.approx(9e5, rel=1e-3)


FLOAT8 = [float8_scheme(size, rows) for size, rows in ((-1, 1), (-1, -1), (128, 128))]


@pytest.mark.parametrize("scheme", FLOAT8)
def test_float8_keeps_the_largest_and_errs_by_a_sixteenth_at_most(scheme: QuantScheme) -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.rand(200, 1)
    q = quantize(weight, scheme)
    assert q.scales.shape == (scheme.num_row_groups(200), scheme.num_groups(300))
    restored = dequantize(q)
    assert float(restored.abs().max()) == pytest.approx(float(weight.abs().max()), rel=1e-6)
    assert ((restored - weight).abs() <= weight.abs() / 16 + q.scales.max() * 2**-10).all()
    assert not dequantize(quantize(torch.zeros(4, 4), scheme)).any()
