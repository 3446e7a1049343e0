"""Who starts the ranks of an engine on other machines: Ray, or torchrun. Each tells them where the engine listens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol

from lmkit.config import EngineConfig
from lmkit.environment import environment
from lmkit.errors import ConfigError, LMKitError
from lmkit.extras import needed_for
from lmkit.log import get_logger
from lmkit.turbo.runners.processes import PROCESS

log = get_logger(__name__)

PLACE_SECONDS = 300.0  # for cores to become free
WAIT_DAYS = 365  # for the next start of an engine


class Placer(Protocol):
    """`host` is this machine as the others reach it."""

    host: str

    def place(self, address: str, key: str) -> None:
        """Have all ranks but the first come to `address`. Raises LMKitError if they cannot be started."""


def join(address: str, key: str) -> int:
    """Run a rank of the engine at `address` in a process of its own, until it ends. Returns its status."""
    return subprocess.run([sys.executable, "-m", PROCESS, address], input=key.encode(), check=False).returncode


class RayPlacer:
    """A placement group with the cores of all ranks, on machines of their own if there are as many."""

    def __init__(self, config: EngineConfig) -> None:
        with needed_for("--cluster ray"):
            import ray
        self._ray: Any = ray
        self._count, self._cores = config.num_ranks, config.num_threads
        try:
            ray.init("auto", configure_logging=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise LMKitError(f"--cluster ray: {str(error).splitlines()[0]}") from None
        self.host: str = ray.util.get_node_ip_address()

    def place(self, address: str, key: str) -> None:
        """See Placer."""
        ray = self._ray
        machines = sum(node["Alive"] for node in ray.nodes())
        bundles: list[dict[str, float]] = [{"CPU": self._cores or 1} for _ in range(self._count)]
        bundles[0][f"node:{self.host}"] = 0.001  # that of rank 0
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if machines >= self._count else "SPREAD")
        try:
            ray.get(group.ready(), timeout=PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(group)
            raise LMKitError(
                f"--cluster ray: {self._count} times {self._cores} cores were not free within {PLACE_SECONDS:.0f} s; "
                "`ray status` shows what is used, and num_threads is that of all ranks"
            ) from None
        for rank in range(1, self._count):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, rank)
            task = ray.remote(num_cpus=self._cores, max_retries=0, scheduling_strategy=strategy)(join)
            task.remote(address, key)


class TorchrunPlacer:
    """The other processes that torchrun has started wait in `follow`."""

    def __init__(self, config: EngineConfig) -> None:
        if environment().world_size != config.num_ranks:
            raise ConfigError(
                f"--cluster torchrun: torchrun has started {environment().world_size} processes, "
                f"and tp={config.num_ranks} needs as many"
            )
        self.host, _ = environment().rendezvous

    def place(self, address: str, key: str) -> None:
        """See Placer."""
        store = _torchrun_store()
        store.set(f"lmkit/{store.add('lmkit/starts', 1)}", f"{address} {key}")


def follow() -> None:
    """In another process of torchrun than the first: run a rank of each engine that the first one starts, until that
    one ends."""
    start, store = 1, _torchrun_store()
    while True:
        try:
            address, key = store.get(f"lmkit/{start}").decode().split()
        except RuntimeError:  # the connection to torchrun's store has ended
            return
        status = join(address, key)
        log.info("the rank has ended with status %s; waiting for the engine's next start", status)
        start += 1


def _torchrun_store() -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = environment().rendezvous
    return TCPStore(host, port, is_master=False, timeout=timedelta(days=WAIT_DAYS))


PLACERS: dict[str, Callable[[EngineConfig], Placer]] = {"ray": RayPlacer, "torchrun": TorchrunPlacer}
