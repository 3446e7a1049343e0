"""Connections of a server: limits of time, work and number, and clients that behave well."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lmkit.garbage import RARELY
from lmkit.web import accept, connection
from lmkit.web.accept import Acceptor
from lmkit.web.server import USUALLY, HttpServer
from tests.web.test_server_and_proxy import BEARER, CHAT, both, running

pytestmark = pytest.mark.anyio
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers with the body's length. /wait answers when the client leaves, /large with `size` bytes, /many with
    so many events, /refuse reads no body.
    """

    def __init__(self) -> None:
        self.size = 0
        self.num_left = self.num_under_way = self.num_large = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_under_way += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_under_way -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/refuse":
            await Response(b"no", 401)(scope, receive, send)
            return
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_left += 1
        elif scope["path"] == "/many":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.size):
                await send({"type": "http.response.body", "body": b"event", "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
        elif scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.size >> 16):
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                self.num_large += 1
            await send({"type": "http.response.body", "body": b""})
        else:
            await Response(str(size))(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app: App, limit_each: int | None = None) -> AsyncIterator[int]:
    """The port of a server."""
    async with running(lambda ready: HttpServer(app, ready, flush_seconds=1, limit_each=limit_each)) as address:
        yield int(address.rpartition(":")[2])


async def connect(port: int, data: bytes = b"") -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def ask(port: int, data: bytes) -> bytes:
    """What comes back until the connection ends."""
    reader, writer = await connect(port, data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def until(is_true: Any) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.01)


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def test_a_search_for_garbage_leaves_out_the_modules() -> None:
    """A search through all modules would stop every connection for a tenth of a second."""
    gc.unfreeze()
    async with serving(App()) as port:
        assert await ask(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert gc.get_freeze_count() > 10 * len(gc.get_objects())
        assert gc.get_threshold() == RARELY
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, USUALLY)


async def test_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)
    async with serving(App()) as port:
        assert await ask(port, b"") == b""


async def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    async with serving(App()) as port:
        assert await ask(port, b"GET / HT") == b""


