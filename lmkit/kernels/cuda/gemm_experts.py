"""Launching csrc/gemm.cu for the experts of a mixture: one product with the packed weights of all of them.

The rows of the result are ops.Places: pairs of a token and an expert, by expert. A launch depends on their number only.
Which expert has which rows is read on the device, so steps with experts are captured like others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.kernels.cuda import coded_rows
from lmkit.kernels.cuda.elementwise import ACTIVATIONS
from lmkit.kernels.cuda.gemm import FLOAT, HALF, kernel_for, problem_of
from lmkit.kernels.cuda.gemm_pack import TILE, PackedWeight
from lmkit.kernels.cuda.gemm_plan import (
    MAX_TOKEN_TILES,
    SCRATCH_BYTES,
    TOKEN_TILES,
    Plan,
    Problem,
    best,
    code_bytes,
    estimate,
    in_one_sum,
    order,
    pinned_order,
    problem_with,
    sums_bytes,
)
from lmkit.kernels.cuda.gemm_table import Key, table
from lmkit.kernels.cuda.gpus import gpu_of
from lmkit.kernels.cuda.module import Kernel, backend, counters
from lmkit.kernels.cuda.switches import off, switches
from lmkit.kernels.ops import Places
from lmkit.kernels.registry import ExpertLinears

ALL_PLANS = 1 << 20
MAX_ROWS = 256  # of an expert; with more on average, its weight is dequantized for the library's product
CROWDED = 1.5  # rows of an expert that still fit into one block, as a multiple of the average


@dataclass(frozen=True)
class ExpertTable:
    """The weights of a mixture's experts, which have one shape and format."""

    addresses: Tensor  # int64 [experts, 3]: of codes, params, bias or 0
    packed: PackedWeight  # the first expert's
    parts: list[tuple[PackedWeight, Tensor | None]]  # keeps the memory; biases in float32

    @classmethod
    def of(cls, parts: list[tuple[PackedWeight, Tensor | None]]) -> ExpertTable | None:
        if not switches().experts or off("gemm.cu") is not None:
            return None
        kept = [(packed, None if bias is None else bias.float().contiguous()) for packed, bias in parts]
        rows = [[w.codes.data_ptr(), w.params.data_ptr(), 0 if b is None else b.data_ptr()] for w, b in kept]
        first = kept[0][0]
        return cls(torch.tensor(rows, dtype=torch.int64).to(first.codes.device), first, kept)


def num_blocks(num_places: int, num_experts: int, rows: int) -> int:
    """The most blocks of `rows` rows that so many places can need."""
    active = min(num_experts, num_places)
    return (num_places + active * (rows - 1)) // rows


def bucket(num_places: int) -> int:
    """The number of places whose plan a product with `num_places` has."""
    return 1 << (num_places - 1).bit_length()


def plan_for(packed: PackedWeight, dtype: torch.dtype, num_places: int, num_experts: int) -> tuple[Problem, Plan]:
    """How a product with up to `num_places` places, a power of two, is spread over the device: the plan that was
    measured there, else the one with the lowest estimate. With the switch `invariant` all plans add up in one order."""
    device = packed.codes.device.type
    if switches().invariant:
        one = _pinned(packed, num_places, num_experts)
        return _problem(packed, num_places, num_experts, one.token_tiles), one
    entry = table(device).find(Key.of(packed, dtype, num_experts), num_places)
    if entry is not None and isinstance(plan := entry.plan, Plan):
        problem = _problem(packed, num_places, num_experts, plan.token_tiles)
        limit = gpu_of(backend(device).capability()).block_shared
        if problem_with(plan, problem, limit) is None and _fits(problem, plan, num_places):
            return problem, plan
    (plan,) = promising(packed, num_places, num_experts, 1)
    return _problem(packed, num_places, num_experts, plan.token_tiles), plan


def promising(packed: PackedWeight, num_places: int, num_experts: int, count: int) -> tuple[Plan, ...]:
    """The plans with the lowest estimates, best first, at least one."""
    tiles = _token_tiles(num_places, num_experts)
    where = backend(packed.codes.device.type)
    limit = gpu_of(where.capability()).block_shared
    while True:  # fewer tokens in a block if no plan can have so many
        problem = _problem(packed, num_places, num_experts, tiles)
        plans = best(problem, where.num_sms(), limit, ALL_PLANS)
        if found := [plan for plan in plans if _fits(problem, plan, num_places)]:
            return tuple(found[:count])
        tiles -= 1


