"""How a product is spread over a GPU: the plans that csrc/gemm.cu can run, and an estimate of the fastest.

The estimate's constants are an H200's. It only has to rank plans; measured plans (gemm_table.py) take precedence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from lmkit.kernels.cuda.gpus import REGISTERS, RESERVED_SHARED
from lmkit.kernels.cuda.module import NUM_COUNTERS

STAGE_INPUTS = 128
TILE_OUTPUTS = 16
MAX_TOKEN_TILES = 8  # of 8 tokens, in a block
TOKEN_TILES = (1, 2, 3, 4, 6, 8)
MAX_RANGES = 32
SCRATCH_BYTES = 64 << 20  # of a product, beside its operands and results: plans with more are not taken

CLOCK = 1.75  # per ns
MEMORY = 32.6  # bytes per ns and SM
L2 = 40.0  # bytes per ns and SM
LATENCY = 900.0  # ns of a load while memory is busy


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mma"):
    """One way to launch the kernel; the names are those of csrc/gemm.cu."""

    token_tiles: int  # N_TILES
    rows: int  # tiles of outputs of a warp
    warps_n: int
    warps_k: int
    depth: int  # slots of a warp's ring
    units: int  # stages of a warp in a row block
    resident: bool = True  # x stays in shared memory
    per_sm: int = 1  # blocks that share a multiprocessor

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def words(self) -> str:
        """The plan for people."""
        return f"{self.warps_n} x {self.warps_k} warps, ring of {self.depth}"

    @property
    def block_tiles(self) -> int:
        return self.warps_n * self.rows

    @property
    def defines(self) -> dict[str, int]:
        return {
            "N_TILES": self.token_tiles,
            "ROWS": self.rows,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "DEPTH": self.depth,
        }


@dataclass(frozen=True)
class Problem:
    """The facts that decide how a product is computed: shapes and formats, no values."""

    tokens: int
    tiles: int
    stages: int
    stage_bytes: int  # of codes and params of a tile
    scales: int = 1  # of an output in a stage; 0: a group is longer
    experts: int = 1  # weights that are multiplied side by side, each with `tokens` rows
    coded_x: bool = False  # x has codes of 8 bits, and scales
    offsets: bool = False  # codes have some: registers are few

    @property
    def most_tiles(self) -> int:
        """Products of a tile of outputs and one of tokens that a warp has registers for."""
        if self.offsets:
            return 4
        many_sums = self.scales > 1 or self.experts > 1
        return (8 if self.scales == 4 else 12) if many_sums else 2 * MAX_TOKEN_TILES

    def ranges(self, plan: Plan) -> int:
        return -(-self.stages // (plan.units * plan.warps_k))

    def token_blocks(self, plan: Plan) -> int:
        return -(-self.tokens // (8 * plan.token_tiles))

    def row_blocks(self, plan: Plan) -> int:
        return -(-self.tiles // plan.block_tiles)

    def workers(self, plan: Plan, num_sms: int) -> int:
        """As many workers as run at once, with shares as equal as possible."""
        most = max(1, num_sms * plan.per_sm // (self.ranges(plan) * self.token_blocks(plan) * self.experts))
        row_blocks = self.row_blocks(plan)
        return -(-row_blocks // -(-row_blocks // most))

    def shared_bytes(self, plan: Plan) -> int:
        ring = plan.depth * plan.rows * self.stage_bytes
        sums = 8 * min(plan.token_tiles, 4) * (16 * plan.rows + 4) * 4
        tokens = min(self.tokens, 8) if plan.token_tiles == 1 else 8 * plan.token_tiles
        x = tokens * (plan.warps_k * STAGE_INPUTS * self.input_bytes + 64)
        if self.coded_x:
            x += 8 * plan.token_tiles * plan.warps_k * max(1, self.scales) * 4
        return plan.warps * (ring + sums) + x * (plan.units if plan.resident else plan.depth)

    @property
    def input_bytes(self) -> int:
        """Bytes of an input in shared memory."""
        return 1 if self.coded_x else 2

    def scratch_bytes(self, plan: Plan) -> int:
        """Bytes of the sums of ranges, and of inputs as codes with scales."""
        codes = code_bytes(self.tokens, self.stages, self.scales) if self.coded_x else 0
        sums = sums_bytes(self.ranges(plan), self.tokens, self.row_blocks(plan) * plan.block_tiles)
        return sums + codes


def code_bytes(rows: int, stages: int, scales: int) -> int:
    """Bytes of so many rows of x as 8-bit codes with scales. `scales`: of a row in a stage; 0: a group is longer."""
    return stages * (rows * STAGE_INPUTS + -(-rows // 8) * 8 * max(1, scales) * 4)


def sums_bytes(ranges: int, rows: int, tiles: int) -> int:
    """Bytes of the float32 sums of ranges of K, of so many tiles of outputs. One range needs none."""
    return 4 * ranges * rows * tiles * TILE_OUTPUTS if ranges > 1 else 0


def registers(plan: Plan, problem: Problem) -> int:
    """Registers of a thread, at most, as the kernel's launch bounds allow."""
    return 128 if plan.token_tiles * (plan.rows + 1) <= (4 if problem.scales > 1 else 6) else 255


