"""Launching csrc/gemm_wide.cu: products of a packed weight with many tokens, by wgmma (compute capability 9.0).

The plans, and an estimate of the fastest. Its constants are an H200's, as those of gemm_plan.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import msgspec
import torch
from torch import Tensor

from lmkit.kernels.cuda.elementwise import ACTIVATIONS, BLOCK
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import (
    CLOCK,
    L2,
    MEMORY,
    SCRATCH_BYTES,
    STAGE_INPUTS,
    TILE_OUTPUTS,
    Problem,
    sums_bytes,
)
from lmkit.kernels.cuda.module import Kernel, backend
from lmkit.kernels.cuda.switches import off, switches

CAPABILITY = 9, 0  # the only one with wgmma
MIN_TOKENS = 48
TOKENS = (48, 64, 96, 128)  # of a block
SLICE = 32  # tokens whose results leave shared memory together
RANGES = (1, 2, 3, 4, 5, 6, 8)
LAUNCH = 1500.0  # ns of a kernel that is launched, begins and ends


class WidePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wgmma"):
    """One way to launch the kernel; the names are those of csrc/gemm_wide.cu."""

    n_tokens: int
    tall: int  # times 64 outputs of a warpgroup
    warpgroups: int
    depth: int  # stages of the rings
    ranges: int  # of K

    @property
    def words(self) -> str:
        """The plan for people."""
        outputs = 64 * self.tall * self.warpgroups
        return f"wgmma, blocks of {self.n_tokens} tokens x {outputs} outputs, {self.ranges} ranges"

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return 4 * self.tall * self.warpgroups

    @property
    def defines(self) -> dict[str, int]:
        return {"N_TOKENS": self.n_tokens, "TALL": self.tall, "WARPGROUPS": self.warpgroups, "DEPTH": self.depth}

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Blocks of tokens, ranges, blocks of tiles."""
        stages = self.range_stages(problem)
        return -(-problem.tokens // self.n_tokens), -(-problem.stages // stages), -(-problem.tiles // self.tiles)

    def range_stages(self, problem: Problem) -> int:
        return -(-problem.stages // self.ranges)

    def scratch_bytes(self, problem: Problem) -> int:
        """Bytes of x as wgmma reads it, and of the sums of ranges."""
        token_blocks, ranges, row_blocks = self.grid(problem)
        arranged = token_blocks * self.n_tokens * problem.stages * STAGE_INPUTS * 2
        return arranged + sums_bytes(ranges, problem.tokens, row_blocks * self.tiles)

    def shared_bytes(self, problem: Problem) -> int:
        stage = self.tiles * problem.stage_bytes + STAGE_INPUTS * self.n_tokens * 2
        return max(self.depth * stage, SLICE * (TILE_OUTPUTS * self.tiles + 4) * 4)


def candidates(problem: Problem, limit: int) -> Iterator[WidePlan]:
    """Plans that can run a problem in `limit` bytes of shared memory, each with the deepest rings that fit."""
    blocks = -(-problem.tokens // TOKENS[-1])
    widths = {next(n for n in TOKENS if n * count >= problem.tokens) for count in (blocks, 2 * blocks)}
    for n_tokens, tall, warpgroups, ranges in itertools.product(sorted(widths), (1, 2), (1, 2), RANGES):
        for depth in (8, 6, 5, 4, 3):
            plan = WidePlan(n_tokens, tall, warpgroups, depth, ranges)
            if problem_with(plan, problem, limit) is None:
                yield plan
                break


def problem_with(plan: WidePlan, problem: Problem, limit: int) -> str | None:
    """Why a plan cannot run a problem, or None."""
    if plan.n_tokens not in TOKENS or plan.tall not in (1, 2) or plan.warpgroups not in (1, 2):
        return "numbers out of range"
    if plan.depth < 3 or not 1 <= plan.ranges <= problem.stages:
        return "numbers out of range"
    if plan.scratch_bytes(problem) > SCRATCH_BYTES:
        return "too many sums of ranges"
    return "too little shared memory" if plan.shared_bytes(problem) > limit else None


def estimate(plan: WidePlan, problem: Problem, num_sms: int) -> float:
    """Estimated nanoseconds on a GPU with the constants above, `arrange` and `merge` among them."""
    token_blocks, ranges, row_blocks = plan.grid(problem)
    stages, rows = plan.range_stages(problem), TILE_OUTPUTS * plan.tiles
    waves = -(-token_blocks * ranges * row_blocks // num_sms)
    tensor = plan.tall * plan.warpgroups * 8 * plan.n_tokens / 2 / CLOCK / 0.9
    issue = plan.tall * plan.warpgroups * (90 + 2.5 * plan.n_tokens / 4) / (0.8 * CLOCK)
    alone = plan.tall * 150 / CLOCK if plan.warpgroups == 1 else 0.0  # nobody multiplies while it dequantizes
    memory = plan.tiles * problem.stage_bytes / MEMORY
    l2 = (STAGE_INPUTS * plan.n_tokens * 2 + plan.tiles * problem.stage_bytes) / L2
    results = rows * plan.n_tokens * 4 / L2 + 1000
    time = LAUNCH + waves * (stages * max(tensor + alone, issue, memory, l2) + results)
    x_bytes = problem.tokens * problem.stages * STAGE_INPUTS * 4
    time += LAUNCH / 2 + x_bytes / (num_sms * L2)  # arrange
    if ranges > 1:
        time += LAUNCH + 2 * ranges * problem.tokens * problem.tiles * TILE_OUTPUTS * 4 / (num_sms * L2)
    return time


@cache
def best(problem: Problem, num_sms: int, limit: int, count: int = 1) -> tuple[WidePlan, ...]:
    """The plans with the lowest estimates, best first."""
    plans = candidates(problem, limit)
    return tuple(sorted(plans, key=lambda plan: estimate(plan, problem, num_sms))[:count])


def can_multiply(tokens: int, packed: PackedWeight) -> bool:
    """Whether the kernel is for so many tokens and this weight. It stores 4 outputs at a time."""
    capability = backend(packed.codes.device.type).capability()
    fits = capability == CAPABILITY and packed.num_results % 4 == 0 and not packed.coded_x
    fits = fits and packed.scales_per_stage <= 4  # `arrange` has no order for groups of 16
    fits = fits and packed.bits != 6 and not packed.offsets
    return switches().wgmma and off("gemm_wide.cu") is None and fits and tokens >= MIN_TOKENS


@cache
def _kernel(name: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel("gemm_wide.cu", name, **dict(defines))


def kernels_of(packed: PackedWeight, plan: WidePlan, dtype: torch.dtype) -> dict[str, Kernel]:
    """The kernels of a plan by name, for activations in float16 or bfloat16."""
    half = {"LM_BF16": 1} if dtype == torch.bfloat16 else {}
    defines = tuple((packed.defines | plan.defines | half).items())
    return {name: _kernel(name, defines) for name in ("arrange", "gemm_wide", "merge")}


def launch(
    x: Tensor, packed: PackedWeight, plan: WidePlan, problem: Problem, bias: Tensor | None, out: Tensor, kind: int
) -> None:
    """x [T, K] (contiguous, float16 or bfloat16) times the weight goes to `out` [T, N]; see gemm.multiply."""
    device, tokens = x.device.type, x.shape[0]
    token_blocks, ranges, row_blocks = grid = plan.grid(problem)
    kernels = kernels_of(packed, plan, x.dtype)
    chunks = problem.stages * STAGE_INPUTS // 8
    arranged = torch.empty(token_blocks, chunks, plan.n_tokens, 8, dtype=x.dtype, device=x.device)
    kernels["arrange"](
        (-(-chunks * plan.n_tokens // BLOCK), token_blocks), BLOCK, [x, arranged, tokens, packed.in_features, chunks]
    )
    padded_rows = row_blocks * plan.tiles * TILE_OUTPUTS
    partial = torch.empty(ranges, tokens, padded_rows, dtype=torch.float32, device=x.device) if ranges > 1 else None
    activation = ACTIVATIONS[packed.activation]
    kernels["gemm_wide"](
        grid, 128 * plan.warpgroups,
        [arranged, packed.codes, packed.params, bias, out, partial, tokens, packed.num_results, problem.tiles,
         problem.stages, packed.params.shape[1], packed.stages_per_group, plan.range_stages(problem), activation, kind,
         int(backend(device).overlaps())],
        shared=plan.shared_bytes(problem),
    )  # fmt: skip
    if partial is not None:
        kernels["merge"](
            (-(-packed.num_results // (4 * BLOCK)), tokens), BLOCK,
            [partial, bias, out, ranges, tokens, padded_rows, packed.num_results, activation, kind],
        )  # fmt: skip
