"""The reader of nodes' answers: whatever is cut anywhere reads the same, and nothing ambiguous is read."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from lmkit.web.channel import BrokenError
from lmkit.web.http1 import MAX_LINE_BYTES, MAX_TRAILERS, Body, Head, MalformedError, read_head
from lmkit.web.upstream import Upstream
from tests.proxy.fakes import Exchange, FakeNode, nodes

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"


def body_of(head: bytes | Head, data: bytes, size: int) -> tuple[bytes, Body]:
    body, found = Body(head if isinstance(head, Head) else read_head(head), "POST"), b""
    for start in range(0, len(data), size):
        found += b"".join(body.feed(data[start : start + size]))
    return found, body


def test_a_head() -> None:
    head = read_head(b"HTTP/1.0 404 Not \xfcber\r\nA: 1 \r\na:\t2\r\nX-Empty:")
    assert (head.minor, head.status, head.is_last) == (0, 404, True)
    assert head.headers == ((b"A", b"1"), (b"a", b"2"), (b"X-Empty", b""))
    assert not read_head(b"HTTP/1.1 200").is_last
    assert read_head(b"HTTP/1.1 200 \r\nConnection: Close").is_last


@pytest.mark.parametrize(
    "head",
    [
        b"", b"HTTP/2 200", b"HTTP/1.1 20", b"HTTP/1.1  200", b"http/1.1 200", b"HTTP/1.1 200 a\nb", b"HTTP/1.1 200 \0",
        b"HTTP/1.1 200\r\nx", b"HTTP/1.1 200\r\nx : 1", b"HTTP/1.1 200\r\n: 1", b"HTTP/1.1 200\r\nx: 1\n2",
        b"HTTP/1.1 200\r\nx: 1\r2", b"HTTP/1.1 200\r\nx: 1\r\n 2", b"HTTP/1.1 200\r\nx: \0",
        b"HTTP/1.1 200\r\n\r\nx: 1",
        b"HTTP/1.1 200\r\ncontent-length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200\r\ntransfer-encoding: chunked\r\ntransfer-encoding: gzip",
    ],
)  # fmt: skip
def test_a_head_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedError):
        read_head(head)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_bodies_are_the_same_wherever_they_are_cut(size: int) -> None:
    data = b"5\r\nhello\r\n0012 ;a=b\r\n, world \r\n\r\n0\r\n ..\r\n0\r\nx: 1\r\ny:\r\n\r\n"
    found, body = body_of(CHUNKED, data, size)
    assert found == b"hello, world \r\n\r\n0\r\n ..", found
    assert body.is_whole
    assert not body.is_overrun
    assert body_of(CHUNKED, data + b"!", size)[1].is_overrun
    found, body = body_of(b"HTTP/1.1 200\r\ncontent-length: 5", b"hello", size)
    assert (found, body.is_whole, body.is_overrun) == (b"hello", True, False)
    assert body_of(b"HTTP/1.1 200\r\ncontent-length: 5", b"hello!", size)[1].is_overrun
    found, body = body_of(b"HTTP/1.1 200", b"hello", size)
    assert (found, body.is_whole, body.ends_with_connection) == (b"hello", False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n", b"\r\n", b"-1\r\n", b"0x1\r\n", b"1 1\r\na\r\n", b"5\r\nhello!\r\n", b"5\r\nhello\r\n\r\n",
        b"1;\0\r\n",
        b"ffffffffffffffff\r\n", b"1\r\na\n\r\n", b"1\n\r\na", b"0\r\nno header\r\n", b"1" * (MAX_LINE_BYTES + 1),
        b"0\r\n" + b"x: 1\r\n" * (MAX_TRAILERS + 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_broken_chunks_are_refused(data: bytes, size: int) -> None:
    with pytest.raises(MalformedError):
        body_of(CHUNKED, data, size)


@pytest.mark.parametrize("fields", [b"content-length: +1", b"content-length: 1, 1", b"transfer-encoding: gzip, chunked",
                                    b"content-length: ", b"transfer-encoding: identity"])  # fmt: skip
def test_framings_that_are_not_known_are_refused(fields: bytes) -> None:
    with pytest.raises(MalformedError):
        Body(read_head(b"HTTP/1.1 200\r\n" + fields), "GET")


def test_answers_without_a_body() -> None:
    for head, method in ((b"HTTP/1.1 204", "GET"), (b"HTTP/1.1 200\r\ncontent-length: 0", "GET"), (CHUNKED, "HEAD")):
        assert Body(read_head(head), method).is_whole


@pytest.mark.anyio
async def test_interim_answers_are_passed_over() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await exchange.reply(200, b"answer")

    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    async with nodes(FakeNode(script=script)) as (node,):
        answer = await upstream.send("POST", node.url + "/v1/completions", [], b"{}")
        assert (answer.status, await answer.body()) == (200, b"answer")
        answer.close()
        await upstream.close()


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_connection_that_ends_as_it_is_used_again(method: str) -> None:
    """What has no effects is sent on a new one. The rest is left to the caller, who has a budget for it."""

    async def script(exchange: Exchange) -> None:
        if len(exchange.node.requests) == 2:
            exchange.writer.close()
        else:
            await exchange.reply(200, b"answer")

    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    async with nodes(FakeNode(script=script)) as (node,):
        first = await upstream.send(method, node.url + "/a", [])
        assert await first.body() == b"answer"
        first.close()
        if method == "GET":
            second = await upstream.send(method, node.url + "/a", [])
            assert await second.body() == b"answer"
            second.close()
            assert node.connections == 2
        else:
            with pytest.raises(BrokenError):
                await upstream.send(method, node.url + "/a", [])
        await upstream.close()
        await asyncio.sleep(0)
        assert not upstream.channels


@pytest.mark.anyio
@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb", b"a\0"])
async def test_a_header_cannot_become_two(value: bytes) -> None:
    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    with pytest.raises(ValueError, match="line break"):
        await upstream.send("POST", "http://127.0.0.1:1/v1/completions", [(b"x-a", value)], b"{}")
