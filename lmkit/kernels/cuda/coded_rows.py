"""Launching csrc/round_groups.cu: inputs of a packed weight, rounded to int8, or to float8 if it is
float8, with a scale for each of its groups."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.elementwise import BLOCK, WIDTH, half_of
from lmkit.kernels.cuda.gemm_pack import STAGE, PackedWeight
from lmkit.kernels.cuda.module import HALVES, Kernel


def coded_rows(x: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """x [T, K] (contiguous, aligned) as codes of 8 bits [T, stages * 128] and scales [scales of all stages, T8], in the
    order in which gemm.cu reads them. T8: T, up to a multiple of 8."""
    stages, padded = packed.num_stages, -(-len(x) // 8) * 8
    codes = torch.empty(len(x), stages * STAGE, dtype=torch.int8, device=x.device)
    scales = torch.empty(stages * max(1, packed.scales_per_stage), padded, device=x.device)
    _launch(x, packed, codes, scales, None)
    return codes, scales


def rounded(x: Tensor, packed: PackedWeight) -> Tensor:
    """The values of these codes, in x's dtype (float16, bfloat16 or float32)."""
    out = torch.empty_like(x)
    _launch(x, packed, None, None, out)
    return out


def kernel_for(packed: PackedWeight, half: torch.dtype) -> Kernel:
    kind = {"FLOAT8_X": 1} if packed.float8 else {}
    return elementwise.kernel_for("round_groups.cu", "round_groups", half, SCALES=packed.scales_per_stage, **kind)


def _launch(x: Tensor, packed: PackedWeight, codes: Tensor | None, scales: Tensor | None, out: Tensor | None) -> None:
    stages, half = packed.num_stages, half_of(x)
    assert half is not None
    span = BLOCK * WIDTH if packed.scales_per_stage else packed.stages_per_group * STAGE
    padded = 0 if scales is None else scales.shape[1]
    args = [x, codes, scales, out, x.shape[1], stages, padded, span, x.dtype in HALVES]
    kernel_for(packed, half)((len(x), -(-stages * STAGE // span)), BLOCK, args, shared=BLOCK // 32 * 4)
