"""Which plan computes a product: the best one measured on this device, else gemm_plan.py's estimate.

The table of a device is a JSON file in the cache folder. It also has what a split of attention costs there. `tune` and
turbo/engine/tuning.py measure and save; nothing else writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from lmkit.environment import environment
from lmkit.errors import JSON_ERRORS
from lmkit.kernels.cuda import gemm, gemm_plan, gemm_wide
from lmkit.kernels.cuda.cached_file import replace_file
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan, Problem
from lmkit.kernels.cuda.gemm_wide import WidePlan
from lmkit.kernels.cuda.gpus import gpu_of
from lmkit.kernels.cuda.module import Kernel, backend
from lmkit.kernels.cuda.switches import off, switches
from lmkit.log import get_logger

log = get_logger(__name__)

VERSION = 2  # of the plans and of the kernels they are for
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens that have plans; others take the next's
PROMPT_BUCKETS = (384, 512)  # tokens whose plans are used if they were measured, and faster than the library
LIBRARY_FROM = 256  # tokens; not measured: from here on mma.sync loses to the library with the dequantized weight
COPY_FROM = 128  # tokens; of a weight that is also kept in 16 bits
SHARED_TOKENS = 16
MEASURED_PLANS = 16  # of each bucket, the most promising
COLD_BYTES = 256 << 20  # of weights multiplied in turn, so that no cache holds the next one
LAUNCHES, REPLAYS = 24, 5  # of a measurement

Measure = Callable[[Callable[[int], Tensor], int], float]  # (launch number i, copies to choose from) -> microseconds


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the best plan for a weight and activations, except the number of tokens."""

    outputs: int
    inputs: int
    bits: int
    float8: bool
    wide: bool
    group_size: int
    dtype: str  # int8, float8: x is rounded
    experts: int = 0  # that have such a weight each, and one product. 0: a weight of its own
    float4: bool = False
    offsets: bool = False
    factors: bool = False

    @classmethod
    def of(cls, packed: PackedWeight, dtype: torch.dtype, experts: int = 0) -> Key:
        return cls(
            packed.out_features, packed.in_features, packed.bits, packed.float8, packed.wide, packed.group_size,
            "int8" if packed.int8 else "float8" if packed.float8_x else str(dtype).removeprefix("torch."),
            experts, packed.float4, packed.offsets, bool(packed.factors),
        )  # fmt: skip


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best plan found for a weight and up to `tokens` tokens; for experts, pairs of a token and an expert."""

    key: Key
    tokens: int
    plan: Plan | WidePlan | None  # None = dequantize
    microseconds: float


class SplitKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the time of a split in attention to new tokens."""

    head_dim: int
    queries: int  # of a KV head
    bits: int  # of an element of keys or values, whichever has fewer


class SplitCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a split costs besides its tiles, in tiles, so that the steps that were timed are fastest."""

    key: SplitKey
    tiles: int


class WideKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides how many blocks attention over wide rows needs."""

    row_dim: int
    queries: int  # of a KV head
    bits: int  # of an element of keys or values, whichever has fewer
    shared: bool  # rows are keys and values at once


class WideBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Into how many blocks of a multiprocessor few tiles of rows are split, so that the steps that were timed are
    fastest."""

    key: WideKey
    blocks: int


class LatentKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides when latent attention is faster over plain heads."""

    heads: int
    row_dim: int
    latent_dim: int
    key_dim: int
    value_dim: int


