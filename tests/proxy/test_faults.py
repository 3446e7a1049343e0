"""Every fault of a node in every phase of its answer: the client learns of it in time, and no counter leaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from lmkit.proxy.app import Proxy
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, Received, Script, client, eventually, nodes, proxy_for

pytestmark = pytest.mark.anyio

STREAM = b'data: {"a": 1}\n\ndata: [DONE]\n\n'
WHOLE = b'{"choices": [{"text": "some words and a few more"}]}'
HEAD = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "stream": (
        HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(STREAM), STREAM),
        STREAM,
    ),
    "whole": (HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE), WHOLE, WHOLE),
}
# The bytes that the node sends before its fault, counted from the end of its head. None: no byte at all.
PHASES = {"request": None, "head": -20, "first byte": 0, "body": 12, "end": 35}


async def _reset(exchange: Exchange, rest: bytes) -> None:
    exchange.reset()


async def _half_close(exchange: Exchange, rest: bytes) -> None:
    exchange.writer.write_eof()
    await exchange.until_left()


async def _drip(exchange: Exchange, rest: bytes) -> None:
    for i in range(len(rest)):
        await exchange.write(rest[i : i + 1])
        await asyncio.sleep(0.0005)


async def _black_hole(exchange: Exchange, rest: bytes) -> None:
    await exchange.until_left()


async def _truncate(exchange: Exchange, rest: bytes) -> None:
    exchange.writer.close()


async def _garbage(exchange: Exchange, rest: bytes) -> None:
    await exchange.write(b"\x00\xff?")
    exchange.writer.close()


FAULTS = {
    "reset": _reset,
    "half-close": _half_close,
    "drip": _drip,
    "black hole": _black_hole,
    "truncate": _truncate,
    "garbage": _garbage,
}


def faulty(kind: str, phase: str, fault: str) -> Script:
    head, body, _ = ANSWERS[kind]
    at = PHASES[phase]
    sent = 0 if at is None else len(head) + at

    async def script(exchange: Exchange) -> None:
        await exchange.write((head + body)[:sent])
        await asyncio.sleep(0.005)  # the proxy sees these bytes by themselves
        await FAULTS[fault](exchange, (head + body)[sent:])

    return script


def sound(kind: str) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"".join(ANSWERS[kind][:2]))

    return script


def leaks(proxy: Proxy) -> list[object]:
    """What requests that have ended have left behind."""
    counts = [(n.in_flight, n.queued, len(n.waiting), n.breaker._trying) for n in proxy.registry.nodes()]
    return [count for count in (*counts, proxy.active, proxy._bodies.used) if count not in (0, (0, 0, 0, False))]


async def outcome(url: str, body: bytes = BODY) -> tuple[int, bytes]:
    """The status, 0 if the answer breaks off visibly, and the body."""
    async with asyncio.timeout(30), client(url) as http:
        try:
            answer = await http.post(CHAT, content=body)
        except httpx.RemoteProtocolError:
            return 0, b""
        return answer.status_code, answer.content


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(("phase", "fault"), itertools.product(PHASES, FAULTS))
async def test_a_fault_is_told_in_time_and_leaves_nothing_behind(kind: str, phase: str, fault: str) -> None:
    async with (
        nodes(FakeNode(script=faulty(kind, phase, fault))) as (node,),
        proxy_for(node, read_timeout=30.0 if fault == "drip" else 0.3) as (proxy, url),
    ):
        status, body = await outcome(url)
        await eventually(lambda: not leaks(proxy), 30)
        if body != ANSWERS[kind][2]:
            assert fault != "drip"
            assert status in (0, 502, 504) or b'"error"' in body, body


@pytest.mark.parametrize(
    ("kind", "phase"), [("stream", "request"), ("stream", "head"), *(("whole", phase) for phase in PHASES)]
)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "black hole"])
async def test_a_fault_before_the_client_has_a_byte_is_hidden_by_another_node(
    kind: str, phase: str, fault: str
) -> None:
    async with (
        nodes(FakeNode("a", script=faulty(kind, phase, fault)), FakeNode("b", script=sound(kind))) as (a, b),
        proxy_for(a, b, policy="round_robin") as (proxy, url),
    ):
        assert await outcome(url) == (200, ANSWERS[kind][2])
        await eventually(lambda: not leaks(proxy), 30)


LARGE = BODY.replace(b'"n": 1.0e0', b'"n": 1, "x": "%s"' % (b"x" * (8 << 20)))  # more than sockets hold


class Early(FakeNode):
    """A node with a fault before it has read the request of a client. Its checks are good."""

    def __init__(self, phase: str, fault: str) -> None:
        super().__init__("early")
        self.phase, self.fault = phase, fault

    @contextlib.asynccontextmanager
    async def broken(self) -> AsyncIterator[None]:
        """From now on, it has the fault."""
        await self.stop()
        with contextlib.ExitStack() as sockets:
            if self.phase == "request body":
                self._server = await asyncio.start_server(self._half_read, "127.0.0.1", self.port)
            elif self.fault == "black hole":  # nobody accepts and the queue is full: the system answers no further SYN
                sockets.enter_context(full := socket.create_server(("127.0.0.1", self.port), backlog=0))
                for _ in range(4):
                    waiting = sockets.enter_context(socket.socket())
                    waiting.setblocking(False)
                    waiting.connect_ex(full.getsockname())
            yield
            self.left.set()

    async def _half_read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the head and the beginning of a body."""
        with contextlib.suppress(ConnectionError):
            await reader.read(1024)
            if self.fault == "black hole":  # it reads nothing more
                await self.left.wait()
            else:
                await FAULTS[self.fault](Exchange(self, Received("POST", CHAT, [], b""), reader, writer), b"")
        writer.transport.abort()


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("connect", "reset"),
        ("connect", "black hole"),
        *itertools.product(["request body"], ["reset", "half-close", "black hole", "truncate", "garbage"]),
    ],
)
@pytest.mark.parametrize("other", [False, True])
async def test_a_fault_before_the_request_is_read(phase: str, fault: str, other: bool) -> None:
    early, sane = Early(phase, fault), FakeNode("b", script=sound("whole"))
    among = (early, sane) if other else (early,)
    async with (
        nodes(*among),
        proxy_for(*among, policy="round_robin", read_timeout=0.5, connect_timeout=0.3) as (proxy, url),
        early.broken(),
    ):
        status, body = await outcome(url, LARGE)
        if other and (phase, fault) != ("request body", "black hole"):
            assert (status, body) == (200, WHOLE)
        else:
            assert status in (502, 503, 504)
            assert b'"error"' in body
        await eventually(lambda: not leaks(proxy), 30)
