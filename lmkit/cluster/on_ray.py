"""Replicas on a Ray cluster: an actor each, in a placement group with its cores. Restarts are not Ray's but ours."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lmkit.cluster.gpus import num_gpus
from lmkit.cluster.processes import Child
from lmkit.devices import DEVICES
from lmkit.errors import ConfigError, LMKitError
from lmkit.extras import needed_for
from lmkit.web.listen import is_loopback

GRACE_SECONDS = 2.0  # in which an actor can end its server before the actor itself is ended
REACH_SECONDS = 5.0  # for a connection to a cluster's address; Ray itself goes on trying for minutes


class ServerActor:
    """Runs `lmkit serve` as a child process. If the actor dies, the child drains and ends."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._child: Child | None = None
        self._is_draining = False

    def __repr__(self) -> str:  # Ray writes it before each line of the actor
        return self._id

    async def run(self, options: Mapping[str, Any], cores: int) -> str:
        """How the server ended."""
        arguments = ["serve", "--config", "/dev/stdin"]
        self._child = await Child.start(self._id, arguments, _write, options=options, LMKIT_NUM_THREADS=str(cores))
        if self._is_draining:  # it was to end before it had begun
            self._child.drain()
        await self._child.wait()
        return self._child.ended

    async def drain(self) -> None:
        self._is_draining = True
        if self._child is not None:
            self._child.drain()

    async def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def _write(_: str, line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _reach(address: str) -> None:
    """Raises LMKitError if nothing listens at HOST:PORT. Other addresses, such as `auto`, are left to Ray."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), port), REACH_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LMKitError(f"ray: {address}: no connection: {reason}; `ray status` tells the cluster's address") from None


class RayReplica:
    """One actor and its placement group."""

    def __init__(self, ray: Any, actor: Any, group: Any, running: Any) -> None:
        self._ray, self._actor, self._group = ray, actor, group
        self.ended = ""
        self._watching = asyncio.create_task(self._watch(running))

    async def _watch(self, running: Any) -> None:
        try:
            ended = await running
        except self._ray.exceptions.RayError as error:
            ended = f"lost its actor: {str(error).splitlines()[0]}"
        self._release()
        self.ended = str(ended)

    def drain(self) -> None:
        self._actor.drain.remote()

    def kill(self) -> None:
        self._actor.kill.remote()  # a server that hangs would outlive its actor
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._release)

    def _release(self) -> None:
        """Give the cores back."""
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)
            self._ray.util.remove_placement_group(self._group)


class RayLauncher:
    """Connected to a Ray cluster until `close`."""

    def __init__(self, ray: Any, host: str) -> None:
        self._ray, self.host = ray, host

    @classmethod
    def connect(cls, address: str, proxy: str) -> RayLauncher:
        """`proxy` is where replicas reach the proxy.

        Raises UnsupportedError without Ray, LMKitError if the cluster cannot be reached, and ConfigError if its other
        machines cannot reach the proxy.
        """
        with needed_for("`ray` in a cluster's file"):
            import ray
        _reach(address)
        try:
            own = {"include_dashboard": False} if address == "local" else {}
            ray.init(address, configure_logging=False, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise LMKitError(f"ray: {address}: {str(error).splitlines()[0]}") from None
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        local = is_loopback(proxy.partition("//")[2].rpartition(":")[0].strip("[]"))
        if local and len(machines) > 1:
            raise ConfigError(
                f"Ray has {len(machines)} machines, and only this one reaches the proxy at {proxy}; "
                "set proxy.host to 0.0.0.0, and address to where the others reach it"
            )
        return cls(ray, "127.0.0.1" if local else "0.0.0.0")

    async def start(self, id: str, options: Mapping[str, Any], cores: int | None) -> RayReplica:
        """It waits in Ray's queue until a machine has its cores, those of all processes of an engine on one machine,
        and with device cuda its GPUs, which Ray shows to it alone."""
        tp, ep, pp = (int(options.get(name, 1)) for name in ("tp", "ep", "pp"))
        ray, bundle = self._ray, {"CPU": cores or max(tp, ep) * pp}
        device = DEVICES.get(options.get("device", ""))
        if device is not None and device.own_memory:
            bundle["GPU"] = num_gpus(options)
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        needs = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        remote = ray.remote(**needs, scheduling_strategy=strategy, max_restarts=0)(ServerActor)
        actor = remote.remote(id)
        running = actor.run.remote({**options, "host": self.host}, bundle["CPU"])
        return RayReplica(ray, actor, group, running)

    async def close(self) -> None:
        self._ray.shutdown()