async def test_a_client_may_send_its_first_byte_later_than_a_head_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be short of processor time, or open connections before it has requests for them."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.0)
    monkeypatch.setattr(accept, "CHECK_SECONDS", 0.01)
    async with serving(App()) as port:
        reader, writer = await connect(port)
        await asyncio.sleep(0.1)  # several checks
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_with_silent_and_slow_connections_a_new_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.web.server.most_connections", lambda _: 20)
    async with serving(App()) as port:
        silent = [await connect(port) for _ in range(70)]
        begun = [await connect(port, b"GET") for _ in range(70)]
        begun += [await connect(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{") for _ in range(70)]
        assert (await ask(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: sum(reader.at_eof() for reader, _ in silent + begun) >= 190)
        for _, writer in silent + begun:
            writer.close()


async def test_the_address_with_most_connections_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.web.server.most_connections", lambda _: 10)
    async with serving(App()) as port:
        few = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(3)]
        many = [await connect(port) for _ in range(30)]
        await until(lambda: sum(reader.at_eof() for reader, _ in many) >= 23)
        await asyncio.sleep(0.05)  # no more than these
        assert not any(reader.at_eof() for reader, _ in few)
        assert sum(reader.at_eof() for reader, _ in many) == 23
        for _, writer in few + many:
            writer.close()


async def test_one_address_has_no_more_than_its_connections() -> None:
    app = App()
    async with serving(app, limit_each=3) as port:
        silent = [await connect(port) for _ in range(9)]
        await until(lambda: sum(reader.at_eof() for reader, _ in silent) == 6)
        busy = [await connect(port, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3)]
        await until(lambda: app.num_under_way == 3)
        assert await ask(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        other[1].write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await other[0].read()).startswith(b"HTTP/1.1 200")
        for _, writer in [*silent, *busy, other]:
            writer.close()


async def test_health_is_answered_when_every_connection_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.web.server.most_connections", lambda _: 5)
    app = App()
    async with serving(app) as port:
        busy = [await connect(port, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(5)]
        await until(lambda: app.num_under_way == 5)
        end = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await ask(port, b"GET /health" + end)).startswith(b"HTTP/1.1 200 ")
        refused = await ask(port, b"GET /other" + end)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"overloaded"' in refused
        for _, writer in busy:
            writer.close()
        await until(lambda: app.num_left == 5)
        assert (await ask(port, b"GET /other" + end)).startswith(b"HTTP/1.1 200 ")


async def test_without_files_it_accepts_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would write a line for each entry of the backlog, 2,048 times a second."""
    calls = 0

    class Listener:
        def __init__(self, sock: Any) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def accept(self) -> Any:
            nonlocal calls
            calls += 1
            if calls <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

    monkeypatch.setattr(
        "lmkit.web.server.Acceptor", lambda sock, *args, **options: Acceptor(Listener(sock), *args, **options)
    )  # type: ignore[arg-type]
    async with serving(App()) as port:
        assert await ask(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert 3 <= calls <= 5


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post("/", *(f"a{i}: b" for i in range(200))), 431),
        (post("/", "a: " + "b" * 20_000), 431),
        (post("/" + "a" * 20_000), 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 400_000, 431),
        (post("/", "Content-Length: 3", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked", "Content-Length: 3") + b"0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked").replace(b"/1.1", b"/1.0") + b"0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", 400),
        (post("/", "Content-Length: 3", "Content-Length: 4") + b"aaaa", 400),
        (post("/", "Content-Length: +3") + b"aaa", 400),
        (post("/", "Content-Length : 3") + b"aaa", 400),
        (post("/", "Transfer-Encoding: chunked") + b"3\r\naaaXX0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\na: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: b\rc: d\r\n\r\n", 400),
        (post("/", "a: b\r\n c"), 400),
        (post("/", "Transfer-Encoding:\r\n chunked") + b"0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        (post("/", "Content-Length: 1_0") + b"0123456789", 400),
        (post("/", "Content-Length: 3, 4") + b"aaaa", 400),
        (post("/", "a: b\0c"), 400),
        (post("/", ": b"), 400),
        (post("/", "Transfer-Encoding: chunked") + b"3\naaa\r\n0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked") + b"3;a\nb\r\naaa\r\n0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked") + b"0x3\r\naaa\r\n0\r\n\r\n", 400),
        (post("/", "Transfer-Encoding: chunked") + b"F" * 21 + b"\r\naaa", 400),
        (b"GET / HTTP/1.1\r\na: b\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    ],
)
async def test_heads_that_are_refused(head: bytes, status: int) -> None:
    async with serving(App()) as port:
        answer = await ask(port, head + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert b'"type":"invalid_request_error"' in answer
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://h:8/v1/models?a=b", "/v1/models", "a=b"),
        ("HTTPS://h:8", "/", ""),
        ("http://h:8?a", "/", "a"),
        ("/http://x/", "/http://x/", ""),
    ],
)
async def test_a_target_may_be_a_whole_url(target: str, path: str, query: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        host = dict(scope["headers"])[b"host"].decode()
        await Response(f"{scope['path']} {scope['query_string'].decode()} {host}")(scope, receive, send)

    async with serving(app) as port:  # type: ignore[arg-type]
        answer = await ask(port, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.decode().rpartition("\r\n")[2] == f"{path} {query} {'x' if target[0] == '/' else 'h:8'}"


async def test_a_body_after_the_refusal_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.3)
    async with serving(App()) as port:
        for framing in ("Content-Length: 100000", "Transfer-Encoding: chunked"):
            reader, writer = await connect(port, post("/refuse", framing))
            start = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - start < 10:
                    writer.write(b"1\r\nx\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)
            assert time.monotonic() - start < 10
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).endswith(b"no")
            writer.close()


async def test_a_client_that_reads_after_its_whole_body_sees_the_refusal() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            response = await client.post(address + CHAT, content=bytes(30 << 20))
            assert response.status_code == 401
            assert (await client.get(address + "/v1/models", headers=BEARER)).status_code == 200


async def test_an_answer_before_the_body_says_that_the_connection_ends() -> None:
    async with serving(App()) as port:
        for path, body, ends in [("/refuse", b"", True), ("/refuse", b"abc", False), ("/", b"abc", False)]:
            reader, writer = await connect(port, post(path, "Content-Length: 3") + body)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert (b"connection: close" in head) == ends
            writer.close()


async def test_bodies_of_tiny_chunks_take_turns() -> None:
    """A round of the event loop parses one slice, whatever has arrived."""
    app, num_events = App(), []
    parse = connection._Parser.next_event

    def counting(self: connection._Parser) -> Any:
        num_events[-1] += 1
        return parse(self)

    async def count_rounds() -> None:
        while True:
            num_events.append(0)
            await asyncio.sleep(0)

    async with serving(app) as port:
        rounds = asyncio.create_task(count_rounds())
        await asyncio.sleep(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection._Parser, "next_event", counting)
            body = b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n"
            request = post("/", "Transfer-Encoding: chunked", "Connection: close") + body
            answers = await asyncio.gather(*(ask(port, request) for _ in range(4)))
        rounds.cancel()
    assert all(answer.endswith(b"3000") for answer in answers)
    assert max(num_events) <= 8 * (connection.SLICE + 2)  # the first slices of all four may come in one round


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.5)
    app = App()
    app.size = 64 << 20
    async with serving(app) as port:
        _, writer = await connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: app.num_large > 0)
        await until(lambda: app.num_under_way == 0)
        writer.close()


async def test_events_that_come_fast_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last one do not wait."""
    monkeypatch.setattr(connection, "PACE_SECONDS", 60.0)
    app, num_writes = App(), 0
    app.size = 200
    flush = connection._Transport.flush

    def counted(self: connection._Transport) -> None:
        nonlocal num_writes
        num_writes += bool(self._waiting)
        flush(self)

    monkeypatch.setattr(connection._Transport, "flush", counted)
    async with serving(app) as port:
        reader, writer = await connect(port, post("/many", "Content-Length: 0"))
        for _ in range(2):
            answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
            assert answer.count(b"event") == 200
            writer.write(post("/many", "Content-Length: 0"))
        writer.close()
    assert 4 <= num_writes < 40


async def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 1.0)
    app = App()
    app.size = 16 << 20
    async with serving(app) as port:
        reader, writer = await connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while data := await reader.read(1 << 18):
            size += len(data)
            await asyncio.sleep(0.02)
        assert size > 16 << 20
        writer.close()


@pytest.mark.parametrize("more", [b"", b"x", b"GET /", b"x" * 1_000_000])
async def test_a_client_that_leaves_is_noticed_behind_its_bytes(more: bytes) -> None:
    app = App()
    async with serving(app) as port:
        _, writer = await connect(port, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: app.num_under_way == 1)
        writer.write(more)
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: app.num_left == 1)


async def test_good_clients() -> None:
    """Pipelined requests, HEAD, Expect: 100-continue, small chunks, large bodies, and a connection that is kept."""
    async with serving(App()) as port:
        three = post("/", "Content-Length: 3") + b"abc" + post("/", "Content-Length: 4") + b"abcd"
        answer = await ask(port, three + post("/", "Content-Length: 0", "Connection: close"))
        assert [part[-1:] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"3", b"4", b"0"]
        head = await ask(port, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert head.endswith(b"\r\n\r\n")
        reader, writer = await connect(
            port, post("/", "Content-Length: 5", "Expect: 100-continue", "Connection: close")
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"abcde")
        assert (await reader.read()).endswith(b"5")
        writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for size in (0, 1, 100_000, 20 << 20):
                assert (await client.post("/", content=bytes(size))).text == str(size)

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(500):
                    yield b"ab"

            assert (await client.post("/", content=pieces())).text == "1000"


def test_the_file_limit_is_raised() -> None:
    assert accept.raise_file_limit() >= 1024
    assert accept.most_connections(1) >= accept.most_connections(2) >= accept.RESERVE