class LatentGain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What plain heads saved in a prompt that was timed, as a multiple of the estimate (layers/latent_cost.py)."""

    key: LatentKey
    factor: float


class TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    device: str
    entries: list[Entry]
    split_costs: list[SplitCost] = []
    wide_blocks: list[WideBlocks] = []
    latent_gains: list[LatentGain] = []


class Table:
    """Entries of one device; a missing, damaged or outdated file is an empty table."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self.entries: dict[Key, dict[int, Entry]] = {}
        file = _load(path, device)
        for entry in file.entries:
            self.add(entry)
        self.split_costs = {cost.key: cost.tiles for cost in file.split_costs}
        self.wide_blocks = {found.key: found.blocks for found in file.wide_blocks}
        self.latent_gains = {gain.key: gain.factor for gain in file.latent_gains}

    def add(self, entry: Entry) -> None:
        self.entries.setdefault(entry.key, {})[entry.tokens] = entry

    def find(self, key: Key, tokens: int) -> Entry | None:
        """The entry with the fewest tokens that is still for at least `tokens`."""
        measured = self.entries.get(key, {})
        return min((entry for n, entry in measured.items() if n >= tokens), key=lambda e: e.tokens, default=None)

    def save(self) -> None:
        """Replace the file, completely or not at all. Raises OSError."""
        entries = [entry for of_key in self.entries.values() for entry in of_key.values()]
        costs = [SplitCost(key, tiles) for key, tiles in self.split_costs.items()]
        wide = [WideBlocks(key, blocks) for key, blocks in self.wide_blocks.items()]
        gains = [LatentGain(key, factor) for key, factor in self.latent_gains.items()]
        file = TableFile(VERSION, self.device, entries, costs, wide, gains)
        replace_file(self.path, msgspec.json.format(msgspec.json.encode(file), indent=1))


def _load(path: Path, device: str) -> TableFile:
    empty = TableFile(VERSION, device, [])
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TableFile)
    except FileNotFoundError:
        return empty
    except (OSError, *JSON_ERRORS) as error:
        log.warning("%s is not used: %s", path, error)
        return empty
    if (file.version, file.device) != (VERSION, device):
        log.warning("%s is not used: it is version %d, of %s", path, file.version, file.device)
        return empty
    return file


@cache
def table(device: str) -> Table:
    """The table of the current device of this type. Kernels that overlap have other plans, and a table of their own."""
    where = backend(device)
    name = where.device_name() + (" overlapping" if where.overlaps() else "")
    file = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".json"
    return Table(environment().cache_dir / "gemm" / file, name)


def choose(tokens: int, packed: PackedWeight, dtype: torch.dtype) -> Plan | WidePlan | None:
    """The plan for a product with activations in `dtype`, or None if dequantizing the weight first is faster.

    Plans are those of BUCKETS: a few kernels then serve steps of any number of tokens, and `kernels` knows all of them.
    With the switch `invariant` all of them add up alike, and nothing measured counts.
    """
    if switches().invariant:
        return _pinned(tokens, packed)
    entry = table(packed.codes.device.type).find(Key.of(packed, dtype), tokens)
    if (entry is not None and entry.plan is None) or (packed.copy is not None and tokens >= COPY_FROM):
        return None
    bucket = next((n for n in (*BUCKETS, *PROMPT_BUCKETS) if n >= tokens), None)
    if bucket is None:
        return None
    if entry is not None and entry.plan is not None and _runs(entry.plan, bucket, packed):
        return entry.plan
    if bucket in PROMPT_BUCKETS:
        return None
    plans = promising(bucket, packed, 1)
    return next((plan for plan in plans if tokens < LIBRARY_FROM or isinstance(plan, WidePlan)), None)


def _pinned(tokens: int, packed: PackedWeight) -> Plan:
    """The plan for up to the greatest number of BUCKETS."""
    where = backend(packed.codes.device.type)
    limit, num_sms = gpu_of(where.capability()).block_shared, where.num_sms()
    problems = (gemm.problem_of(n, packed) for n in BUCKETS if n >= tokens)
    return next(plan for problem in problems if (plan := gemm_plan.pinned(problem, num_sms, limit)) is not None)


def _runs(plan: Plan | WidePlan, tokens: int, packed: PackedWeight) -> bool:
    """Whether a measured plan is still one that can run."""
    problem = gemm.problem_of(tokens, packed)
    limit = gpu_of(backend(packed.codes.device.type).capability()).block_shared
    if isinstance(plan, WidePlan):
        return gemm_wide.can_multiply(tokens, packed) and gemm_wide.problem_with(plan, problem, limit) is None
    return off("gemm.cu") is None and gemm_plan.problem_with(plan, problem, limit) is None


