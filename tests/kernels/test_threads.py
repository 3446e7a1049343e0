"""The pool that tasks run on, and the cache that they are compiled into."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import carray

from lmkit.errors import ConfigError
from lmkit.kernels.cpu import jit, threads
from lmkit.kernels.cpu.intrinsics import SLEEPER, add, pointer, unpack, wait_for, wake


def _count(args: int, scratch: int, index: int) -> None:
    """Count index and use all of the scratch."""
    counts, scratch_bytes = unpack(args, 2)
    carray(pointer(scratch), scratch_bytes, np.uint8)[:] = 255
    add(counts + 8 * index, 1)


COUNT = jit.Task(_count)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.configure(before)


def run_counts(count: int, **how: bool) -> list[int]:
    counts = torch.zeros(count + 1, dtype=torch.int64)
    threads.run(COUNT, count, (counts.data_ptr(), 5000), scratch=5000, **how)
    assert counts[-1] == 0
    return [int(n) for n in counts[:-1].tolist()]


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_every_index_is_run_once(num_threads: int) -> None:
    threads.configure(num_threads)
    assert torch.get_num_threads() == num_threads
    for count in (0, 1, 5, 3000):
        assert run_counts(count) == run_counts(count, parallel=False) == run_counts(count, in_order=True) == [1] * count


def test_jobs_of_a_program_run_apart_too() -> None:
    counts = torch.zeros(3, dtype=torch.int64)
    with threads.capturing() as program:
        threads.run(COUNT, 3, (counts.data_ptr(), 64), scratch=64)
        threads.run_aside(COUNT, 2, (counts.data_ptr(), 64), scratch=64)
    (jobs,) = program.parts
    assert isinstance(jobs, threads.Jobs)
    for task, job in jobs.apart():
        assert task == COUNT.address
        job()
    assert counts.tolist() == [2, 2, 1]


def test_numbas_pool_takes_over_where_openmp_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_openmp_libraries", list)
    monkeypatch.setattr(threads, "_POOL", threads._Pool())
    threads.configure(2)
    assert run_counts(500) == [1] * 500


def test_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        threads.configure(0)


def test_compiled_kernels_are_kept_on_disk() -> None:
    assert COUNT.address
    assert list(jit.cache_directory().glob("_count-*.kernel"))


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(jit, "cache_directory", lambda: blocked / "kernels")
    assert jit.Task(_count).address


def _clash(args: int, scratch: int, index: int) -> None:
    """Count what an array of the task's own has in common with its scratch."""
    common, scratch_bytes = unpack(args, 2)
    mine = carray(pointer(scratch), scratch_bytes, np.uint8)
    mine[:] = 0
    other = np.empty(scratch_bytes + 64, np.uint8)
    other[:] = 1
    add(common, np.int64(mine.sum()))


CLASH = jit.Task(_clash)


@pytest.mark.parametrize("scratch", [256, 5000, 1 << 20])
def test_scratch_belongs_to_its_thread_until_the_work_is_done(scratch: int) -> None:
    common = torch.zeros(1, dtype=torch.int64)
    threads.run(CLASH, 500, (common.data_ptr(), scratch), scratch=scratch)
    assert not common


def _double(args: int, scratch: int, index: int) -> None:
    """target[index] = source[index] + source[count - 1 - index]: needs all of what the job before wrote."""
    source, target, count = unpack(args, 3)
    values, out = carray(pointer(source), count, np.int64), carray(pointer(target), count, np.int64)
    out[index] = values[index] + values[count - 1 - index]


DOUBLE = jit.Task(_double)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_program_runs_its_jobs_in_order_each_time(num_threads: int) -> None:
    threads.configure(num_threads)
    count, depth = 37, 40
    values = [torch.zeros(count, dtype=torch.int64) for _ in range(depth)]
    with threads.capturing() as program:
        for i, (source, target) in enumerate(itertools.pairwise(values)):
            threads.run(DOUBLE, count, (source.data_ptr(), target.data_ptr(), count), parallel=i % 5 != 0)
    assert not any(x.any() for x in values)  # nothing ran yet
    for start in range(20):
        values[0][:] = torch.arange(count) + start
        program.launch()
        expected = values[0]
        for x in values[1:]:
            expected = expected + expected.flip(0)
            assert torch.equal(x, expected)


def test_a_program_calls_the_host_between_jobs() -> None:
    threads.configure(2)
    first, second, third = (torch.zeros(5, dtype=torch.int64) for _ in range(3))
    seen = []
    with threads.capturing() as program:
        threads.run(DOUBLE, 5, (first.data_ptr(), second.data_ptr(), 5))
        threads.run_on_host(lambda: seen.append(second.tolist()))
        threads.run(DOUBLE, 5, (second.data_ptr(), third.data_ptr(), 5))
    assert not seen
    for start in range(3):
        first[:] = torch.arange(5) + start
        third.zero_()
        program.launch()
        assert seen[start] == [4 + 2 * start] * 5
        assert third.tolist() == [8 + 4 * start] * 5


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("calls_host", [False, True])
def test_a_job_aside_is_done_when_it_is_joined(num_threads: int, calls_host: bool) -> None:
    """Also if the host is called before. Jobs after it in the program run before it is joined, or beside it."""
    threads.configure(num_threads)
    count = 50
    first, aside, second, third, fourth = (torch.zeros(count, dtype=torch.int64) for _ in range(5))

    def double(source: torch.Tensor, target: torch.Tensor) -> tuple[int, ...]:
        return source.data_ptr(), target.data_ptr(), count

    def compute() -> None:
        join = threads.run_aside(DOUBLE, count, double(first, aside))
        threads.run(DOUBLE, count, double(first, second))
        if calls_host:
            threads.run_on_host(lambda: seen.append(aside.tolist()))
        threads.run(DOUBLE, count, double(second, third), in_order=True)
        join()
        threads.run(DOUBLE, count, double(aside, fourth))

    seen: list[list[int]] = []
    compute()  # at once
    with threads.capturing() as program:
        compute()
    for start in range(30):
        first[:] = torch.arange(count) + start
        aside.zero_()
        program.launch()
        once = first + first.flip(0)
        assert torch.equal(aside, once)
        assert torch.equal(third, 2 * once)
        assert torch.equal(fourth, 2 * once)
        assert not calls_host or seen[-1] == once.tolist()


def test_an_empty_program_ends() -> None:
    with threads.capturing() as program:
        pass
    program.launch()


def _wait(args: int, scratch: int, index: int) -> None:
    """The first index waits until the counter at `args` is set."""
    (counter,) = unpack(args, 1)
    if index == 0:
        wait_for(counter, 1)


def _set(args: int, scratch: int, index: int) -> None:
    (counter,) = unpack(args, 1)
    add(counter, 1)
    wake(counter)


WAIT, SET = jit.Task(_wait), jit.Task(_set)


def test_threads_that_wait_for_long_sleep() -> None:
    """One thread waits inside a task, the others for that thread. None of them uses a core."""
    threads.configure(3)
    counter = torch.zeros(1, dtype=torch.int64)
    threads.run(SET, 1, (torch.zeros_like(counter).data_ptr(),))  # compiled now, not while the others wait
    program = threading.Thread(target=threads.run, args=(WAIT, 100, (counter.data_ptr(),)))
    program.start()
    while not counter >= SLEEPER:
        time.sleep(0.01)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    threads.run(SET, 1, (counter.data_ptr(),))
    program.join(60)
    assert not program.is_alive()
    assert used < 0.25  # of 0.5 seconds for each of the threads, if they did not sleep
