"""The kernel's memory policy of a thread. A machine with one node has it too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmkit.cores import available
from lmkit.kernels.cpu import numa, threads


def policy_of_new_memory() -> str:
    """The policy of memory that this thread takes: `default`, `interleave:0`."""
    memory = np.empty(64 << 20, np.uint8)  # large enough for a mapping of its own
    memory[:] = 1
    maps = Path(f"/proc/self/task/{threading.get_native_id()}/numa_maps").read_text().splitlines()
    begins = [int(line.split()[0], 16) for line in maps]
    return maps[np.searchsorted(begins, memory.ctypes.data, side="right") - 1].split()[1]


@pytest.fixture
def node() -> int:
    nodes = available().nodes
    if not nodes or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    with ThreadPoolExecutor(1) as pool:
        if not pool.submit(numa.interleave, nodes[:1]).result():
            pytest.skip("this container may set no memory policy")
    return nodes[0]


def test_pages_of_a_thread_are_interleaved(node: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(policy_of_new_memory).result() == "default"
        assert pool.submit(numa.interleave, [node]).result()
        assert pool.submit(policy_of_new_memory).result() == f"interleave:{node}"
        assert pool.submit(numa.interleave, [node]).result()  # it already is
    assert policy_of_new_memory() == "default"


def test_a_node_that_is_not_there_is_no_error() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(numa.interleave, [1023]).result()


def test_threads_of_an_engine_use_all_nodes(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, policy in (((node,), "default"), ((node, node), f"interleave:{node}")):
        monkeypatch.setattr(threads, "available", lambda nodes=nodes: replace(available(), nodes=nodes))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(threads.configure, threads.num_threads()).result()
            assert pool.submit(policy_of_new_memory).result() == policy
