"""What products allocate beside their operands and results, and what the memory plan counts for it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.kernels.cuda import gemm, gemm_pack, gemm_plan, gemm_table, gemm_wide, module, variants
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.cuda.gemm_wide import WidePlan
from lmkit.kernels.cuda.switches import Switches
from lmkit.qtensor import QTensor
from lmkit.turbo.engine import memory
from tests import emulator
from tests.kernels.cuda.test_linear import F16, INT4, weight


class Allocated(TorchDispatchMode):
    """Adds up the bytes of what torch.empty gives."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_bytes += out.nbytes if func._overloadpacket.__name__ == "empty" else 0
        return out


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (5, Plan(1, 1, 1, 4, 4, 1)),  # two ranges
        (5, Plan(1, 1, 1, 4, 4, 2)),
        (50, WidePlan(48, 1, 1, 3, 1)),
        (50, WidePlan(48, 1, 1, 3, 2)),
    ],
)
@pytest.mark.parametrize("rounds", [False, True])
def test_scratch_of_a_product_is_what_is_allocated(tokens: int, plan: Plan | WidePlan, rounds: bool) -> None:
    if rounds and isinstance(plan, WidePlan):
        pytest.skip("multiplies no integers")
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install()
    q, x = weight(88, 1000), torch.randn(tokens, 1000).half()
    packed = gemm_pack.pack(q, rounds=rounds)
    problem = gemm.problem_of(tokens, packed)
    with Allocated() as allocated:
        y = gemm.multiply(x, packed, plan)
    scratch = plan.scratch_bytes(problem) if isinstance(plan, WidePlan) else problem.scratch_bytes(plan)
    assert allocated.num_bytes - y.nbytes == scratch
    module.BACKENDS.pop("cpu")
    module.counters.cache_clear()


def test_no_product_takes_more_scratch_than_the_memory_plan_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of a model of 70 billion parameters, whose fastest plans by estimate take more."""
    monkeypatch.setitem(module.BACKENDS, "meta", variants.Recorder())

    def most(limit: int) -> int:
        for where in (gemm_plan, gemm_wide):
            monkeypatch.setattr(where, "SCRATCH_BYTES", limit)
            where.best.cache_clear()
        found = []
        for tokens in gemm_table.BUCKETS[:-1]:  # the library multiplies 256
            plan, problem = gemm_table.choose(tokens, packed, F16), gemm.problem_of(tokens, packed)
            assert plan is not None
            found.append(plan.scratch_bytes(problem) if isinstance(plan, WidePlan) else problem.scratch_bytes(plan))
        return max(found)

    codes = torch.empty(57344, 8192, dtype=torch.uint8, device="meta")
    groups = torch.empty(57344, 64, dtype=F16, device="meta")
    packed = gemm_pack.pack(QTensor(codes, groups, groups.to(torch.uint8), INT4))
    monkeypatch.setattr(gemm_wide, "switches", lambda: Switches(wgmma=False))
    limit = gemm_plan.SCRATCH_BYTES
    assert most(1 << 40) > limit >= most(limit)
    assert limit == memory.GPU_SCRATCH_BYTES
