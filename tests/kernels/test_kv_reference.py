"""What the oracle of the KV cache promises: how far codes are from what they stand for, and a rotation that is one."""

from __future__ import annotations

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import ops
from lmkit.kernels.reference.attention import rounded_queries, small_query_limit
from lmkit.kernels.reference.kv import hadamard, numbers_of_codes, packed_codes, read_blocks
from lmkit.kv_dtype import FP8, INT2, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests.kernels.cases import edge_vectors


def stored(x: torch.Tensor, dtype: KVDtype, name: str = "reference") -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, heads, D] as it is read back, and the scale of each token and head."""
    kv = allocate_kv(1, x.shape[1], len(x), x.shape[2], (dtype, dtype))
    ops.kv_append.named(name)(x, x, kv.k, kv.v, torch.arange(len(x)).int())
    return read_blocks(kv.k, torch.tensor([0]), len(x)).transpose(0, 1), kv.k.params[0, :, :, 0].T.float()


@pytest.mark.parametrize("dtype", [INT8, INT4], ids=str)
def test_integers_err_by_half_a_step(dtype: KVDtype) -> None:
    torch.manual_seed(0)
    x = edge_vectors(40, 2, 64, narrow=True)
    back, scale = stored(x, dtype)
    assert bool(back.isfinite().all())
    # Minimum and scale are rounded to float16 first: 2^-11 of either end, or 2^-25 in each of at most 255 steps.
    slack = x.abs().amax(-1) * 2**-9 + 255 * 2**-25
    assert bool(((back - x).abs().amax(-1) <= scale / 2 + slack).all())


@pytest.mark.parametrize("dim", [2, 64, 128, 250, 256, 258, 512])
def test_queries_of_int4_keys_err_by_half_a_step_and_their_sums_fit_int16(dim: int) -> None:
    torch.manual_seed(0)
    limit = small_query_limit(dim)
    assert (limit == 127) == (dim <= 256)
    assert 2 * -(-dim // 32) * 15 * limit < 2**15  # so many products meet in one of 16 lanes
    x = torch.randn(30, 3, dim) * 10.0 ** torch.randint(-6, 6, (30, 3, 1))
    x[0] = 0
    rounded, step = rounded_queries(x), x.abs().amax(-1, keepdim=True) / limit
    assert bool(((rounded - x).abs() <= step * 0.5001).all())
    codes = rounded[1:] / step[1:]
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)
    assert bool((codes.abs().amax(-1) > limit - 0.01).all())


def test_fp8_errs_by_a_sixteenth() -> None:
    torch.manual_seed(0)
    x = edge_vectors(40, 2, 64, narrow=True)
    back, scale = stored(x, FP8)
    assert bool(back.isfinite().all())
    peak = x.abs().amax(-1)
    usable = peak > 448 * 2**-14  # below, float16 has no exact scale
    # three bits of mantissa, and a fixed step below 2^-6; the scale is rounded to float16
    bound = torch.maximum(x.abs() / 16, scale[..., None] * 2**-10) + peak[..., None] * 2**-10
    assert bool(((back - x).abs() <= bound)[usable].all())
    assert bool(((back - x).abs().amax(-1) <= peak + 1e-30)[~usable].all())


@pytest.mark.parametrize("dtype", [INT3, INT2], ids=str)
def test_codes_of_levels_are_the_nearest_and_lie_as_ops_says(dtype: KVDtype) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 1 << dtype.bits, (7, 2, 96), dtype=torch.uint8)
    data = packed_codes(codes, dtype)
    assert data.shape == (7, 2, dtype.columns(96))
    assert torch.equal(numbers_of_codes(data, dtype), torch.tensor(dtype.levels, dtype=torch.uint8)[codes.long()])
    for unit, i in ((0, 0), (1, 13), (2, 31)):  # by hand: code 32 unit + i
        row = data[3, 1, unit * dtype.columns(32) :].tolist()
        low = row[i % 8] >> i // 8 * 2 & 3
        assert low + (4 * (row[8 + i // 8] >> i % 8 & 1) if dtype.bits == 3 else 0) == codes[3, 1, 32 * unit + i]


@pytest.mark.parametrize(("dtype", "error"), [(INT3, 0.0349), (INT2, 0.1175)], ids=str)
def test_normal_rows_err_as_max_s_quantizer(dtype: KVDtype, error: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 2, 128) * torch.tensor([0.02, 300.0])[:, None]
    back, _ = stored(x, dtype)
    found = (back - x).square().mean((0, 2)) / x.square().mean((0, 2))
    assert bool(((found > 0.85 * error) & (found < error)).all())  # each row has its own unit and scale


def test_rows_of_levels_beside_nothing_and_beyond_float16() -> None:
    x = torch.zeros(3, 1, 32)
    x[1, 0, 5], x[2] = 1e6, torch.linspace(-1, 1, 32)
    back, scale = stored(x, INT3)
    assert torch.equal(back[0], x[0])
    assert bool(back.isfinite().all())
    assert bool((scale[1:] > 0).all())


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_row_of_levels_with_a_nan_is_nan(name: str) -> None:
    """And no other row."""
    x = torch.randn(3, 2, 32)
    x[1, 0, 7] = torch.nan
    back, _ = stored(x, INT3, name)
    assert torch.equal(back.isnan().any(-1), x.isnan().any(-1))


@pytest.mark.parametrize("dtype", [INT8, FP8, INT4], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -7.5, 448.0])
def test_constant_vectors(dtype: KVDtype, value: float) -> None:
    back, _ = stored(torch.full((1, 1, 16), value), dtype)
    assert torch.allclose(back, torch.tensor(value), rtol=2**-10)


@pytest.mark.parametrize("dim", [2, 64, 128])
def test_hadamard_is_orthonormal(dim: int) -> None:
    matrix = hadamard(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.abs(), torch.full((dim, dim), dim**-0.5))
    x = torch.randn(3, dim)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)