def problem_with(plan: Plan, problem: Problem, limit: int) -> str | None:
    """Why a plan cannot run a problem, or None."""
    if (
        min(int(x) for x in msgspec.structs.astuple(plan)[:6]) < 1
        or plan.per_sm < 1
        or plan.depth < 3
        or not plan.token_tiles <= MAX_TOKEN_TILES
    ):
        return "numbers out of range"
    if plan.block_tiles not in (1, 2, 4, 8, 16) or plan.warps > 16:
        return "row blocks are of 1, 2, 4, 8 or 16 tiles, by at most 16 warps"
    if plan.token_tiles * plan.rows > problem.most_tiles or 32 * plan.warps * registers(plan, problem) > REGISTERS:
        return "too many registers"
    if problem.row_blocks(plan) * problem.token_blocks(plan) * problem.experts > NUM_COUNTERS:
        return "more row blocks than counters"
    if problem.experts == 1 and problem.scratch_bytes(plan) > SCRATCH_BYTES:
        return "too many sums of ranges"
    if problem.shared_bytes(plan) > limit:
        return "too little shared memory"
    return None


def candidates(problem: Problem, limit: int, kernels: int = 1) -> Iterator[Plan]:
    """Plans that can run a problem, with as many blocks on a multiprocessor as fit if `kernels` like it share that."""
    blocks = math.ceil(problem.tokens / (8 * min(MAX_TOKEN_TILES, problem.most_tiles)))
    token_tiles = next(tiles for tiles in TOKEN_TILES if 8 * tiles * blocks >= problem.tokens)
    shapes = [(n, k) for n, k in itertools.product((1, 2, 4, 8), repeat=2) if n * k in (4, 8, 16)]
    for rows, (warps_n, warps_k), depth in itertools.product((1, 2), shapes, (3, 4, 6, 8)):
        for units, resident in itertools.product(_units(problem.stages, warps_k), (True, False)):
            plan = Plan(token_tiles, rows, warps_n, warps_k, depth, units, resident)
            threads, shared = 32 * plan.warps, problem.shared_bytes(plan)
            by_shared = (limit + RESERVED_SHARED) // kernels // (shared + RESERVED_SHARED)
            room = min(REGISTERS // kernels // (threads * registers(plan, problem)), by_shared)
            plan = msgspec.structs.replace(plan, per_sm=room)
            if room and problem_with(plan, problem, limit) is None:
                yield plan


@cache
def _units(stages: int, warps_k: int) -> tuple[int, ...]:
    """Numbers of units of a row block, for different numbers of ranges."""
    most = -(-stages // warps_k)
    return tuple(sorted({-(-most // ranges) for ranges in range(1, MAX_RANGES + 1)}))


def estimate(plan: Plan, problem: Problem, num_sms: int) -> float:
    """Estimated nanoseconds on a GPU with the constants above."""
    tokens = min(problem.tokens, 8 * plan.token_tiles)
    ranges, workers = problem.ranges(plan), problem.workers(plan, num_sms)
    row_blocks = -(-problem.row_blocks(plan) // workers)  # of a worker
    grid = workers * ranges * problem.token_blocks(plan) * problem.experts
    waves, resident = -(-grid // (num_sms * plan.per_sm)), min(plan.per_sm, -(-grid // num_sms))
    units = row_blocks * plan.units  # of a warp, of `rows` tiles each
    stages = units * plan.rows * plan.warps * resident  # of a tile, on a multiprocessor

    in_flight = plan.warps * resident * (plan.depth - 1) * plan.rows * problem.stage_bytes
    memory = stages * problem.stage_bytes * max(1 / MEMORY + LATENCY / in_flight / 4, LATENCY / in_flight)
    per_load = problem.stage_bytes / 1024
    to_unpack, of_tile = (30, 16 + 3 / plan.rows) if problem.coded_x else (80, 12 + 6 / plan.rows)
    instructions = 15 + to_unpack * per_load + 50 / plan.rows + plan.token_tiles * of_tile
    issue = stages * instructions / (4 * 0.8 * CLOCK)
    tensor = stages * 4 * problem.input_bytes * plan.token_tiles * 1.6 / CLOCK
    x_tile = 8 * STAGE_INPUTS * problem.input_bytes
    shared = stages * (2 * problem.stage_bytes + x_tile * plan.token_tiles / plan.rows) / (128 * 0.9 * CLOCK)
    chain = 250 + 60 * plan.rows + 12 * plan.token_tiles * plan.rows
    barriers = (plan.units if plan.resident else units) * 60
    serial = (units * chain + barriers + row_blocks * (500 + 20 * tokens)) / CLOCK
    x_stage = tokens * STAGE_INPUTS * problem.input_bytes
    x_bytes = resident * plan.warps_k * x_stage * (plan.units if plan.resident else units)
    merge = resident * row_blocks * plan.block_tiles * TILE_OUTPUTS * tokens * 8 / L2 + 1500 if ranges > 1 else 0
    times = (memory, issue, tensor, shared, serial)  # they overlap, but slow each other down
    together = math.sqrt(math.sqrt(sum(time**4 for time in times)))
    return 1500 + waves * (together + 0.5 * x_bytes / L2 + merge)


@cache
def best(problem: Problem, num_sms: int, limit: int, count: int = 1, kernels: int = 1) -> tuple[Plan, ...]:
    """The plans with the lowest estimates, best first. If no plan leaves room for other kernels, it takes all."""
    plans = list(candidates(problem, limit, kernels)) or list(candidates(problem, limit))
    return tuple(sorted(plans, key=lambda plan: estimate(plan, problem, num_sms))[:count])


# ---- one order of sums for any number of tokens

PINNED_TOKENS = 16, 256  # the numbers of tokens for which the order is chosen


def order(plan: Plan) -> tuple[int, int]:
    """How a plan adds up an output: every `warps_k`-th stage in one sum, in ranges of `units` of them. Plans of one
    order give a row the same bits, if a warp multiplies more than one tile: one tile alone has two sums."""
    return plan.warps_k, plan.units


@cache
def pinned(problem: Problem, num_sms: int, limit: int) -> Plan | None:
    """The plan with the lowest estimate of those that add up in the one order that this weight has. None: there is
    none for so many tokens, and a plan for more does."""
    wanted = pinned_order(replace(problem, tokens=0), num_sms, limit)
    plans = (plan for plan in in_one_sum(problem, limit) if order(plan) == wanted)
    return min(plans, key=lambda plan: estimate(plan, problem, num_sms), default=None)


@cache
def pinned_order(weight: Problem, num_sms: int, limit: int) -> tuple[int, int]:
    """The order whose plans lose least, for few and for many tokens together, against the best plan of any order. That
    of experts has one range: sums of ranges of all their rows would need memory."""
    times: list[dict[tuple[int, int], float]] = []
    for tokens in PINNED_TOKENS:
        problem, found = replace(weight, tokens=tokens), dict[tuple[int, int], float]()
        for plan in in_one_sum(problem, limit):
            if problem.experts == 1 or problem.ranges(plan) == 1:
                found[order(plan)] = min(found.get(order(plan), math.inf), estimate(plan, problem, num_sms))
        times.append(found)
    common = sorted(set.intersection(*map(set, times)))
    return min(common, key=lambda wanted: sum(found[wanted] / min(found.values()) for found in times))


def in_one_sum(problem: Problem, limit: int) -> Iterator[Plan]:
    """Candidates whose warps multiply more than one tile."""
    return (plan for plan in candidates(problem, limit) if plan.token_tiles * plan.rows > 1)
