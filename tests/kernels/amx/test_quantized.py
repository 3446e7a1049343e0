"""Products on tiles, emulated where there are none, give the bits of the other kernels, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lmkit.kernels.cpu import isa, quantized
from lmkit.kernels.ops import Norm
from lmkit.qtensor import int_scheme, quantize

ROWS = (5, 16, 33, 48)  # a partial tile, a whole one, both, whole ones


@pytest.mark.parametrize(
    ("bits", "group_size", "outputs", "inputs", "gated", "scales"),
    [
        (4, 128, 70, 1300, False, torch.float16),  # an odd number of groups, and inputs that fill no group
        (4, 128, 256, 512, True, torch.float32),
        (4, 32, 64, 160, False, torch.float16),  # half tiles of inputs
        (4, 96, 64, 500, False, torch.float32),
        (4, 64, 130, 640, False, torch.float16),
        (4, 256, 64, 700, False, torch.float16),
        (4, -1, 64, 1300, False, torch.float32),
        (8, -1, 140, 1300, False, torch.float16),
        (8, 128, 128, 400, True, torch.float16),
        (8, 32, 64, 96, False, torch.float32),
        (8, 1056, 64, 1500, False, torch.float16),  # a group in three passes of half tiles
    ],
)
def test_bits_are_those_of_the_other_kernels(
    bits: int, group_size: int, outputs: int, inputs: int, gated: bool, scales: torch.dtype
) -> None:
    torch.manual_seed(5)
    weight = quantize(torch.randn(outputs, inputs) + 0.3, int_scheme(bits, group_size, symmetric=False))
    weight = replace(weight, scales=weight.scales.to(scales))
    activation = "silu" if gated else None
    levels = (isa.host(), isa.named("avx512_vnni")) if isa.host().tiles else (isa.named("amx+emulated"), isa.host())
    kernels = [quantized.implementation(level, bits) for level in levels]
    x, bias, norm = torch.randn(max(ROWS), inputs), torch.randn(outputs), Norm(torch.rand(inputs), 1e-5)
    x[3] = 0
    for rows in ROWS:
        given: Any = (bias, norm) if rows % 2 else (None, None)
        got, expected = (kernel(x[:rows], kernel.pack(weight, activation), *given) for kernel in kernels)
        assert torch.equal(got, expected), rows
