"""Real routers in front of four fake nodes over HTTP: what share of the prompts' tokens do the nodes' caches have?

    python -m benchmarks.routing.live [--requests N] [--rate N] [--speed N] [--smg COMMAND]

The nodes are those of the simulation, on sockets, `--speed` times as fast as the clock. The trace is the simulation's.
`--smg "python -m sglang_router.launch_router"` runs SGLang's router beside `lmkit proxy` on the same trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.routing.__main__ import ideal
from benchmarks.routing.sim import Engine, Machine
from benchmarks.routing.trace import Ask, Conversation, Shape, conversations

NODES = 4
READY_SECONDS = 60.0
JSON = {"content-type": "application/json"}


class LiveNode:
    """An engine of the simulation behind a socket."""

    def __init__(self, machine: Machine, speed: float) -> None:
        self._engine, self._speed = Engine(machine), speed
        self._numbers = iter(range(1 << 40))
        self.prompt_tokens = self.cached_tokens = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        ask, now = Ask(*json.loads(body["metadata"]["ask"])), time.monotonic() * self._speed
        number = next(self._numbers)
        _, last, cached = self._engine.start(ask, now)
        self._engine.running[number] = None  # type: ignore[assignment]  # only their number counts
        self.prompt_tokens += ask.tokens
        self.cached_tokens += cached
        try:
            await asyncio.sleep((last - now) / self._speed)
        finally:
            del self._engine.running[number]
        message = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})

    def app(self) -> web.Application:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

        async def fine(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        app = web.Application(client_max_size=16 << 20)
        app.add_routes([
            web.post("/v1/chat/completions", self.answer), web.get("/v1/models", models), web.get("/{any:.*}", fine),
        ])  # fmt: skip
        return app


def text(owner: int, tokens: int) -> str:
    """Four letters for each token, always the same for an owner."""
    return Random(owner).randbytes(2 * tokens).hex()


def body(ask: Ask) -> bytes:
    system = {"role": "system", "content": text(2 * ask.group, ask.group_tokens)}
    user = {"role": "user", "content": text(2 * ask.conversation + 1, ask.tokens - ask.group_tokens)}
    fields = [ask.conversation, ask.group, ask.group_tokens, ask.tokens, ask.output]
    return json.dumps({"model": "m", "messages": [system, user], "metadata": {"ask": json.dumps(fields)}}).encode()


async def talk(
    http: aiohttp.ClientSession, url: str, conversation: Conversation, left: list[int], speed: float
) -> None:
    while conversation.left and left[0] > 0:
        left[0] -= 1
        async with http.post(url + "/v1/chat/completions", data=body(conversation.next()), headers=JSON) as answer:
            await answer.read()
            answer.raise_for_status()
        await asyncio.sleep(conversation.pause() / speed)


async def play(url: str, shape: Shape, seed: int, speed: float) -> None:
    left, start = [shape.requests], time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for when, conversation in conversations(shape, Random(seed + 1)):
            if left[0] <= 0:
                break
            await asyncio.sleep(max(0.0, start + when / speed - time.monotonic()))
            group.create_task(talk(http, url, conversation, left, speed))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def served(nodes: list[LiveNode]) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for node in nodes:
            runner = web.AppRunner(node.app(), access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            port = free_port()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            urls.append(f"http://127.0.0.1:{port}")
        yield urls


@contextlib.asynccontextmanager
async def routed(command: list[str], port: int) -> AsyncIterator[str]:
    """A router that has found its nodes."""
    url = f"http://127.0.0.1:{port}"
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=silent, stderr=silent)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    ask = body(Ask(0, 0, 4, 8, 1))
                    async with http.post(url + "/v1/chat/completions", data=ask, headers=JSON) as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.5)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def measured(name: str, command: list[str], port: int, options: Any) -> float:
    nodes = [LiveNode(Machine(), options.speed) for _ in range(NODES)]
    async with served(nodes) as urls:
        nodes_of = ["--worker-urls", *urls] if name != "lmkit" else [part for url in urls for part in ("--node", url)]
        async with routed([*command, *nodes_of], port) as url:
            await play(url, Shape(options.requests, options.rate), options.seed, options.speed)
    return share(nodes)


async def one_ideal(options: Any) -> float:
    nodes = [LiveNode(ideal(NODES), options.speed)]
    async with served(nodes) as (url,):
        await play(url, Shape(options.requests, options.rate), options.seed, options.speed)
    return share(nodes)


def share(nodes: list[LiveNode]) -> float:
    return sum(node.cached_tokens for node in nodes) / sum(node.prompt_tokens for node in nodes)


async def run(options: Any) -> None:
    best = await one_ideal(options)
    print(f"one ideal node          {best:.1%}", flush=True)
    port = free_port()
    ours = [sys.executable, "-m", "lmkit", "proxy", "--port", str(port)]
    routers = [("lmkit", ours, port)]
    if options.smg:
        port = free_port()
        fixed = ["--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(free_port())]
        routers.append(("smg", [*shlex.split(options.smg), *fixed], port))
    for name, command, port in routers:
        found = await measured(name, command, port, options)
        print(f"{name:<22}  {found:.1%}, {found / best:.1%} of the ideal node", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=0.8, help="conversations a second, by the nodes' clock")
    parser.add_argument("--speed", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smg", help="the command of SGLang's router")
    logging.disable(logging.CRITICAL)  # a router that tries another protocol first
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
