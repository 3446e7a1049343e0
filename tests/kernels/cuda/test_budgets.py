"""What kernels execute and move is what budgets.toml says: a change that doubles the sectors of a load fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lmkit.kernels.cuda.source import FOLDER
from tests.emulator.ptx.backend import PtxBackend
from tests.emulator.ptx.syntax import parse
from tests.emulator.ptx.traffic import KINDS, Moved, loaded_together
from tests.kernels.cuda import budgets, toolchain
from tests.kernels.cuda.budget_cases import CASES, QUICK
from tests.kernels.cuda.budgets import Budget

pytestmark = pytest.mark.skipif(
    toolchain.missing_nvrtc() is not None or shutil.which("g++") is None, reason="NVRTC and g++ are needed"
)


@pytest.fixture
def backend() -> Iterator[PtxBackend]:
    with budgets.counting_backend() as backend:
        yield backend


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in CASES]
)
def test_kernels_stay_within_their_budgets(backend: PtxBackend, name: str) -> None:
    """`python -m tests.kernels.cuda.budgets NAME` writes what is counted now."""
    found, table = budgets.counted(backend, name), budgets.read()[name]
    assert set(table) == set(found)
    beyond = [line for kernel, traffic in found.items() for line in table[kernel].beyond(traffic)]
    assert not beyond, "\n".join(beyond)


def test_every_file_has_a_budget() -> None:
    table = budgets.read()
    assert list(table) == list(CASES)
    assert {budget.file for kernels in table.values() for budget in kernels.values()} == {
        path.name for path in FOLDER.glob("*.cu")
    }


def test_waste_is_counted(backend: PtxBackend) -> None:
    """Of columns of a matrix, where each of 32 lanes takes 4 bytes of another row, and of one bank of shared memory."""
    text = """
.visible .entry mine(.param .u64 x, .param .u64 y)
{
.reg .b32 %r<4>;
.reg .b64 %rd<6>;
ld.param.u64 %rd1, [x];
ld.param.u64 %rd2, [y];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 128;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r2, [%rd4];
shl.b32 %r3, %r1, 7;
st.shared.u32 [%r3+1024], %r2;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd5, %rd2, %rd3;
st.global.u32 [%rd5], %r2;
ret;
}
"""
    with backend.counted() as launches:
        backend.run_ptx(text, "mine", 1, 32, [torch.zeros(32, 32), torch.zeros(32)], shared=4096)
    (traffic,) = launches
    assert [traffic.of(kind).waste for kind in KINDS] == [8, 1, 1, 32]
    assert traffic.of("loads").num_bytes == 128
    assert traffic.of("shared_stores").requests == 1
    assert traffic.instructions == 32 * 12
    before = Budget.of(traffic)
    assert (before.loads, before.shared_stores, before.in_flight) == ((32, 4), (32, 1), 32 * 4)
    assert before.beyond(traffic) == []
    less = replace(before, loads=(16, 4), shared_stores=(8, 1), instructions=100, in_flight=300)
    assert [line.split(": ")[1] for line in less.beyond(traffic)] == [
        "loads", "shared_stores", "instructions", "in_flight"
    ]  # fmt: skip
    assert "32 parts, 16 in the table, 4 are the least; line 11 wastes most" in less.beyond(traffic)[0]


def test_loads_before_a_use_are_in_flight_together() -> None:
    text = """
.visible .entry mine(.param .u64 x)
{
.reg .b32 %r<9>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [x];
ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
ld.global.nc.u16 %r5, [%rd1];
add.s32 %r6, %r1, 1;
ld.global.u32 %r7, [%rd1];
ld.global.u32 %r8, [%rd1+4];
ret;
}
"""
    entry = parse(text).entries["mine"]
    ran = {(line, "loads"): Moved() for line in range(20)}
    assert loaded_together(entry.statements, ran) == 18
    assert loaded_together(entry.statements, {}) == 0
