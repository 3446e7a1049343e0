import asyncio
import json

import openai.types.responses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message

from lmkit.errors import RequestError
from lmkit.proxy import downstream
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.web.errors import error_body
from lmkit.web.sse import WholeEvents

# Fields, odd line ends, comments, empty lines, half lines: whatever order they come in.
parts = st.sampled_from(
    [b"data: {}", b"event: x", b": ping", b"id: 1", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"\xe2\x80\xa8", b"x"]
)


def events_in(data: bytes) -> int:
    """Complete events by the specification: line ends first, then empty lines (an independent way to count)."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    return sum(not line and i > 0 and bool(lines[i - 1]) for i, line in enumerate(lines))


@settings(max_examples=60, deadline=None)
@given(st.lists(parts, max_size=30), st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_bytes_stay_the_same_and_cuts_are_after_events(pieces: list[bytes], sizes: list[int]) -> None:
    data = b"".join(pieces)
    whole, out, at, i = WholeEvents(), b"", 0, 0
    while at < len(data):
        size = sizes[i % len(sizes)]
        out += whole.feed(data[at : at + size])
        at, i = at + size, i + 1
        assert data.startswith(out)
        if out:
            assert out.endswith((b"\n\n", b"\r\r", b"\n\r", b"\r\n\r\n", b"\n\r\n", b"\r\r\n"))
            assert events_in(out) == events_in(data[:at])  # nothing complete is kept back
    assert out + whole.rest() == data


def test_event_longer_than_the_limit_is_let_through() -> None:
    whole = WholeEvents()
    assert whole.feed(b"data: ") == b""
    assert len(whole.feed(b"x" * WholeEvents.MAX_HELD)) == WholeEvents.MAX_HELD + 6
    assert whole.inside
    assert whole.feed(b"y\n\n") == b"y\n\n"
    assert not whole.inside


class Wire:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.broken = False

    async def send(self, message: Message) -> None:
        if self.broken:
            raise OSError
        self.messages.append(message)

    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


BROKEN = RequestError("bad_gateway", "the node broke off")


@pytest.mark.anyio
async def test_break_inside_an_event_drops_the_half_and_tells_the_error() -> None:
    wire = Wire()
    response = DownstreamResponse(wire.send)
    await response.start(200, [], events=True)
    await response.write(b'data: {"a":1}\n\ndata: {"b":')
    await response.fail(BROKEN)
    assert wire.body() == b'data: {"a":1}\n\ndata: ' + error_body(BROKEN) + b"\n\n"
    assert response.finished
    await response.fail(BROKEN)  # no second time
    assert wire.body().count(b"error") == 2  # in "error" and "server_error"


@pytest.mark.anyio
async def test_errors_of_anthropic_s_routes_have_its_form() -> None:
    error = {"type": "error", "error": {"type": "api_error", "message": "the node broke off"}}
    streamed, whole = Wire(), Wire()
    response = DownstreamResponse(streamed.send, path="/v1/messages")
    await response.start(200, [], events=True)
    await response.fail(BROKEN)
    assert streamed.body() == b"event: error\ndata: " + json.dumps(error, separators=(",", ":")).encode() + b"\n\n"
    await DownstreamResponse(whole.send, path="/v1/messages/count_tokens").fail(BROKEN)
    assert json.loads(whole.body()) == error


@pytest.mark.anyio
async def test_errors_of_the_responses_api_are_events_with_a_type_and_a_number() -> None:
    wire = Wire()
    response = DownstreamResponse(wire.send, path="/v1/responses")
    await response.start(200, [], events=True)
    await response.write(b'event: x\ndata: {"type":"x","sequence_number":6}\n\n')
    await response.fail(BROKEN)
    name, data = wire.body().split(b"\n\n")[1].split(b"\ndata: ")
    assert name == b"event: error"
    event = openai.types.responses.ResponseErrorEvent.model_validate_json(data)
    assert (event.sequence_number, event.code, event.message) == (7, "bad_gateway", "the node broke off")
    assert json.loads(data)["error"]["type"] == "server_error"


@pytest.mark.anyio
async def test_break_inside_an_overlong_event_ends_it_first() -> None:
    wire = Wire()
    response = DownstreamResponse(wire.send)
    await response.start(200, [], events=True)
    await response.write(b"x" * (WholeEvents.MAX_HELD + 1))
    await response.fail(BROKEN)
    assert wire.body().endswith(b"x\n\ndata: " + error_body(BROKEN) + b"\n\n")


@pytest.mark.anyio
async def test_break_of_another_body_leaves_it_incomplete() -> None:
    wire = Wire()
    response = DownstreamResponse(wire.send)
    await response.start(200, [(b"content-length", b"10")])
    await response.write(b"12345")
    await response.fail(BROKEN)
    assert wire.messages[-1]["more_body"] is True
    assert not response.finished


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "status", "kind", "header"),
    [
        ("invalid_api_key", 401, "invalid_request_error", (b"www-authenticate", b"Bearer")),
        ("engine_unavailable", 503, "server_error", (b"retry-after", b"5")),
        ("request_too_large", 413, "invalid_request_error", (b"connection", b"close")),
    ],
)
async def test_error_before_the_start_is_an_envelope(
    code: str, status: int, kind: str, header: tuple[bytes, bytes]
) -> None:
    wire = Wire()
    await DownstreamResponse(wire.send, retry_after=5.0).fail(RequestError(code, "why", "model"))
    assert wire.messages[0]["status"] == status
    assert header in wire.messages[0]["headers"]
    assert json.loads(wire.body()) == {"error": {"message": "why", "type": kind, "param": "model", "code": code}}


@pytest.mark.anyio
async def test_server_that_raises_for_a_client_that_left() -> None:
    """ASGI 2.4: send raises OSError."""
    wire = Wire()
    response = DownstreamResponse(wire.send)
    await response.start(200, [])
    wire.broken = True
    with pytest.raises(RequestError) as caught:
        await response.write(b"x")
    assert caught.value.code == "client_disconnected"
    await response.fail(BROKEN)


async def held(wire: Wire, monkeypatch: pytest.MonkeyPatch, path: str = "") -> DownstreamResponse:
    """A response whose client has waited for its node."""
    monkeypatch.setattr(downstream, "HOLD_SECONDS", 0.0)
    response = DownstreamResponse(wire.send, path=path)
    task = asyncio.create_task(response.hold())
    while not wire.body():
        await asyncio.sleep(0)
    task.cancel()
    return response


@pytest.mark.anyio
async def test_a_client_that_waits_for_its_node_gets_a_comment_and_then_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire()
    response = await held(wire, monkeypatch)
    assert not response.started, "another node may still answer"
    await response.start(200, [], events=True)
    await response.write(b"data: 1\n\n")
    await response.end()
    assert wire.body() == downstream.COMMENT + b"data: 1\n\n"
    assert [message["type"] for message in wire.messages].count("http.response.start") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["", "/api/chat"])
async def test_headers_of_lmkit_that_come_late_stand_in_the_stream(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    wire = Wire()
    response = await held(wire, monkeypatch, path)
    before = wire.body()
    response.add_headers([(b"x-lmkit-reason", b"free")])
    await response.start(200, [(b"x-request-id", b"1"), (b"x-lmkit-ignored", b"seed,user")], events=True)
    late = wire.body().removeprefix(before)
    if path:
        shown = json.loads(late)
        assert (shown["x-lmkit-reason"], shown["x-lmkit-ignored"]) == ("free", "seed,user")
        assert (shown["message"]["content"], shown["done"]) == ("", False)
    else:
        assert late == b": x-lmkit-reason: free\n: x-lmkit-ignored: seed,user\n\n"


@pytest.mark.anyio
async def test_a_node_s_refusal_reaches_a_client_that_waited_as_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    response = await held(wire, monkeypatch, "/v1/messages")
    await response.start(400, [])
    await response.write(b'{"type":\n "error"}')
    await response.end()
    assert wire.body() == downstream.COMMENT + b'event: error\ndata: {"type":  "error"}\n\n'
    wire = Wire()
    await (await held(wire, monkeypatch)).whole(Response(b"{}", 404))
    assert wire.body() == downstream.COMMENT + b"data: {}\n\n"
    wire = Wire()
    await (await held(wire, monkeypatch)).fail(BROKEN)
    assert wire.body().startswith(downstream.COMMENT + b"data: {")


@pytest.mark.anyio
async def test_a_client_of_a_stream_that_waits_for_its_next_node_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "COMMENT_SECONDS", 0.01)
    wire, plain = Wire(), Wire()
    response, whole = DownstreamResponse(wire.send), DownstreamResponse(plain.send)
    await response.wait(0.03)  # nothing has begun
    await response.start(200, [], events=True)
    await response.write(b"data: 1\n\n")
    await response.wait(0.05)
    await response.write(b"data: " + b"x" * WholeEvents.MAX_HELD)  # passed on by halves
    await response.wait(0.03)
    await response.end()
    await response.wait(0.03)
    body = b"".join(message.get("body", b"") for message in wire.messages)
    assert body.startswith(b"data: 1\n\n" + downstream.COMMENT)
    assert set(body.removeprefix(b"data: 1\n\n").partition(b"data: ")[0].split(b"\n\n")) == {b": waiting", b""}
    assert b"waiting" not in body.partition(b"data: x")[2]
    await whole.start(200, [])
    await whole.write(b"{")
    await whole.wait(0.03)
    assert [message.get("body") for message in plain.messages[1:]] == [b"{"]
