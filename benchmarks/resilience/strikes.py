"""More of `failover`: the first cluster of the README, whose nodes have no keys, and nodes struck at the same time."""

from __future__ import annotations

import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from random import Random

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.failover import Replicas, lost, struck
from benchmarks.resilience.processes import Command, until_healthy

ROUNDS = 6  # of strikes, each at two of three nodes


def first_cluster(setting: Setting, *, registers: bool) -> float:
    """Streams that fail or change while one of two nodes without keys is killed, and stays away."""
    state = str(setting.workdir / "state")
    running: list[Command] = []

    def start(*arguments: str) -> Command:
        running.append(Command(*arguments, "--port", "0", LMKIT_STATE_DIR=state))
        return running[-1]

    try:
        if registers:
            proxy = start("proxy")
            nodes = [start("serve", "demo", "--proxy", proxy.url) for _ in range(2)]
        else:
            nodes = [start("serve", "demo") for _ in range(2)]
            proxy = start("proxy", *(part for node in nodes for part in ("--node", node.url)))
        until_healthy(proxy, 2)
        kill = functools.partial(os.killpg, nodes[0].process.pid, signal.SIGKILL)
        return struck(proxy, [kill], 42 if setting.quick else 120)
    finally:
        for command in running:
            command.stop()


def struck_at_once(setting: Setting) -> float:
    """The share of streams, in percent, that fail or change while two of three nodes are struck again and again."""
    rng, count = Random(1), 42 if setting.quick else 360
    with Replicas(3) as replicas, ThreadPoolExecutor(2) as pool:
        deeds = (replicas.kill, replicas.pause, replicas.restart, replicas.kill_engine)

        def strike() -> None:
            struck_nodes = rng.sample(range(3), 2)
            running = [pool.submit(rng.choice(deeds), number) for number in struck_nodes]
            for deed in running:
                deed.result()

        return 100 * lost(setting, replicas.nodes, [strike] * (1 if setting.quick else ROUNDS), count) / count


_FIRST = "the README's first cluster, without keys, a node killed: streams that fail or change"
CASES = (
    Case(_FIRST, "", 0, functools.partial(first_cluster, registers=False)),
    Case(f"{_FIRST}; nodes that register", "", 0, functools.partial(first_cluster, registers=True)),
    Case("two of three nodes struck at once: streams that fail or change", "%", 1.0, struck_at_once),
)
