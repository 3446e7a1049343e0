"""Processes that share the model of an evaluation, as `--tp` and `--ep` share that of an engine (models.shard).

Rank 0 evaluates. The others compute the same windows in the same order, and their logits go to rank 0.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from lmkit.ended import MemoryKills
from lmkit.errors import EngineLostError
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.collective import SharedRanks, shared_bytes
from lmkit.models.spec import ModelSpec

Follow = Callable[[int, SharedRanks], None]  # what another rank does, by its number


@contextmanager
def others(follow: Follow, size: int, seq_len: int, spec: ModelSpec) -> Iterator[SharedRanks]:
    """Run ranks 1 and on, until the block ends. `follow` is their work, which can be pickled; `spec` is rank 0's.

    Raises EngineLostError if one of them ends early, with how it ended.
    """
    slot = -(-4 * max(seq_len * spec.hidden_size, spec.vocab_size) // 64) * 64
    num_bytes, num_threads = shared_bytes(size, slot), threads.num_threads()
    file = os.memfd_create("lmkit-eval")
    os.ftruncate(file, num_bytes)
    shared = SharedRanks(mmap.mmap(file, num_bytes), 0, size, slot, spec.vocab_size)
    context = multiprocessing.get_context("spawn")
    path, each = f"/proc/{os.getpid()}/fd/{file}", max(1, num_threads // size)
    arguments = [(follow, path, num_bytes, each, (rank, size, slot, spec.vocab_size)) for rank in range(1, size)]
    processes: list[BaseProcess] = [context.Process(target=_run, args=given, daemon=True) for given in arguments]
    kills = MemoryKills()
    for process in processes:
        process.start()
    threading.Thread(target=_watch, args=(processes, shared), daemon=True).start()
    threads.configure(each)
    try:
        yield shared
        if shared.is_lost:
            raise EngineLostError(_how_it_ended(processes, kills))
    finally:
        threads.configure(num_threads)
        for process in processes:
            process.kill()
            process.join()
        os.close(file)


def _how_it_ended(processes: list[BaseProcess], kills: MemoryKills) -> str:
    """How each rank ended that did."""
    ready = set(wait([process.sentinel for process in processes], timeout=0))
    ends = [(rank, _status(other)) for rank, other in enumerate(processes, 1) if other.sentinel in ready]
    how = ", ".join(f"process {rank} {kills.ended(status)}" for rank, status in ends)
    remedy = "use fewer processes, or free memory" if any(kills.killed(status) for _, status in ends) else ""
    return f"of this evaluation, {how}; {remedy or 'its message stands above'}"


def _status(process: BaseProcess) -> int:
    """The status of a process whose sentinel is ready. The sentinel comes a moment before the status can be had."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(follow: Follow, path: str, num_bytes: int, num_threads: int, where: tuple[int, int, int, int]) -> None:
    threads.configure(num_threads)
    file = os.open(path, os.O_RDWR)
    memory = mmap.mmap(file, num_bytes)
    os.close(file)
    follow(where[0], SharedRanks(memory, *where))
    threading.Event().wait()  # rank 0 ends it


def _watch(processes: list[BaseProcess], shared: SharedRanks) -> None:
    """A rank that ends leaves the others waiting for it."""
    wait([process.sentinel for process in processes])
    shared.lose()
