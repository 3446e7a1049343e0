"""Fake nodes on loopback sockets, and a proxy in front of them in the same event loop. A test scripts the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.server import http_server
from lmkit.web.listen import bind, listen
from lmkit.web.server import HttpServer

CHAT = "/v1/chat/completions"
BODY = b'{ "messages": [{"role":"user","content":"\xc3\xa9\\u00e9"}],  "model" :"m", "n": 1.0e0 }\n'


@dataclass
class Received:
    """A request as a node saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class Exchange:
    """A node's end of one request. Writes are raw, so that the node can also misbehave."""

    def __init__(
        self, node: FakeNode, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.node, self.request, self.reader, self.writer = node, request, reader, writer

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int, body: Any, *headers: tuple[str, str]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{name}: {value}" for name, value in (("content-type", "application/json"), *headers)]
        head = "\r\n".join([f"HTTP/1.1 {status} X", *lines, f"content-length: {len(content)}", "", ""])
        await self.write(head.encode() + content)

    async def start_events(self, *headers: tuple[str, str]) -> None:
        lines = [f"{name}: {value}" for name, value in (("content-type", "text/event-stream; charset=utf-8"), *headers)]
        await self.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "transfer-encoding: chunked", "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Break the connection with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def until_left(self) -> None:
        """Wait until the proxy closes the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1024):
                pass
        self.node.left.set()


Script = Callable[[Exchange], Awaitable[None]]


async def echo(exchange: Exchange) -> None:
    await exchange.reply(200, {"node": exchange.node.name, "target": exchange.request.target})


@dataclass
class FakeNode:
    """Answers /health and /v1/models by itself and everything else by `script`."""

    name: str = "a"
    models: tuple[str, ...] = ("m",)
    api_key: str | None = None  # that the proxy sends
    script: Script = echo
    health: int = 200  # status of /health
    health_script: Script | None = None
    models_script: Script | None = None
    requests: list[Received] = field(default_factory=list)  # without health checks
    checks: list[Received] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    host: str = "127.0.0.1"
    listener: socket.socket | None = None  # its own, in another network

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        if self.listener is not None:
            self._server = await asyncio.start_server(self._serve, sock=self.listener)
        else:
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        """Close the listener and every connection, as the death of the node's process would."""
        self._server.close()
        tasks = dict(self._tasks)
        for task, writer in tasks.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            while not writer.is_closing():
                await self._answer(Exchange(self, await _read(reader), reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            del self._tasks[task]
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.target in ("/health", "/v1/models"):
            self.checks.append(request)
            script = self.health_script if request.target == "/health" else self.models_script
            if script is not None:
                await script(exchange)
            elif request.target == "/health":
                await exchange.reply(self.health, {})
            else:
                await exchange.reply(200, {"object": "list", "data": [self._entry(name) for name in self.models]})
            return
        self.requests.append(request)
        await self.script(exchange)

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 1, "owned_by": self.name}


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Received(method, target, headers, await reader.readexactly(length))


@contextlib.asynccontextmanager
async def nodes(*fakes: FakeNode) -> AsyncIterator[tuple[FakeNode, ...]]:
    for fake in fakes:
        await fake.start()
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()


@contextlib.asynccontextmanager
async def proxy_for(*fakes: FakeNode, **options: Any) -> AsyncIterator[tuple[Proxy, str]]:
    """(a running proxy that has checked its nodes once, its URL)."""
    async with server_for(*fakes, **options) as (_, proxy, url):
        yield proxy, url


@contextlib.asynccontextmanager
async def server_for(*fakes: FakeNode, **options: Any) -> AsyncIterator[tuple[HttpServer, Proxy, str]]:
    options.setdefault("health_interval", 3600.0)
    options.setdefault("drain_seconds", 0.0)
    configs = tuple(NodeConfig(url=fake.url, api_key=fake.api_key) for fake in fakes)
    config = ProxyConfig(nodes=configs, **{"node_wait": 0.0, **options})
    listener = bind("127.0.0.1", 0)
    listen(listener)
    async with Proxy(config) as proxy:
        await asyncio.wait_for(proxy.checked.wait(), 5)
        server = http_server(config, proxy, lambda: None)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])  # without its main loop, which checks for the end only ten times a second
        try:
            yield server, proxy, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            proxy.stop.set()
            while server.server_state.tasks:
                await asyncio.sleep(0.005)
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until `condition()` is true. Only a test that fails reaches the time limit."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def streamed(http: httpx.AsyncClient, begun: asyncio.Event, path: str = CHAT, **options: Any) -> bytes:
    """The body of an answer. `begun` is set once the client has its first bytes."""
    body = b""
    async with http.stream("POST", path, content=BODY, **options) as answer:
        async for data in answer.aiter_bytes():
            body += data
            begun.set()
    return body


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=False) as http:
        yield http


def idle(*among: FakeNode) -> Callable[[], bool]:
    return lambda: all(node.left.is_set() for node in among)
