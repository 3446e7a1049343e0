"""Clients that hold connections, or send in ways that cost the server much.

The cases run against one server, and against one proxy before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, HealthProbe, routing, serving

OPEN_FILES = 1024
KEY = "the-key"
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Authorization: Bearer {key}\r\n"
)
Attack = Callable[[Command, float, int], Coroutine[Any, Any, None]]


async def hold(command: Command, seconds: float, number: int, first: bytes = b"", *, again: bool = False) -> None:
    """Connections that send `first` and then nothing. `again`: one that the server closes connects once more."""
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            writer = None
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(end - time.monotonic()):
                    reader, writer = await asyncio.open_connection(*command.address)
                    writer.write(first)
                    await reader.read()
            if writer is not None:
                writer.close()
            if not again:
                return
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(number)))


async def silent(command: Command, seconds: float, number: int) -> None:
    await hold(command, seconds, number)


async def reconnecting(command: Command, seconds: float, number: int) -> None:
    await hold(command, seconds, number, again=True)


async def slow_heads(command: Command, seconds: float, number: int) -> None:
    await hold(command, seconds, number, b"GET / HTTP/1.1\r\nHo")


async def unfinished_bodies(command: Command, seconds: float, number: int) -> None:
    await hold(command, seconds, number, (HEAD.format(key=KEY) + "Content-Length: 100\r\n\r\n{").encode())


async def tiny_chunks(command: Command, seconds: float, *, key: str) -> None:
    """Four clients that send a body in one-byte chunks, 2 MB/s each, and connect again when they are cut off."""
    end = time.monotonic() + seconds
    head, piece = (HEAD.format(key=key) + "Transfer-Encoding: chunked\r\n\r\n").encode(), b"1\r\n \r\n" * 3333

    async def one() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(max(0, end - time.monotonic())):
                    _, writer = await asyncio.open_connection(*command.address)
                    try:
                        writer.write(head)
                        while True:
                            writer.write(piece)
                            await writer.drain()
                            await asyncio.sleep(0.01)
                    finally:
                        writer.close()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(4)))


async def chunks_with_a_wrong_key(command: Command, seconds: float, number: int) -> None:
    await tiny_chunks(command, seconds, key="wrong")


async def chunks_with_the_key(command: Command, seconds: float, number: int) -> None:
    await tiny_chunks(command, seconds, key=KEY)


ATTACKS: dict[str, tuple[Attack, float]] = {  # and its seconds at full size
    "silent connections": (silent, 8.0),
    "clients that reconnect at once": (reconnecting, 4.0),
    "slow heads": (slow_heads, 4.0),
    "unfinished bodies": (unfinished_bodies, 4.0),
    "one-byte chunks with a wrong key": (chunks_with_a_wrong_key, 5.0),
    "one-byte chunks with the key": (chunks_with_the_key, 5.0),
}


@contextlib.contextmanager
def both(setting: Setting) -> Iterator[tuple[Command, Command]]:
    """A server, and a proxy before it."""
    files = OPEN_FILES // 2 if setting.quick else OPEN_FILES
    with serving("--api-key", KEY, max_open_files=files) as server:
        config = setting.workdir / "proxy.yaml"
        config.write_text(json.dumps({"nodes": [{"url": server.url, "api_key": KEY}], "api_keys": [KEY]}))
        with routing(options=("--config", str(config)), max_open_files=files) as proxy:
            yield server, proxy


async def seconds_to_notice(command: Command, server: Command) -> float:
    """Until the engine stops a request whose client sent one more byte and left."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 900, "n": 64, "ignore_eos": True}).encode()

    async def num_running(http: httpx.AsyncClient) -> float:
        text = (await http.get(f"{server.url}/metrics", headers=headers)).text
        return float(re.findall(r"(?m)^\S*num_requests_running\S* (\S+)", text)[0])

    async with httpx.AsyncClient(timeout=60) as http:
        _, writer = await asyncio.open_connection(*command.address)
        writer.write((HEAD.format(key=KEY) + f"Content-Length: {len(body)}\r\n\r\n").encode() + body)
        while not await num_running(http):
            await asyncio.sleep(0.01)
        writer.write(b"x")
        await asyncio.sleep(0.1)
        writer.close()
        start = time.monotonic()
        while await num_running(http):
            await asyncio.sleep(0.01)
        return time.monotonic() - start


@shared
def run(setting: Setting) -> dict[str, float]:
    """The worst /health of server and proxy under each attack, the log in MiB, and the seconds to a disconnect.

    One run serves all cases.
    """
    figures = dict.fromkeys(ATTACKS, 0.0)
    with both(setting) as commands:
        for name, (attack, length) in ATTACKS.items():
            number, seconds = (400, 0.6) if setting.quick else (2000, length)
            for command in commands:
                with HealthProbe(command.url) as health:
                    asyncio.run(attack(command, seconds, number))
                figures[name] = max(figures[name], health.worst)
        figures["disconnect"] = max(asyncio.run(seconds_to_notice(command, commands[0])) for command in commands)
        figures["log"] = max(command.num_log_bytes for command in commands) / 2**20
    return figures


def _case(name: str, unit: str, limit: float, figure: str) -> Case:
    return Case(name, unit, limit, lambda setting: run(setting)[figure])


CASES = (
    *(_case(f"{name}: worst /health", "s", 0.5, name) for name in ATTACKS),
    _case("a client that sends one more byte and leaves: time until its request ends", "s", 1.0, "disconnect"),
    _case("log under all of these attacks", "MiB", 1.0, "log"),
)
