"""Exact activations on tiles, emulated where there are none: what is exact is so, and bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels.cpu import dense, isa, threads, tiles
from lmkit.kernels.cpu.amx import dense as amx_dense
from lmkit.kernels.cpu.packed_dense import CODE_BITS
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme, quantize

LEVEL = isa.host() if isa.host().tiles else isa.named("amx+emulated")
SCHEMES = {  # by kind; None: a dense weight
    "bfloat16": (None,),
    "float16": (None,),
    tiles.CODES4: (int_scheme(4, 128), int_scheme(4, 96), int_scheme(4, -1)),
    tiles.CODES8: (int_scheme(8, 32), int_scheme(8, -1)),
    tiles.FLOAT8: (float8_scheme(128), float8_scheme(-1, 7)),
}
CASES = [
    pytest.param(kind, scheme, id=f"{kind}-{scheme.group_size if scheme else ''}")
    for kind, schemes in SCHEMES.items()
    for scheme in schemes
]
OUTPUTS, INPUTS = 70, 301  # three panels; an odd number of inputs, which fills no tile


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.configure(before)


def kernel(kind: str) -> Implementation:
    return dense.codes_implementation(LEVEL, kind) if kind in CODE_BITS else dense.dense_implementation(LEVEL)


def weight_of(kind: str, scheme: QuantScheme | None, outputs: int = OUTPUTS) -> Any:
    torch.manual_seed(6)
    weight = torch.randn(outputs, INPUTS) * torch.rand(outputs, 1)
    weight[0] *= 1e-5  # subnormal in float16
    return weight.to(getattr(torch, kind)) if scheme is None else quantize(weight, scheme)


def exactly(weight: Any) -> Tensor:
    return dequantize(weight).double() if isinstance(weight, QTensor) else weight.double()


def halves(x: Tensor) -> Tensor:
    """x as the kernel sees it."""
    high = x.bfloat16().float()
    return high.double() + (x - high).bfloat16().double()


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_only_activations_are_rounded(kind: str, scheme: QuantScheme | None) -> None:
    weight, impl = weight_of(kind, scheme), kernel(kind)
    x = torch.randn(20, INPUTS) * 10 ** (torch.rand(20, 1) * 4 - 2)
    seen = halves(x)
    assert float(((seen - x.double()) / x.double()).abs().max()) <= 2.0**-17
    got, expected = impl(x, impl.pack(weight), None).double(), seen @ exactly(weight).T
    assert float(((got - expected).abs().amax(1) / expected.abs().amax(1)).max()) < 1e-6


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_bits_depend_on_no_other_row_block_span_or_thread(
    kind: str, scheme: QuantScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl, x, bias = kernel(kind), torch.randn(75, INPUTS), torch.randn(OUTPUTS)
    packed = impl.pack(weight_of(kind, scheme))
    assert amx_dense.fits(packed)
    together = impl(x, packed, bias)
    for start, count in ((0, 1), (7, 2), (3, 8), (10, 15), (20, 16), (1, 17), (30, 40)):
        rows = slice(start, start + count)
        assert torch.equal(impl(x[rows], packed, bias), together[rows]), (start, count)
    monkeypatch.setattr(amx_dense, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(amx_dense, "HALVES_BYTES", 1 << 14)  # 128 inputs of 32 tokens
    for num_threads in (1, 3):
        threads.configure(num_threads)
        assert torch.equal(impl(x, packed, bias), together)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", tiles.CODES4])
def test_gates_norms_and_strides(kind: str) -> None:
    """Against the float kernels of the same layout."""
    impl, other = kernel(kind), dense.dense_implementation(isa.named("avx512_vnni+emulated"))
    weight = weight_of(kind, SCHEMES[kind][0], 2 * OUTPUTS)
    wide, bias = torch.randn(21, 2 * INPUTS), torch.randn(2 * OUTPUTS)
    x, stream, scale = wide[:, INPUTS:], torch.randn(21, INPUTS), torch.rand(INPUTS)
    norms = [Norm(scale, 1e-5, stream.clone()) for _ in range(2)]
    got = impl(x, impl.pack(weight, "silu"), bias, norms[0])
    plain = exactly(weight).float()
    expected = other(x, other.pack(plain, "silu"), bias, norms[1])
    assert norms[0].residual is not None
    assert norms[1].residual is not None
    assert torch.equal(norms[0].residual, norms[1].residual)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_groups_that_fill_no_tile_keep_the_float_kernel() -> None:
    packed = kernel(tiles.FLOAT8).pack(weight_of(tiles.FLOAT8, float8_scheme(33)))
    assert not amx_dense.fits(packed)
    assert not amx_dense.fits(kernel("bfloat16").pack(torch.zeros(8, 8)))
