"""The cores that a process may use, read from trees of files like those of Linux."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmkit.cores import Cores, available, shares

TWO_SOCKETS = [[core, core + 8] for core in range(8)]
NODES = {0: "0-3,8-11", 1: "4-7,12-15"}


def write(root: Path, files: dict[str, str]) -> None:
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def machine(root: Path, cores: list[list[int]], nodes: dict[int, str], siblings: str = "core_cpus_list") -> None:
    """Write the topology: the CPUs of each core, and the CPUs of each NUMA node. Offline CPUs have no such files."""
    of_cpu, of_node = f"sys/devices/system/cpu/cpu%d/topology/{siblings}", "sys/devices/system/node/node%d/cpulist"
    write(root, {of_cpu % cpu: ",".join(map(str, cpus)) for cpus in cores for cpu in cpus})
    write(root, {of_node % node: text for node, text in nodes.items()})


@pytest.mark.parametrize("siblings", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("cpus", "physical", "nodes"),
    [
        (range(16), 8, (0, 1)),
        (range(8), 8, (0, 1)),
        ([0, 1, 2, 3, 8, 9, 10, 11], 4, (0,)),
        ([4, 12], 1, (1,)),  # both threads of one core
        ([0, 9, 14], 3, (0, 1)),  # holes in the CPU set
    ],
)
def test_threads_of_a_core_count_once(
    tmp_path: Path, siblings: str, cpus: list[int], physical: int, nodes: tuple[int, ...]
) -> None:
    machine(tmp_path, TWO_SOCKETS, NODES, siblings)
    cores = available(tmp_path, cpus)
    assert cores == Cores(len(cpus), physical, nodes, math.inf)
    assert cores.usable == physical


def test_hybrid_processors_and_offline_threads(tmp_path: Path) -> None:
    machine(tmp_path, [[0, 1], [2], [4], [5], [6]], {0: "0-2,4-6"})  # CPU 3 is offline, 4 to 6 are small cores
    assert available(tmp_path, [0, 1, 2, 4, 5, 6]).usable == 5


def test_without_files_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert available(tmp_path, [3, 5, 7]) == Cores(3, 3, (), math.inf)


def test_a_node_without_cpus_is_not_used(tmp_path: Path) -> None:
    machine(tmp_path, [[0], [1]], {0: "0-1", 1: "", 2: "2"})
    assert available(tmp_path, [0, 1]).nodes == (0,)


@pytest.mark.parametrize(
    ("groups", "files", "quota", "usable"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2.5, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 4),
        ("0::/", {"cpu.max": ""}, math.inf, 4),
        ("0::/", {}, math.inf, 4),
        # a service in a slice: the tighter group holds
        ("0::/a/b", {"a/cpu.max": "150000 50000", "a/b/cpu.max": "max 100000"}, 3, 3),
        ("0::/a/b", {"a/cpu.max": "900000 100000", "a/b/cpu.max": "300000 100000"}, 3, 3),
        # version 1; a container sees its own group as the root, although its path is the host's
        ("4:cpu,cpuacct:/docker/1", {"cpu/cpu.cfs_quota_us": "210000", "cpu/cpu.cfs_period_us": "100000"}, 2.1, 2),
        ("4:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, 4),
    ],
)
def test_a_quota_is_never_exceeded(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float, usable: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{file}": text for file, text in files.items()})
    cores = available(tmp_path, range(4))
    assert (cores.quota, cores.usable) == (quota, usable)


@pytest.mark.parametrize(
    ("count", "cpus", "want"),
    [
        (2, range(16), [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),  # a node each
        (4, range(16), [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),  # whole cores of a node
        (2, [2, 3, 4], [[2, 3], [4]]),  # what the scheduler leaves of the nodes
        (4, [0, 8, 4, 12], [[0], [8], [4], [12]]),  # more processes than cores
        (3, range(16), [[], [], []]),
        (4, [0, 4], [[], [], [], []]),
        (2, range(4), [[], []]),  # one node
    ],
)
def test_processes_have_nodes_of_their_own(tmp_path: Path, count: int, cpus: list[int], want: list[list[int]]) -> None:
    machine(tmp_path, TWO_SOCKETS, NODES)
    assert shares(count, tmp_path, cpus) == want


def test_a_process_has_several_nodes(tmp_path: Path) -> None:
    machine(tmp_path, [[cpu] for cpu in range(8)], {node: f"{2 * node}-{2 * node + 1}" for node in range(4)})
    assert shares(2, tmp_path, range(8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_description_names_what_limits() -> None:
    assert Cores(2, 2, (0,), math.inf).describe() == "2 cores of 2 CPUs"
    assert Cores(1, 1, (), 4.0).describe() == "1 core of 1 CPU"
    assert Cores(32, 16, (0, 1), 2.5).describe() == "16 cores of 32 CPUs on 2 NUMA nodes, quota 2.5 CPUs"


def test_the_default_obeys_taskset() -> None:
    first = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{first}]); from lmkit.environment import default_num_threads as threads; "
        "print(threads())"
    )
    variables = {name: text for name, text in os.environ.items() if name != "LMKIT_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
