"""Launching csrc/gemm.cu and gemm_wide.cu: products of a packed weight, dequantized on the way."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lmkit.kernels.cuda import coded_rows, gemm_wide
from lmkit.kernels.cuda.elementwise import ACTIVATIONS
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan, Problem
from lmkit.kernels.cuda.gemm_wide import WidePlan
from lmkit.kernels.cuda.module import Kernel, backend, counters
from lmkit.kernels.cuda.switches import switches
from lmkit.kernels.ops import Norm

AHEAD_BYTES = 12 << 20  # of weights asked for before a product begins: what memory delivers in 3 us
NORM_TOKENS = 4  # whose norm each block computes by itself

HALF, FLOAT, ADD = range(3)  # how results are stored: in x's dtype, as float32, or added to a residual


def problem_of(tokens: int, packed: PackedWeight) -> Problem:
    (tiles, stages, code_bytes), scales = packed.codes.shape, packed.scales_per_stage
    stage_bytes = code_bytes + max(1, scales) * packed.params.shape[2]
    return Problem(tokens, tiles, stages, stage_bytes, scales, coded_x=packed.coded_x, offsets=packed.offsets)


@cache
def _kernel(defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel("gemm.cu", "gemm", **dict(defines))


def kernel_for(packed: PackedWeight, plan: Plan, dtype: torch.dtype, kind: str | None = None) -> Kernel:
    """The kernel of a plan, for activations in float16 or bfloat16. `kind`: GROUPED (of experts, gemm_experts.py), NORM
    (with the norm before it)."""
    flags = (dtype == torch.bfloat16 and "LM_BF16", packed.int8 and "INT8", packed.float8_x and "FLOAT8_X", kind)
    return _kernel(tuple((packed.defines | plan.defines | {flag: 1 for flag in flags if flag}).items()))


def norms(tokens: int, plan: Plan | WidePlan | None, packed: PackedWeight) -> bool:
    """Whether the kernel of a plan may also compute the RMSNorm of its input, a float32 stream."""
    few = isinstance(plan, Plan) and plan.resident and plan.token_tiles == 1 and tokens <= NORM_TOKENS
    return few and switches().norm and packed.in_features % 8 == 0 and not packed.rounds


def kernels_of(packed: PackedWeight, plan: Plan | WidePlan, dtype: torch.dtype, tokens: int) -> tuple[Kernel, ...]:
    """All kernels that products with a plan for `tokens` tokens launch."""
    if isinstance(plan, WidePlan):
        return tuple(gemm_wide.kernels_of(packed, plan, dtype).values())
    kinds = (None, "NORM") if norms(tokens, plan, packed) else (None,)
    rounding = (coded_rows.kernel_for(packed, dtype),) if packed.rounds else ()
    return (*rounding, *(kernel_for(packed, plan, dtype, kind) for kind in kinds))


def multiply(
    x: Tensor,
    packed: PackedWeight,
    plan: Plan | WidePlan,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """x [T, K] (contiguous, float16 or bfloat16) -> [T, N] in `dtype`: float32, or None = x's. With a residual (float32
    [T, N], contiguous) the product is added to it, and it is returned. bias is float32 [out_features].

    With a norm, for which `norms` must hold, x is a float32 stream, and its rms_norm in norm.dtype is multiplied.
    """
    half = x.dtype if norm is None else norm.dtype
    assert half is not None
    device, tokens = x.device.type, x.shape[0]
    problem = problem_of(tokens, packed)
    if residual is not None:
        out, kind = residual, ADD
    else:
        out = torch.empty(tokens, packed.num_results, dtype=dtype or half, device=x.device)
        kind = FLOAT if dtype == torch.float32 else HALF
    if isinstance(plan, WidePlan):
        gemm_wide.launch(x, packed, plan, problem, bias, out, kind)
        return out
    ranges, token_blocks = problem.ranges(plan), problem.token_blocks(plan)
    partial = None
    if ranges > 1:
        padded_rows = problem.row_blocks(plan) * plan.block_tiles * 16
        partial = torch.empty(ranges, tokens, padded_rows, dtype=torch.float32, device=x.device)
    where = backend(device)
    workers = problem.workers(plan, where.num_sms())
    asks = where.overlaps() and switches().prefetch and token_blocks == 1  # others would ask for the same
    ahead = AHEAD_BYTES // (ranges * workers) if asks else 0
    more = [] if norm is None else [x, norm.weight.float().contiguous(), float(norm.eps)]
    row_bytes = 2 * packed.in_features
    if packed.coded_x:
        x, scales = coded_rows.coded_rows(x, packed)
        more, row_bytes = [scales, scales.shape[1]], x.shape[1]
    kernel_for(packed, plan, half, None if norm is None else "NORM")(
        (token_blocks, ranges, workers), 32 * plan.warps,
        [x if norm is None else None, packed.codes, packed.params, bias, out, partial, counters(device), tokens,
         row_bytes, packed.num_results, problem.tiles, problem.stages, packed.params.shape[1],
         packed.stages_per_group, plan.units,
         int(plan.resident), ACTIVATIONS[packed.activation], kind, int(where.overlaps()), ahead, *more],
        shared=problem.shared_bytes(plan),
    )  # fmt: skip
    return out
