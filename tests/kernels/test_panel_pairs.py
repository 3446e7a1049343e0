"""One to three rows take panels in pairs, and get the bits that they have in a batch."""

from __future__ import annotations

import pytest
import torch

from lmkit.kernels.cpu import dense, isa, threads, tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_bits_are_those_of_a_batch(dtype: torch.dtype, activation: str | None) -> None:
    """Of an odd number of panels in a task, and of inputs in several chunks."""
    torch.manual_seed(5)
    level, inputs = isa.host(), 777
    panels = dense.PAIRED_PANELS * threads.num_threads() + 1
    kernel = dense.dense_implementation(level)
    packed = kernel.pack(torch.randn(2 * panels * level.float_tile, inputs).to(dtype), activation)
    x = torch.randn(9, inputs)
    whole = kernel(x, packed, None)
    assert tiles.pair_rows(level)[0] < len(x)
    for count in (1, 2, 3, 4):
        assert torch.equal(kernel(x[:count], packed, None), whole[:count])