def _token_tiles(num_places: int, num_experts: int) -> int:
    """Tiles of a block that has most experts' rows at once."""
    active = num_experts * (1 - math.exp(-num_places / num_experts))  # experts with a token, if all are equally liked
    wanted = CROWDED * num_places / max(1.0, active)
    return next((n for n in TOKEN_TILES if 8 * n >= wanted), MAX_TOKEN_TILES)


def _pinned(packed: PackedWeight, num_places: int, num_experts: int) -> Plan:
    where = backend(packed.codes.device.type)
    limit, num_sms = gpu_of(where.capability()).block_shared, where.num_sms()
    wanted = pinned_order(replace(problem_of(0, packed), experts=max(2, num_experts)), num_sms, limit)
    for tiles in range(_token_tiles(num_places, num_experts), 0, -1):  # fewer if no plan can have so many
        problem = _problem(packed, num_places, num_experts, tiles)
        if plans := [plan for plan in in_one_sum(problem, limit) if order(plan) == wanted]:
            return min(plans, key=lambda plan: estimate(plan, problem, num_sms))
    raise AssertionError("blocks of the fewest rows have a plan of every order")


def _problem(packed: PackedWeight, num_places: int, num_experts: int, token_tiles: int) -> Problem:
    one = problem_of(8 * token_tiles, packed)
    return replace(one, experts=num_blocks(num_places, num_experts, 8 * token_tiles))


def _fits(problem: Problem, plan: Plan, num_places: int) -> bool:
    tiles, ranges = problem.row_blocks(plan) * plan.block_tiles, problem.ranges(plan)
    codes = code_bytes(num_places, problem.stages, problem.scales) if problem.coded_x else 0
    return ranges == 1 or sums_bytes(ranges, num_places, tiles) + codes <= SCRATCH_BYTES


def multiply(x: Tensor, places: Places, of_experts: ExpertTable, by_token: bool) -> Tensor:
    """See registry.ExpertLinears: x in float16 or bfloat16; the result is in x's dtype if `by_token`, else float32. If
    inputs are rounded, a row of x is rounded once for all experts that read it."""
    packed, num_places = of_experts.packed, len(places.tokens)
    dtype = x.dtype if by_token else torch.float32
    out = torch.empty(num_places, packed.num_results, dtype=dtype, device=x.device)
    if num_places == 0:
        return out
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    half, row_bytes, scales = x.dtype, 2 * packed.in_features, []
    if packed.coded_x:
        x, of_rows = coded_rows.coded_rows(x, packed)
        row_bytes, scales = x.shape[1], [of_rows, of_rows.shape[1]]
    elif packed.rounds:
        x = coded_rows.rounded(x, packed)
    device, num_experts = x.device.type, len(of_experts.parts)
    problem, plan = plan_for(packed, half, bucket(num_places), num_experts)
    blocks, ranges = num_blocks(num_places, num_experts, 8 * plan.token_tiles), problem.ranges(plan)
    partial = None
    if ranges > 1:
        padded_rows = problem.row_blocks(plan) * plan.block_tiles * TILE
        partial = torch.empty(ranges, num_places, padded_rows, dtype=torch.float32, device=x.device)
    kernel_for(packed, plan, half, "GROUPED")(
        (blocks, ranges, problem.workers(plan, backend(device).num_sms())), 32 * plan.warps,
        [x, of_experts.addresses, None, None, out, partial, counters(device), num_places, row_bytes,
         packed.num_results, problem.tiles, problem.stages, packed.params.shape[1], packed.stages_per_group, plan.units,
         int(plan.resident), ACTIVATIONS[packed.activation], HALF if by_token else FLOAT, 0, 0, places.active,
         places.tokens if by_token else None, *scales],
        shared=problem.shared_bytes(plan),
    )  # fmt: skip
    return out


def kernels(of_experts: ExpertTable, dtype: torch.dtype, max_places: int) -> Iterator[Kernel]:
    """All kernels that products with up to `max_places` places launch."""
    yield from rounding(of_experts, dtype)
    for exponent in range((max_places - 1).bit_length() + 1):
        _, plan = plan_for(of_experts.packed, dtype, 1 << exponent, len(of_experts.parts))
        yield kernel_for(of_experts.packed, plan, dtype, "GROUPED")


def rounding(of_experts: ExpertTable, dtype: torch.dtype) -> Iterator[Kernel]:
    """The kernel that rounds inputs, if they are rounded."""
    if of_experts.packed.rounds:
        yield coded_rows.kernel_for(of_experts.packed, dtype)


OF_EXPERTS = ExpertLinears(ExpertTable.of, multiply, MAX_ROWS, half=True, in_parts=lambda: switches().invariant)
