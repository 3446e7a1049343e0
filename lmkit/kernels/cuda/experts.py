"""Mixtures of experts, beside their products: csrc/experts.cu. The products are those of gemm_experts.py."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda.elementwise import BLOCK, WIDTH, accepts, grid, half_of, is_aligned, kernel_for
from lmkit.kernels.cuda.module import HALVES, Kernel
from lmkit.kernels.ops import Places, Routing
from lmkit.kernels.registry import implements

MAX_EXPERTS, MAX_PLACES = 1024, 16384
WARPS = 4  # of a block of `route`, each with a token
SORTERS = 1024  # threads of the block that sorts places
ROUTE = Kernel("experts.cu", "route")
EXPERT_PLACES = Kernel("experts.cu", "expert_places")
SUM_PLACES = Kernel("experts.cu", "sum_places")
_accepts = partial(accepts, "experts.cu")


@implements(ops.route, "cuda", device="cuda", accepts=_accepts, priority=20)
def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    (tokens, experts), per_token = logits.shape, routing.experts_per_token
    if experts > MAX_EXPERTS or logits.dtype != torch.float32 or logits.stride(1) != 1:
        reason = f"{experts} experts, more than {MAX_EXPERTS}" if experts > MAX_EXPERTS else "logits of another kind"
        chosen: tuple[Tensor, Tensor] = ops.route.fall_back("reference", reason)(logits, routing, bias)
        return chosen
    weights = torch.empty(tokens, per_token, device=logits.device)
    numbers = torch.empty(tokens, per_token, dtype=torch.int64, device=logits.device)
    args = [
        logits, np.int64(logits.stride(0)), None if bias is None else bias.float().contiguous(), weights, numbers,
        tokens, experts, per_token, routing.normalize, routing.sigmoid, routing.num_groups, routing.groups_per_token,
        routing.group_top, float(routing.scale),
    ]  # fmt: skip
    ROUTE(-(-tokens // WARPS), 32 * WARPS, args, shared=4 * WARPS * (2 * experts + routing.num_groups))
    return weights, numbers


@implements(ops.expert_places, "cuda", device="cuda", accepts=_accepts, priority=20)
def expert_places(experts: Tensor, num_experts: int, held: range) -> Places:
    count, per_token = experts.numel(), experts.shape[1]
    if num_experts > MAX_EXPERTS or count > MAX_PLACES:
        reason = f"{count} places of {num_experts} experts"
        places: Places = ops.expert_places.fall_back("reference", reason)(experts, num_experts, held)
        return places
    sizes = (count,), (len(experts), per_token), (1 + 3 * min(len(held), count),)
    tokens, of_token, active = (torch.empty(size, dtype=torch.int64, device=experts.device) for size in sizes)
    places = Places(tokens, of_token, active)
    args = [
        experts.contiguous(), places.tokens, places.of_token, places.active, count, per_token, num_experts,
        held.start, held.stop,
    ]  # fmt: skip
    EXPERT_PLACES(1, SORTERS, args, shared=8 * num_experts + 2 * count)
    return places


@implements(ops.sum_places, "cuda", device="cuda", accepts=_accepts, priority=20)
def sum_places(y: Tensor, weights: Tensor, places: Places, out: Tensor) -> None:
    if y.dtype != torch.float32 or not y.is_contiguous() or not out.is_contiguous():
        ops.sum_places.fall_back("reference", "outputs of experts of another kind")(y, weights, places, out)
        return
    tokens, columns = out.shape
    aligned = columns % WIDTH == 0 and is_aligned(y, out)
    args = [y, weights.contiguous(), places.of_token, out, weights.shape[1], columns, aligned]
    SUM_PLACES(grid(tokens, columns), BLOCK, args)


@implements(ops.add_shared, "cuda", device="cuda", accepts=_accepts, priority=20)
def add_shared(out: Tensor, y: Tensor, logits: Tensor | None) -> None:
    half = half_of(y)
    if half is None or not out.is_contiguous() or (logits is not None and logits.dtype != torch.float32):
        ops.add_shared.fall_back("reference", "a shared expert's output of another kind")(out, y, logits)
        return
    tokens, columns = out.shape
    y = y.contiguous()
    aligned = columns % WIDTH == 0 and is_aligned(y, out)
    stride = np.int64(0 if logits is None else logits.stride(0))
    args = [out, y, logits, stride, columns, y.dtype in HALVES, aligned]
    kernel_for("experts.cu", "add_shared", half)(grid(tokens, columns), BLOCK, args)