def promising(tokens: int, packed: PackedWeight, count: int) -> tuple[Plan | WidePlan, ...]:
    """The plans with the lowest estimates on the device of the weight, `count` of each kernel, best first. Two kernels
    that overlap share an SM if there are few tokens: for more, a plan that takes half of an SM loses more than the
    overlap gains."""
    where = backend(packed.codes.device.type)
    limit, num_sms, problem = gpu_of(where.capability()).block_shared, where.num_sms(), gemm.problem_of(tokens, packed)
    kernels = 2 if where.overlaps() and tokens <= SHARED_TOKENS else 1
    plans = list[Plan | WidePlan]()
    if off("gemm.cu") is None:
        plans += gemm_plan.best(problem, num_sms, limit, count, kernels)
    if gemm_wide.can_multiply(tokens, packed):
        plans += gemm_wide.best(problem, num_sms, limit, count)
    return tuple(sorted(plans, key=lambda plan: estimate(plan, problem, num_sms)))


def estimate(plan: Plan | WidePlan, problem: Problem, num_sms: int) -> float:
    """Estimated nanoseconds."""
    if isinstance(plan, WidePlan):
        return gemm_wide.estimate(plan, problem, num_sms)
    return gemm_plan.estimate(plan, problem, num_sms)


def kernels(packed: PackedWeight, dtype: torch.dtype, max_tokens: int) -> Iterator[Kernel]:
    """All kernels that products of the weight with up to `max_tokens` tokens launch."""
    buckets = (*BUCKETS, *PROMPT_BUCKETS)
    top = next((n for n in buckets if n >= max_tokens), buckets[-1])
    for tokens in buckets[: buckets.index(top) + 1]:
        plan = choose(tokens, packed, dtype)
        if plan is not None:
            yield from gemm.kernels_of(packed, plan, dtype, tokens)


def tune(
    weights: Iterable[PackedWeight],
    dtype: torch.dtype,
    library: Callable[[Tensor, PackedWeight], Tensor],
    *,
    buckets: tuple[int, ...] = (*BUCKETS, *PROMPT_BUCKETS),
    num_plans: int = MEASURED_PLANS,
    measure: Measure | None = None,
) -> list[Entry]:
    """Measure plans, and `library` from 64 tokens on, for each weight and bucket; save and return the best.

    This takes compile time and some milliseconds a plan. Raises OSError if the table cannot be saved.
    """
    found = []
    for packed in weights:
        device = packed.codes.device.type
        copies = _copies(packed)
        for tokens in buckets:
            x = torch.randn(tokens, packed.in_features, device=packed.codes.device).to(dtype)
            times = _times(x, copies, library, num_plans, measure or measure_on_device)
            if times:
                plan = min(times, key=lambda p: times[p])
                found.append(Entry(Key.of(packed, dtype), tokens, plan, times[plan]))
                table(device).add(found[-1])
                table(device).save()  # at once: a plan that is measured later may end the process
    return found


def _copies(packed: PackedWeight) -> list[PackedWeight]:
    size = packed.codes.numel() + packed.params.numel()
    return [packed, *(
        replace(packed, codes=packed.codes.clone(), params=packed.params.clone()) for _ in range(COLD_BYTES // size)
    )]  # fmt: skip


def _times(
    x: Tensor,
    copies: list[PackedWeight],
    library: Callable[[Tensor, PackedWeight], Tensor],
    num_plans: int,
    measure: Measure,
) -> dict[Plan | WidePlan | None, float]:
    """Microseconds by plan. A plan that a device refuses has no entry."""
    times: dict[Plan | WidePlan | None, float] = {}
    for plan in promising(x.shape[0], copies[0], num_plans):
        try:
            times[plan] = measure(partial(_multiply, x, copies, plan), len(copies))
        except RuntimeError as error:
            log.warning("%s cannot run: %s", plan, error)
    if x.shape[0] >= 64:
        times[None] = measure(lambda i: library(x, copies[i]), len(copies))
    return times


def _multiply(x: Tensor, copies: list[PackedWeight], plan: Plan | WidePlan, i: int) -> Tensor:
    return gemm.multiply(x, copies[i], plan)


def measure_on_device(launch: Callable[[int], Tensor], copies: int) -> float:
    """Microseconds of a launch with uncached weights. It is replayed from a graph, so host time does not count."""
    for i in range(min(2, copies)):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i % copies)
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return sorted(times)[REPLAYS // 2]
