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
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.ports import free_port
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

    async def answer(self, request: Request) -> JSONResponse:
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
        return JSONResponse({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})

    def app(self) -> Starlette:
        async def models(_: Request) -> JSONResponse:
            return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

        async def fine(_: Request) -> JSONResponse:
            return JSONResponse({"status": "ok"})

        routes = [Route("/v1/chat/completions", self.answer, methods=["POST"]), Route("/v1/models", models)]
        return Starlette(routes=[*routes, Route("/{any:path}", fine)])


def text(owner: int, tokens: int) -> str:
    """Four letters for each token, always the same for an owner."""
    return Random(owner).randbytes(2 * tokens).hex()


def body(ask: Ask) -> bytes:
    system = {"role": "system", "content": text(2 * ask.group, ask.group_tokens)}
    user = {"role": "user", "content": text(2 * ask.conversation + 1, ask.tokens - ask.group_tokens)}
    fields = [ask.conversation, ask.group, ask.group_tokens, ask.tokens, ask.output]
    return json.dumps({"model": "m", "messages": [system, user], "metadata": {"ask": json.dumps(fields)}}).encode()


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None, trust_env=False, headers=JSON)


async def talk(http: httpx.AsyncClient, url: str, conversation: Conversation, left: list[int], speed: float) -> None:
    while conversation.left and left[0] > 0:
        left[0] -= 1
        answer = await http.post(url + "/v1/chat/completions", content=body(conversation.next()))
        answer.raise_for_status()
        await asyncio.sleep(conversation.pause() / speed)


async def play(url: str, shape: Shape, seed: int, speed: float) -> None:
    left, start = [shape.requests], time.monotonic()
    async with new_client() as http, asyncio.TaskGroup() as group:
        for when, conversation in conversations(shape, Random(seed + 1)):
            if left[0] <= 0:
                break
            await asyncio.sleep(max(0.0, start + when / speed - time.monotonic()))
            group.create_task(talk(http, url, conversation, left, speed))


@contextlib.asynccontextmanager
async def served(nodes: list[LiveNode]) -> AsyncIterator[list[str]]:
    ports = [free_port() for _ in nodes]
    servers = [
        uvicorn.Server(uvicorn.Config(node.app(), port=port, log_level="critical"))
        for node, port in zip(nodes, ports, strict=True)
    ]
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(server.serve())
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        yield [f"http://127.0.0.1:{port}" for port in ports]
        for server in servers:
            server.should_exit = True


@contextlib.asynccontextmanager
async def routed(command: list[str], port: int) -> AsyncIterator[str]:
    """A router that has found its nodes."""
    url = f"http://127.0.0.1:{port}"
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=silent, stderr=silent)
    try:
        async with new_client() as http, asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    ask = body(Ask(0, 0, 4, 8, 1))
                    if (await http.post(url + "/v1/chat/completions", content=ask)).is_success:
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
