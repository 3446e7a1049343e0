"""Products of a calibration equal those in float64, as far as their numbers allow."""

from __future__ import annotations

import pytest
import torch

from lmkit.quant.layer.products import SHORT_TOKENS, add_product, add_square, mirror, times

ERRORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("width", [3, 40])  # fewer columns than bands, and more
def test_sums_over_tokens(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SHORT_TOKENS + 100, size, generator=generator).to(dtype) for size in (width, 24))
    square, product = torch.ones(width, width), torch.ones(width, 24)
    for part in (slice(0, 60), slice(60, None)):
        add_square(square, x[part])
        add_product(product, x[part], y[part])
    mirror(square)
    for found, other in ((square, x), (product, y)):
        exact = 1 + x.double().T @ other.double()
        assert float((found - exact).abs().max() / exact.abs().max()) < ERRORS[dtype]
    assert torch.equal(square, square.T)


@pytest.mark.parametrize("dtype", ERRORS)
def test_times(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 32, generator=generator), torch.randn(5, 32, generator=generator)
    found, exact = times(x, weight, dtype), x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max() / exact.abs().max()) < ERRORS[dtype]
