"""The kernels of adapters against their references."""

from __future__ import annotations

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import ops
from lmkit.kernels.registry import Implementation, Op
from lmkit.low_rank import DTYPES, AdapterRows, Columns, LowRank, LowRanks


def both(op: Op) -> tuple[Implementation, Implementation]:
    """(kernel, reference)"""
    found = {impl.name: impl for impl in op.implementations}
    return found["cpu"], found["reference"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "columns"), [
    (64, Columns(0, 48, 48, 48)), (70, Columns(5, 33, 33, 33)), (2048, Columns(16, 16, 32, 40)),
    (1, Columns(0, 1, 1, 1)), (1500, Columns(3, 700, 705, 1600)),
])  # fmt: skip
def test_add_low_rank(dtype: torch.dtype, inputs: int, columns: Columns) -> None:
    generator = torch.Generator().manual_seed(inputs)
    additions, panels = LowRanks(5), LowRanks(5)
    for number in (0, 3):
        a = (torch.randn(1 + 6 * number, inputs, generator=generator) / inputs**0.5).to(dtype)
        entry = LowRank(a, torch.randn(len(a), columns.size, generator=generator).to(dtype), 0.7)
        additions.set(number, entry)
        panels.set(number, entry.in_panels())
    numbers = torch.tensor([3, -1, 0, 3, 1, 0], dtype=torch.int32)
    x = torch.randn(6, 2 * inputs, generator=generator)[:, :inputs]  # rows with a stride
    y = torch.randn(6, 2200, generator=generator)
    kernel, reference = both(ops.add_low_rank)
    got, want = y.clone(), y.clone()
    kernel(x, got, AdapterRows(numbers), panels, columns)
    reference(x, want, AdapterRows(numbers), additions, columns)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[[1, 4]], y[[1, 4]])
    assert not torch.equal(got[[0]], y[[0]])
    for row in range(6):  # whatever rows stand beside it
        alone = y[row : row + 1].clone()
        kernel(x[row : row + 1], alone, AdapterRows(numbers[row : row + 1]), panels, columns)
        assert torch.equal(alone[0], got[row])
    panels.set(3, None)
    again = y.clone()
    kernel(x, again, AdapterRows(numbers), panels, columns)
    assert torch.equal(again[[0, 3]], y[[0, 3]])


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize(("width", "size"), [(16, 48), (32, 40), (16, 16)])
def test_gated_panels(activation: str, width: int, size: int) -> None:
    panels = -(-size // width)
    gate_up = torch.randn(3, 2 * width * panels, generator=torch.Generator().manual_seed(1)) * 3
    kernel, reference = both(ops.gated_panels)
    got = kernel(gate_up, activation, width, size)
    torch.testing.assert_close(got, reference(gate_up, activation, width, size), rtol=1e-5, atol=1e-5)
