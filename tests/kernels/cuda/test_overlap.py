"""Kernels that begin while the one before them ends: what they read before they wait, nothing in their step writes.

The emulator checks every access of theirs (tests/emulator/emulator.cpp). A kernel's inputs are written by a kernel.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise, gemm, gemm_pack, library, module
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.source import FOLDER
from lmkit.kernels.cuda.switches import parse
from lmkit.kernels.ops import Norm
from lmkit.qtensor import int_scheme, quantize
from tests import emulator
from tests.emulator import EmulatedBackend


@pytest.fixture
def gpu() -> Iterator[EmulatedBackend]:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    yield emulator.install(seed=11, overlap=True)
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


def normed(tokens: int, width: int) -> Tensor:
    """Rows that a kernel has written just now."""
    return elementwise.rms_norm(torch.randn(tokens, width), Norm(torch.rand(width), 1e-5, dtype=torch.float16))


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, Plan(1, 1, 1, 4, 4, 1)),  # the ring goes on into the next row blocks
        (5, Plan(1, 2, 2, 2, 6, 2)),
        (13, Plan(2, 2, 2, 2, 3, 2, False)),  # x does not stay
        (9, Plan(2, 1, 1, 4, 8, 1, False)),
        (30, Plan(4, 1, 4, 1, 4, 5)),
    ],
)
def test_products_read_weights_before_they_wait(gpu: EmulatedBackend, tokens: int, plan: Plan) -> None:
    torch.manual_seed(tokens)
    packed = gemm_pack.pack(quantize(torch.randn(152, 640), int_scheme(4, 128)))
    x, stream = normed(tokens, 640), torch.zeros(tokens, 152)
    expected = x.double() @ gemm_pack.dequantize(packed, torch.float32).double().t()
    gemm.multiply(x, packed, plan, residual=stream)
    gemm.multiply(x, packed, plan, residual=stream)
    torch.testing.assert_close(stream.double(), 2 * expected, rtol=1e-4, atol=1e-3)
    assert not module.counters("cpu").any()


def test_a_norm_inside_a_product_comes_behind_the_wait(gpu: EmulatedBackend) -> None:
    packed = gemm_pack.pack(quantize(torch.randn(152, 640), int_scheme(4, 128)))
    stream, norm = torch.zeros(2, 152), Norm(torch.rand(152), 1e-5, dtype=torch.float16)
    gemm.multiply(normed(2, 640), packed, Plan(1, 1, 1, 4, 4, 1), residual=stream)  # a kernel writes the stream
    following = gemm_pack.pack(quantize(torch.randn(32, 152), int_scheme(4, 128)))
    y = gemm.multiply(stream, following, Plan(1, 1, 2, 2, 3, 1), norm=norm)
    x = (stream * (stream.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight).half()
    expected = x.double() @ gemm_pack.dequantize(following, torch.float32).double().t()
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "plan", [Plan(1, 1, 1, 4, 4, 1), Plan(1, 1, 4, 2, 3, 3), Plan(1, 2, 2, 2, 3, 1), Plan(1, 1, 1, 2, 3, 5)]
)
@pytest.mark.parametrize("group", [32, 128, 256])
def test_products_ask_for_the_weights_that_come_next(
    gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch, plan: Plan, group: int
) -> None:
    """All that their rings have not begun to copy, each byte once, and within the limit. Scales of long groups are few
    and not asked for."""
    packed = gemm_pack.pack(quantize(torch.randn(152, 1280), int_scheme(4, group)))
    x, problem = normed(3, 1280), gemm.problem_of(3, packed)
    workers = problem.workers(plan, gpu.num_sms())
    stage_bytes = packed.codes.shape[2] + packed.scales_per_stage * packed.params.shape[2]
    wanted = 0
    for first, worker in itertools.product(range(0, problem.stages, plan.units * plan.warps_k), range(workers)):
        last = min(problem.stages, first + plan.units * plan.warps_k)
        units = [
            (block, unit) for block in range(worker, problem.row_blocks(plan), workers) for unit in range(plan.units)
        ]
        for block, unit in units[plan.depth - 1 :]:
            begin = first + unit * plan.warps_k
            stages = max(0, min(last, begin + plan.warps_k) - begin)
            tiles = min(problem.tiles, (block + 1) * plan.block_tiles) - block * plan.block_tiles
            wanted += tiles * stages * stage_bytes
    gpu.prefetched()
    y = gemm.multiply(x, packed, plan, dtype=torch.float32)
    assert gpu.prefetched() == wanted > 0

    monkeypatch.setattr(gemm, "AHEAD_BYTES", limit := wanted // 2)
    assert torch.equal(gemm.multiply(x, packed, plan, dtype=torch.float32), y)
    assert gpu.prefetched() * packed.codes.shape[2] / stage_bytes <= limit
    monkeypatch.setattr(gemm, "switches", lambda: parse("prefetch=off"))
    assert torch.equal(gemm.multiply(x, packed, plan, dtype=torch.float32), y)
    assert gpu.prefetched() == 0


def test_few_tokens_of_dense_weights(gpu: EmulatedBackend) -> None:
    weight = torch.randn(40, 200).half()
    x = normed(3, 200)
    y = library.linear_dense(x, ops.linear_dense.named("cuda").pack(weight), None, dtype=torch.float32)
    torch.testing.assert_close(y, x.float() @ weight.float().t(), rtol=1e-3, atol=1e-2)


WAIT = "wait_for_previous();"


def _norm(x: Tensor) -> Tensor:
    return elementwise.rms_norm(x, Norm(torch.rand(256), 1e-5, dtype=torch.float16))


def _product(x: Tensor) -> Tensor:
    packed = gemm_pack.pack(quantize(torch.randn(32, 256), int_scheme(4, 128)))
    return gemm.multiply(x, packed, Plan(1, 1, 1, 2, 4, 1))


def _dense(x: Tensor) -> Tensor:
    return library.linear_dense(x, ops.linear_dense.named("cuda").pack(torch.randn(32, 256).half()), None)


@pytest.mark.parametrize(
    ("call", "file", "old", "new"),
    [
        (_product, "gemm.cu", f"    {WAIT}\n#ifdef NORM", "#ifdef NORM"),
        (_norm, "norm.cu", "    begin_kernel();\n", ""),
        (_norm, "norm.cu", "    if (row >= rows) return;\n", "    if (row >= rows) return;\n    begin_kernel();\n"),
        (_dense, "gemv.cu", f"    {WAIT}\n", ""),
    ],
)
def test_a_wait_that_is_left_out_is_found(
    gpu: EmulatedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, file: str, old: str, new: str
) -> None:
    text = (FOLDER / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace("    begin_kernel();\n", "").replace(old, new))

    def broken(source: str, name: str, **defines: int) -> Kernel:
        return Kernel(str(tmp_path / file) if source == file else source, name, **defines)

    x = normed(7, 256)  # a row less than a block of norm.cu has
    for where, cached in ((gemm, gemm._kernel), (elementwise, elementwise.kernel_for)):
        monkeypatch.setattr(where, "Kernel", broken)
        cached.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"reads what an earlier kernel writes|did not wait"):
            call(x)
    finally:
        gemm._kernel.cache_clear()
        elementwise.kernel_for.cache_clear()
