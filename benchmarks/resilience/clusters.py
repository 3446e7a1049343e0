"""`lmkit up` with four replicas, of which two are killed, one is stopped and one drained under mixed streams.

`ray` needs a Ray cluster on this machine: `ray start --head --num-cpus 4`, and `pip install 'lmkit[ray]'`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable

import httpx
import psutil

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.failover import struck
from benchmarks.resilience.processes import START_SECONDS, Command
from lmkit.web.running import admin_key_at

REPLICAS = 4
SILENT_SECONDS = 5.0  # a stopped replica is replaced after them


def _ray_is_missing() -> str:
    return "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install 'lmkit[ray]'"


def lost_streams(setting: Setting, ray: str | None = None) -> float:
    """Streams that fail, or that are not the stream of a calm run. At the end all replicas must be ready again."""
    file = setting.workdir / "cluster.yaml"
    checks = {"port": 0, "policy": "round_robin", "health_interval": 0.5, "health_timeout": 1.0}
    group = {"model": "demo", "replicas": REPLICAS, "cores": 1, "options": {"kv_memory": "256M"}}
    file.write_text(json.dumps({"proxy": checks, "models": [group], "silent_seconds": SILENT_SECONDS, "ray": ray}))
    up = Command("up", str(file))
    try:
        servers = _servers(up)
        strikes: list[Callable[[], None]] = [
            lambda: servers[0].kill(),
            lambda: servers[1].kill(),
            lambda: _stop(servers[2]),
            lambda: servers[3].terminate(),
        ]
        lost = struck(up, strikes, 60 if setting.quick else 500)
        if {server.pid for server in _servers(up)} & {server.pid for server in servers}:
            raise RuntimeError("a replica was not replaced")
    finally:
        up.stop()
    return lost


def _servers(up: Command) -> list[psutil.Process]:
    """The replicas' front ends, once all are ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        headers = {"authorization": f"Bearer {admin_key_at(up.url)}"}
        nodes = httpx.get(up.url + "/admin/nodes", headers=headers).json()["data"]
        ports = [httpx.URL(node["url"]).port for node in nodes if node["healthy"] and not node["draining"]]
        if len(ports) == REPLICAS:
            sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            listening = {one.laddr.port: one.pid for one in sockets}  # type: ignore[union-attr]
            return [psutil.Process(listening[port]) for port in ports]
        time.sleep(0.2)
    raise RuntimeError(f"{REPLICAS} replicas are not ready:\n{up.log}")


def _stop(server: psutil.Process) -> None:
    for process in (server, *server.children(recursive=True)):
        os.kill(process.pid, signal.SIGSTOP)


NAME = "replicas of `lmkit up` killed, stopped, drained: streams that fail or change"
CASES = (Case(NAME, "", 0, lost_streams),)
RAY = (Case(f"{NAME}, on Ray", "", 0, functools.partial(lost_streams, ray="auto"), _ray_is_missing),)
