"""What `lmkit proxy` costs beside its node, and how many requests a core of it carries, also next to LiteLLM's proxy.

    python -m benchmarks.proxy_overhead [--litellm FILE] [--json FILE]

The node is a fake one that answers at once, in a process of its own. At 200 requests a second, sent at fixed times, the
same requests go to the node and through each proxy, in turns: a delay is the difference of the medians, and of the
99th percentiles. With as many requests as 16 connections carry, the CPU seconds of the proxy's process give the
requests per core. A proxy that carries fewer than 240 requests a second has no delay. FILE is LiteLLM's command
(`litellm`); it runs with one worker and without a database.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.ports import free_port

RATE, SECONDS, ROUNDS = 200, 4.0, 3
CONNECTIONS, FULL_SECONDS = 16, 4.0
ADMIN = "admin-key-of-the-benchmark"
PATH = "/v1/chat/completions"
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "Say something short. " * 20}], "max_tokens": 16}
).encode()
ANSWER = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Something short."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 90, "completion_tokens": 4, "total_tokens": 94},
}).encode()  # fmt: skip


class Target(NamedTuple):
    name: str
    port: int
    key: str
    process: psutil.Process | None  # None: the node itself


class Node(asyncio.Protocol):
    """Answers every request at once."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._held = transport, b""

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._held) < end + 4 + length:
                return
            self._held = self._held[end + 4 + length :]
            body = ANSWER if head.startswith(b"post") else b'{"data": [{"id": "m", "object": "model"}]}'
            lines = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(lines % len(body) + body)


