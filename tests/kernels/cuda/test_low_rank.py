"""The kernels of adapters against their references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lmkit.kernels import low_rank_ops, ops
from lmkit.kernels.cuda import low_rank
from lmkit.kernels.reference import low_rank as reference
from lmkit.low_rank import AdapterRows, Columns, LowRank, LowRanks

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
COUNT = 6


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    before = low_rank_ops.add_low_rank.fallbacks.total() + low_rank_ops.gated_panels.fallbacks.total()
    yield
    assert low_rank_ops.add_low_rank.fallbacks.total() + low_rank_ops.gated_panels.fallbacks.total() == before


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_rows_by_adapter(device: str, tokens: int) -> None:
    numbers = torch.randint(-1, COUNT, (tokens,), generator=torch.Generator().manual_seed(tokens)).int()
    order = low_rank.rows_by_adapter(numbers.to(device), COUNT).cpu()
    assert sorted(order.tolist()) == list(range(tokens))
    found = numbers[order.long()].tolist()
    assert found == sorted(found, key=lambda number: number % (COUNT + 1))  # -1 comes last


def additions(inputs: int, outputs: int, half: torch.dtype, device: str) -> tuple[LowRanks, LowRanks]:
    """Of ranks 1 and 20 with numbers of both types, on the device and not. Other adapters do not change this linear."""
    generator, there, here = torch.Generator().manual_seed(inputs), LowRanks(COUNT, device), LowRanks(COUNT)
    for number, rank, dtype in ((0, 1, half), (3, 20, F32), (5, 9, half)):
        a = (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(dtype)
        b = torch.randn(rank, outputs, generator=generator).to(dtype)
        here.set(number, LowRank(a, b, 0.7))
        there.set(number, LowRank(a.to(device), b.to(device), 0.7))
    return there, here


def added(x: Tensor, y: Tensor, numbers: Tensor, of: LowRanks, columns: Columns) -> Tensor:
    out = y.clone()
    rows = AdapterRows(numbers, low_rank.rows_by_adapter(numbers, COUNT))
    low_rank.add_low_rank(x, rows, [(of, columns)])(out)
    return out


@pytest.mark.parametrize(("given", "result", "half"), [(F16, F16, F16), (BF16, F32, BF16), (F32, F32, F16)])
@pytest.mark.parametrize(("inputs", "columns"), [
    (64, Columns(0, 48, 48, 48)), (70, Columns(5, 33, 33, 33)), (520, Columns(8, 8, 16, 300)),
])  # fmt: skip
def test_add_low_rank(
    device: str, given: torch.dtype, result: torch.dtype, half: torch.dtype, inputs: int, columns: Columns
) -> None:
    there, here = additions(inputs, columns.size, half, device)
    numbers = torch.tensor([3, -1, 0, 3, 1, 0, 5, *[3] * 11, -1, 5], dtype=torch.int32)
    tokens, generator = len(numbers), torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 2 * inputs, generator=generator).to(given)[:, :inputs]  # rows with a stride
    y = torch.randn(tokens, 620, generator=generator).to(result)
    got = added(x.to(device), y.to(device), numbers.to(device), there, columns).cpu()
    want = y.float().clone()
    reference.add_low_rank(x, AdapterRows(numbers), [(here, columns)])(want)
    step = {F32: 1e-4, F16: 2**-10, BF16: 2**-7}[result]
    torch.testing.assert_close(got.float(), want, rtol=step, atol=1e-4)
    unchanged = (numbers == -1) | (numbers == 1)
    assert torch.equal(got[unchanged], y[unchanged])
    assert not torch.equal(got[numbers == 5], y[numbers == 5])
    for row in (0, 6, 12):  # whatever rows stand beside it
        one = slice(row, row + 1)
        alone = added(x[one].to(device), y[one].to(device), numbers[one].to(device), there, columns)
        assert torch.equal(alone[0].cpu(), got[row])


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize(("given", "result"), [(F32, F16), (BF16, BF16), (F32, F32)])
@pytest.mark.parametrize(("width", "size"), [(8, 300), (8, 12), (33, 33)])
def test_gated_panels(
    device: str, activation: str, given: torch.dtype, result: torch.dtype, width: int, size: int
) -> None:
    gate_up = torch.randn(3, 2 * width * -(-size // width), generator=torch.Generator().manual_seed(1)) * 3
    gate_up = gate_up.to(given)
    got = low_rank.gated_panels(gate_up.to(device), activation, width, size, result).cpu()
    want = reference.gated_panels(gate_up.float(), activation, width, size)
    assert got.dtype == result
    step = {F32: 1e-5, F16: 2**-10, BF16: 2**-7}[result]
    torch.testing.assert_close(got.float(), want, rtol=step, atol=step)
