"""The kernels of adapters against their references."""

from __future__ import annotations

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import low_rank_ops, ops
from lmkit.kernels.cpu import low_rank, threads
from lmkit.kernels.cpu.workspace import Workspace
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
    kernel, reference = both(low_rank_ops.add_low_rank)
    got, want = y.clone(), y.clone()
    kernel(x, AdapterRows(numbers), [(panels, columns)])(got)
    reference(x, AdapterRows(numbers), [(additions, columns)])(want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[[1, 4]], y[[1, 4]])
    assert not torch.equal(got[[0]], y[[0]])
    for row in range(6):  # whatever rows stand beside it
        alone = y[row : row + 1].clone()
        kernel(x[row : row + 1], AdapterRows(numbers[row : row + 1]), [(panels, columns)])(alone)
        assert torch.equal(alone[0], got[row])
    panels.set(3, None)
    again = y.clone()
    kernel(x, AdapterRows(numbers), [(panels, columns)])(again)
    assert torch.equal(again[[0, 3]], y[[0, 3]])


@pytest.mark.parametrize("rows", [5, low_rank.ROWS + 7])
def test_linears_of_one_input_beside_other_work(rows: int) -> None:
    """One call for several, at once and in a captured program, for rows that are kept at a time and for more."""
    generator = torch.Generator().manual_seed(rows)
    places = [Columns(0, 100, 100, 100), Columns(100, 16, 32, 40), Columns(116, 16, 32, 40)]
    of_kernel, of_reference = ([(LowRanks(3), columns) for columns in places] for _ in range(2))
    for (panels, columns), (plain, _), numbers in zip(of_kernel, of_reference, [(0, 1), (1,), (0, 2)], strict=True):
        for number in numbers:
            a, b = (torch.randn(3 + number, size, generator=generator) / 8 for size in (70, columns.size))
            plain.set(number, LowRank(a, b, 0.5))
            panels.set(number, LowRank(a, b, 0.5).in_panels())
    numbers = torch.arange(rows, dtype=torch.int32) % 4 - 1
    x, y = torch.randn(rows, 70, generator=generator), torch.randn(rows, 200, generator=generator)
    kernel, reference = both(low_rank_ops.add_low_rank)
    want, at_once, captured = y.clone(), y.clone(), y.clone()
    reference(x, AdapterRows(numbers), of_reference)(want)
    kernel(x, AdapterRows(numbers), of_kernel)(at_once)
    torch.testing.assert_close(at_once, want, rtol=1e-4, atol=1e-4)
    workspace = Workspace(1 << 20)  # as long as the program
    with workspace.active(), threads.capturing() as program:
        kernel(x, AdapterRows(numbers), of_kernel)(captured)
    program.launch()
    assert torch.equal(captured, at_once)


@pytest.mark.parametrize("rows", [3, low_rank.ROWS + 1])
def test_gates_after_an_addition(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    gate_up, x = torch.randn(rows, 96, generator=generator), torch.randn(rows, 8, generator=generator)
    entry = LowRank(torch.randn(2, 8, generator=generator), torch.randn(2, 40, generator=generator), 1.0)
    parts = [(LowRanks(1), Columns(start, 16, 32, 40)) for start in (0, 16)]
    for additions, _ in parts:
        additions.set(0, entry.in_panels())
    numbers = torch.zeros(rows, dtype=torch.int32)
    numbers[1] = -1
    added, (add, _), (kernel, _) = gate_up.clone(), both(low_rank_ops.add_low_rank), both(low_rank_ops.gated_panels)
    add(x, AdapterRows(numbers), parts)(added)
    want, plain = kernel(added, "silu", 16, 40), kernel(gate_up, "silu", 16, 40)
    got = kernel(gate_up.clone(), "silu", 16, 40, add=add(x, AdapterRows(numbers), parts))
    assert torch.equal(got, want)
    assert torch.equal(got[1], plain[1])
    assert not torch.equal(got[0], plain[0])


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize(("width", "size"), [(16, 48), (32, 40), (16, 16)])
def test_gated_panels(activation: str, width: int, size: int) -> None:
    panels = -(-size // width)
    gate_up = torch.randn(3, 2 * width * panels, generator=torch.Generator().manual_seed(1)) * 3
    kernel, reference = both(low_rank_ops.gated_panels)
    got = kernel(gate_up, activation, width, size)
    torch.testing.assert_close(got, reference(gate_up, activation, width, size), rtol=1e-5, atol=1e-5)
