"""The measured peak rates of this machine: bytes read per second, integer dot products, multiply-adds of floats.

    python -m benchmarks.ceilings [--json FILE]

Arithmetic is measured with every instruction that an engine could use (benchmarks.loops). Memory is read in several
ways: pages of the usual size, huge pages and a shared mapping, with and without prefetching. The best value counts.

Other guests of the same host share its memory. What a virtual machine can read then changes from one minute to the
next, by more than a half. A ceiling holds only for figures that were measured beside it.
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from benchmarks.contention import undisturbed
from benchmarks.loops import AHEAD, READ, Kind, loops
from benchmarks.report import interleaved, machine, save
from lmkit.environment import default_num_threads
from lmkit.kernels.cpu import isa, threads

HUGE_PAGE = 2 << 20
LEAST_BYTES = 256 << 20  # that are read at once, also where the cache is small
UNKNOWN_CACHE = 64 << 20  # bytes, where the system does not tell
CACHES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Ceilings:
    """Peak rates. A multiply-add counts as two operations. Each field of operations is named after its `Kind`."""

    bytes_per_s: float
    int4_ops: float  # 4-bit codes with int8 activations, int32 sums
    int8_ops: float  # 8-bit codes
    bfloat16_ops: float  # bfloat16 or float16 products, float32 sums
    float_ops: float

    def roofline(self, num_bytes: float, num_ops: float, kind: Kind) -> float:
        """The least seconds that a call can take."""
        return max(num_bytes / self.bytes_per_s, num_ops / float(getattr(self, f"{kind}_ops")))

    @property
    def fastest_ops(self) -> float:
        """The rate that no engine exceeds, whatever its weights and activations are."""
        return max(self.int4_ops, self.int8_ops, self.bfloat16_ops, self.float_ops)

    def best(self, other: Self) -> Self:
        """The larger of each rate."""
        mine, theirs = asdict(self), asdict(other)
        return type(self)(**{name: max(rate, theirs[name]) for name, rate in mine.items()})

    def describe(self) -> str:
        return (
            f"reads {self.bytes_per_s / 1e9:.1f} GB/s; 4-bit dot {self.int4_ops / 1e9:.0f} GOP/s, "
            f"8-bit {self.int8_ops / 1e9:.0f}, bfloat16 {self.bfloat16_ops / 1e9:.0f} GFLOP/s, "
            f"float32 {self.float_ops / 1e9:.0f}"
        )


class Meter:
    """Measures the ceilings again and again, on all threads that the kernels use.

    `read_bytes` are read at once. If all weights together are smaller than the last-level cache, or not much larger,
    a step finds a part of them there. Reading as many bytes gives a ceiling for that. The default exceeds the cache.
    """

    def __init__(self, read_bytes: int | None = None) -> None:
        pieces = 8 * threads.num_threads()
        size = -(-(read_bytes or max(LEAST_BYTES, 2 * cache_bytes())) // (pieces * HUGE_PAGE)) * HUGE_PAGE  # of a piece
        self._calls: dict[str, Callable[[], None]] = {}
        self._work: dict[str, tuple[tuple[str, ...], int]] = {}  # call -> (fields of Ceilings, bytes or operations)
        self._best: Ceilings | None = None
        self._buffers = _buffers(pieces * size)
        for name, buffer in self._buffers.items():
            for ahead in AHEAD:
                call = partial(threads.run, READ, pieces, (buffer.data_ptr(), size, ahead))
                self._add(f"read, {name}, {ahead} bytes ahead", call, ("bytes_per_s",), pieces * size)
        for loop in loops():
            call = partial(threads.run, loop.task, pieces, loop.arguments, scratch=loop.scratch)
            self._add(loop.name, call, tuple(f"{kind}_ops" for kind in loop.kinds), pieces * loop.operations)

    def _add(self, name: str, call: Callable[[], None], fields: tuple[str, ...], work: int) -> None:
        self._calls[name], self._work[name] = call, (fields, work)

    def keep_fastest(self, rates: dict[str, float], count: int = 2) -> None:
        """Leave out all loops but the `count` fastest of each field: later measurements take a few tenths of a
        second."""
        fields = {field for names, _ in self._work.values() for field in names}
        ranked = sorted(rates, key=lambda name: -rates[name])
        kept = {name for field in fields for name in [n for n in ranked if field in self._work[n][0]][:count]}
        self._calls = {name: call for name, call in self._calls.items() if name in kept}
        self._work = {name: work for name, work in self._work.items() if name in kept}

    def measure(self, seconds: float = 0.0) -> tuple[Ceilings, dict[str, float]]:
        """(the ceilings, the rate of each loop). A ceiling is the best value measured, not the usual one. There are at
        least three turns."""
        best = interleaved(self._calls, seconds=seconds, rounds=1000, pick=min)
        rates = {name: work / best[name] for name, (_, work) in self._work.items()}
        fields: dict[str, float] = {}
        for name, rate in rates.items():
            for field in self._work[name][0]:
                fields[field] = max(fields.get(field, 0.0), rate)
        found = Ceilings(**fields)
        self._best = self._best.best(found) if self._best else found
        return found, rates

    def best_so_far(self) -> Ceilings:
        """The best of all measurements, this one included: what a virtual machine reads changes within seconds."""
        self.measure()
        assert self._best
        return self._best


def measure_ceilings(seconds: float = 5, read_bytes: int | None = None) -> Ceilings:
    """The peak rates while others leave the cores alone. `read_bytes` as in Meter."""
    meter = Meter(read_bytes)
    return undisturbed(lambda: meter.measure(seconds)[0])[0]


def cache_bytes() -> int:
    """Size of the last-level caches that this process's cores share."""
    found: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for folder in CACHES.glob(f"cpu{cpu}/cache/index*"):
            level, size, shared = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            found[int(level), shared] = int(size.removesuffix("K")) << 10
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or UNKNOWN_CACHE


def _buffers(size: int) -> dict[str, Tensor]:
    """Buffers of `size` bytes in memory of different kinds. torch fills them on all threads."""
    buffers = {
        "allocated": torch.empty(size, dtype=torch.uint8),
        "huge pages": _in_huge_pages(size),
        "shared": torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8),  # as the pages of a mapped file
    }
    return {name: buffer.fill_(1) for name, buffer in buffers.items()}


def _in_huge_pages(size: int) -> Tensor:
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    return buffer[start : start + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads.configure(default_num_threads())
    ceilings, rates = undisturbed(partial(Meter().measure, 5))[0]
    for name, rate in rates.items():
        print(f"{name:35} {rate / 1e9:8.1f} {'GB/s' if name.startswith('read') else 'GOP/s'}")
    print(f"{machine()['cpu']}, {threads.num_threads()} threads, {isa.describe()}: {ceilings.describe()}")
    if arguments.json:
        save(arguments.json, "ceilings", [asdict(ceilings) | {"loops": rates}], isa=isa.host().name)


if __name__ == "__main__":
    main()