async def serve_node() -> None:
    server = await asyncio.get_running_loop().create_server(Node, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Client:
    """One connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        head = f"POST {PATH} HTTP/1.1\r\nHost: [::]\r\nAuthorization: Bearer {target.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
        self._request = head.encode() + BODY

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._target.port)

    async def ask(self) -> float:
        """Seconds of one request."""
        start = time.perf_counter()
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{self._target.name} answered {head[:60]!r}")
        lowered = head.lower()
        if (at := lowered.find(b"content-length:")) >= 0:
            await self._reader.readexactly(int(lowered[at + 15 :].split(b"\r\n", 1)[0]))
        else:
            while (size := int(await self._reader.readline(), 16)) > 0:
                await self._reader.readexactly(size + 2)
            await self._reader.readline()
        return time.perf_counter() - start

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def clients(target: Target, count: int) -> AsyncIterator[list[Client]]:
    opened = [Client(target) for _ in range(count)]
    for client in opened:
        await client.open()
        await client.ask()
    try:
        yield opened
    finally:
        for client in opened:
            client.close()


async def at_rate(target: Target) -> list[float]:
    """Seconds of each request, from the time at which it was due."""
    times: list[float] = []
    async with clients(target, 8) as free:
        queue = asyncio.Queue[Client]()
        for client in free:
            queue.put_nowait(client)

        async def one(due: float) -> None:
            client = await queue.get()
            late = max(0.0, time.perf_counter() - due)
            times.append(late + await client.ask())
            queue.put_nowait(client)

        start, asking = time.perf_counter(), []
        for i in range(int(RATE * SECONDS)):
            due = start + i / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.append(asyncio.create_task(one(time.perf_counter())))  # this process' own delay is not the proxy's
        await asyncio.gather(*asking)
    return times


async def at_full_load(target: Target) -> tuple[float, float]:
    """(requests a second, requests per CPU second of the proxy)."""
    assert target.process is not None
    async with clients(target, CONNECTIONS) as opened:
        count, cpu, start = 0, _cpu(target.process), time.perf_counter()

        async def ask(client: Client) -> None:
            nonlocal count
            while time.perf_counter() - start < FULL_SECONDS:
                await client.ask()
                count += 1

        await asyncio.gather(*map(ask, opened))
        return count / (time.perf_counter() - start), count / (_cpu(target.process) - cpu)


def _cpu(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(used.user + used.system for used in times))


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _lmkit(stack: contextlib.ExitStack, name: str, node: int, *options: str) -> tuple[Target, str]:
    """(the proxy, its URL)"""
    command = [sys.executable, "-m", "lmkit", "proxy", "--port", "0", "--node", f"http://127.0.0.1:{node}", *options]
    process = stack.enter_context(started(command))
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    return Target(name, int(url.rpartition(":")[2]), "none", psutil.Process(process.pid)), url


def _litellm(stack: contextlib.ExitStack, command: str, node: int, folder: Path) -> Target:
    url = f"http://127.0.0.1:{node}/v1"
    config = {
        "model_list": [{"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": url, "api_key": "x"}}],
        "general_settings": {"master_key": "sk-benchmark"},
    }
    (folder / "litellm.yaml").write_text(json.dumps(config))
    port = free_port()
    options = [
        "--config",
        str(folder / "litellm.yaml"),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--num_workers",
        "1",
    ]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    process = stack.enter_context(started([command, *options], env=environment, cwd=folder))
    for _ in range(240):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health/liveliness").is_success:
                return Target("LiteLLM", port, "sk-benchmark", psutil.Process(process.pid))
        time.sleep(0.25)
    raise SystemExit(f"{command} does not answer")


def targets(stack: contextlib.ExitStack, litellm: str | None) -> list[Target]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    serving = stack.enter_context(started([sys.executable, "-m", "benchmarks.proxy_overhead", "--node"]))
    assert serving.stdout is not None
    node = int(serving.stdout.readline())
    plain, _ = _lmkit(stack, "lmkit proxy", node)
    config = folder / "proxy.json"
    config.write_text(json.dumps({"admin_keys": [ADMIN], "key_store": str(folder / "keys.db"), "prices": {"m": {}}}))
    keyed, url = _lmkit(stack, "lmkit proxy with keys", node, "--config", str(config))
    limits = {"tokens/month": 1 << 40, "money/month": 1000, "requests/day": 1 << 40}
    headers = {"authorization": f"Bearer {ADMIN}"}
    made = httpx.post(f"{url}/admin/keys", json={"name": "a", "limits": limits}, headers=headers).json()
    found = [Target("node", node, "none", None), plain, keyed._replace(key=made["key"])]
    return [*found, _litellm(stack, litellm, node, folder)] if litellm else found


async def measure(found: list[Target]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for target in found:
        rows.append({"proxy": target.name})
        if target.process is not None:
            rates = [await at_full_load(target) for _ in range(2)]
            rows[-1] |= {"requests_per_second": max(r for r, _ in rates), "requests_per_core": max(r for _, r in rates)}
    able = [t for t, row in zip(found, rows, strict=True) if row.get("requests_per_second", RATE * 2) > RATE * 1.2]
    times: dict[str, list[float]] = {target.name: [] for target in able}
    for _ in range(ROUNDS):
        for target in able:
            times[target.name] += await at_rate(target)
    node = _percentiles(times[found[0].name])
    for row in rows:
        if row["proxy"] in times:
            p50, p99 = _percentiles(times[row["proxy"]])
            row |= {"p50_ms": p50, "p99_ms": p99, "delay_p50_ms": p50 - node[0], "delay_p99_ms": p99 - node[1]}
    return rows


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="LiteLLM's command")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        asyncio.run(serve_node())
        return
    with contextlib.ExitStack() as stack:
        rows = asyncio.run(measure(targets(stack, options.litellm)))
    table = Table("", "p50", "p99", "delay p50", "delay p99", "requests/s", "per core")
    for row in rows:
        figures = [row.get(name) for name in ("p50_ms", "p99_ms", "delay_p50_ms", "delay_p99_ms")]
        rates = (row.get("requests_per_second"), row.get("requests_per_core"))
        table.add_row(
            row["proxy"],
            *("" if value is None else f"{value:.2f} ms" for value in figures),
            *("" if value is None else f"{value:.0f}" for value in rates),
        )
    Console(width=100).print(table)
    if options.json:
        report.save(options.json, "proxy_overhead", rows)


if __name__ == "__main__":
    main()
