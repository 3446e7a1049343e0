"""gRPC through a proxy: routed, with keys, and with failover inside a stream."""

from __future__ import annotations

import itertools
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.resilience.processes import Command
from lmkit.web.rpc.messages import SERVICE
from tests.serve.test_grpc import Client

KEY, MINE = "node-key", "client-key"


def node(_: int) -> Command:
    return Command("serve", "demo", "--port", "0", "--api-key", f"{KEY} role=proxy")


def proxy(folder: Path, *nodes: Command) -> Command:
    entries = [f"  - {{url: {node.url}, models: [demo], api_key: {KEY}}}" for node in nodes]
    lines = ["policy: round_robin", f"api_keys: [{MINE}]", "nodes:", *entries]
    (folder / "proxy.yaml").write_text("\n".join(lines) + "\n")
    return Command("proxy", "--config", str(folder / "proxy.yaml"), "--port", "0", "--grpc-port", "0")


def test_calls_are_routed_checked_and_go_on_elsewhere(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(node, range(2)))
    commands = [*nodes, proxy(tmp_path, *nodes)]
    try:
        client = Client(commands[-1])
        request: dict[str, Any] = {"text": "def add(a, b):", "model": "demo"}
        request["sampling_params"] = {"max_tokens": 1000, "seed": 1, "temperature": 1.0, "ignore_eos": True}
        (calm,) = client.generate(key=MINE, **request)
        assert client.refused(key="wrong", **request).code() == grpc.StatusCode.UNAUTHENTICATED
        assert client.refused(key=MINE, text="Hi", model="other").code() == grpc.StatusCode.NOT_FOUND
        too_much = client.refused(key=MINE, text="Hi", model="demo", sampling_params={"top_p": 2})
        assert (too_much.code(), "top_p" in too_much.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        stub = health_pb2_grpc.HealthStub(client.channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status == 1

        parts = client.stream(key=MINE, **request)
        got = [next(parts)]
        tries = itertools.islice(itertools.cycle(nodes), 200)  # the metric may follow a little later
        _end(next(node for node in tries if _is_busy(node)))
        got += list(parts)
        assert [token for part in got for token in part.output_ids] == list(calm.output_ids)
        assert "".join(part.text for part in got) == calm.text
        assert "broke off" in commands[-1].log
    finally:
        for command in reversed(commands):
            command.stop()


def _is_busy(node: Command) -> bool:
    metrics = httpx.get(f"{node.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return re.search(r"^lmkit:num_requests_running\S* 1(\.0)?$", metrics, re.MULTILINE) is not None


def _end(node: Command) -> None:
    """At once, with its engine."""
    for process in (*node.children(), psutil.Process(node.process.pid)):
        process.send_signal(signal.SIGKILL)
