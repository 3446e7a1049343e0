"""`lmkit conform`: what it finds wrong, and that it is no more than a table where a server answers nonsense.

That lmkit's own server passes stands in test_end_to_end.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.conform import wire
from lmkit.conform.case import Case, Failed, Server
from lmkit.conform.messages import built
from lmkit.conform.responses import check_stream
from lmkit.conform.suites import CASES, SUITES


def asked(answer: Callable[[httpx.Request], httpx.Response], clock: Callable[[], float] = time.monotonic) -> Server:
    return Server(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test"), "m", clock)


def server(answer: httpx.Response) -> Server:
    """One that answers everything with this."""
    return asked(lambda _: httpx.Response(answer.status_code, headers=answer.headers, content=answer.content))


def stream(*data: str) -> httpx.Response:
    content = "".join(f"data: {one}\n\n" for one in data).encode()
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)


NONSENSE = (
    httpx.Response(200, json={}),
    httpx.Response(200, json=[]),
    httpx.Response(200, text="<html>"),
    httpx.Response(500, json={"error": "no\x1b[31m"}),
    httpx.Response(404, text="x" * 10_000),
    stream("{}", "[DONE]"),
    stream("{"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nonsense_is_a_reason(case: Case) -> None:
    for answer in NONSENSE:
        reason = case.outcome(server(answer))
        assert 0 < len(reason) <= 160
        assert reason.isprintable()


def test_every_case_has_a_suite_and_a_name_of_its_own() -> None:
    assert {case.suite for case in CASES} == set(SUITES)
    assert len({(case.suite, case.name) for case in CASES}) == len(CASES)


CHUNK = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
END = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ((CHUNK, END, USAGE, "[DONE]"), ""),
        ((CHUNK, END, USAGE), "does not end with [DONE]"),
        ((CHUNK, END, END, USAGE, "[DONE]"), "finish_reasons"),
        ((END, USAGE, "[DONE]"), "no role"),
        ((CHUNK, END | {"id": "d"}, USAGE, "[DONE]"), "several ids"),
        ((CHUNK, END, USAGE | {"choices": END["choices"]}, "[DONE]"), "has choices"),
    ],
)
def test_chunks_in_disorder_are_found(events: tuple[Any, ...], says: str) -> None:
    answer = stream(*(one if isinstance(one, str) else json.dumps(one) for one in events))
    reason = found("openai", "a streamed chat").outcome(server(answer))
    assert says in reason
    assert bool(says) == bool(reason)


def test_a_stream_that_depends_on_its_cuts_is_found() -> None:
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b'data: {"a": 1}\n\ndata: {')
    with pytest.raises(Failed, match="inside of an event"):
        server(answer).events("/", {})
    with pytest.raises(Failed, match="text/plain"):
        server(httpx.Response(200, headers={"content-type": "text/plain"}, content=b"data: 1\n\n")).events("/", {})


def test_events_in_disorder_are_found() -> None:
    start, stop = {"type": "message_start"}, [{"type": "message_delta"}, {"type": "message_stop"}]
    begin = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
    with pytest.raises(Failed, match="does not end"):
        built([start, begin, *stop])
    with pytest.raises(Failed, match="last events"):
        built([start, stop[0]])
    created = {"type": "response.created", "sequence_number": 0}
    ended = {"type": "response.completed", "sequence_number": 2, "response": {"output": []}}
    with pytest.raises(Failed, match="gaps"):
        check_stream([created, ended])
    assert check_stream([created, ended | {"sequence_number": 1}]) == {"output": []}


def found(suite: str, name: str) -> Case:
    (case,) = (case for case in CASES if (case.suite, case.name) == (suite, name))
    return case


def test_a_row_names_all_that_is_refused() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        is_refused = body.get("reasoning_effort") in ("xhigh", "max")
        error = {"error": {"message": f"no {body.get('reasoning_effort')}"}}
        return httpx.Response(400, json=error) if is_refused else httpx.Response(200, json={"choices": []})

    case = found("openai", "reasoning_effort of any value")
    assert case.outcome(asked(answer)) == "xhigh, max: HTTP 400: no xhigh"


class Pieces(httpx.SyncByteStream):
    """A stream of single bytes that counts what was read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_read, self.is_closed = data, 0, False

    def __iter__(self) -> Iterator[bytes]:
        for number in self.data:
            self.num_read += 1
            yield bytes([number])

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("num_bytes", [0, 1, 5])
def test_a_client_leaves_at_a_byte(num_bytes: int) -> None:
    pieces = Pieces(b"data: 1\n\n")
    asked(lambda _: httpx.Response(200, stream=pieces)).leave("/", {}, num_bytes)
    assert (pieces.num_read, pieces.is_closed) == (num_bytes, True)


@pytest.mark.parametrize(("word", "seconds"), [(b"", 1.0), (b"a", 2.0), (b"ab", 3.0)])
def test_a_stream_begins_with_its_headers_or_a_word(word: bytes, seconds: float) -> None:
    """The clock's time is the number of its readings: one at the start, one for the headers, one for each byte."""
    times = iter(range(100))
    slow = asked(lambda _: httpx.Response(200, stream=Pieces(b"abc")), lambda: float(next(times)))
    assert slow.seconds_until("/", {}, word) == seconds
    with pytest.raises(Failed, match="without x"):
        slow.seconds_until("/", {}, b"x")


def test_bodies_are_coded_as_their_header_says() -> None:
    """Of zstd, the frame by its definition: magic number, descriptor, size - 256, and one raw block, the last."""
    text = b"x" * 300
    assert gzip.decompress(wire.CODINGS["gzip"](text)) == text
    assert wire.zstd(text) == bytes.fromhex("28b52ffd 60 2c00 610900") + text


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that lists a model and has no other route."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"object": "list", "data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_the_table(silent: str) -> None:
    result = CliRunner().invoke(app, ["conform", silent, "--suite", "openai"])
    assert result.exit_code == 1
    head, *rows, count = result.stdout.splitlines()
    assert head.split() == ["SUITE", "CASE", "RESULT", "REASON"]
    passed = [row.split("passed")[0].split(maxsplit=1)[1].strip() for row in rows if "passed" in row]
    assert passed == ["models are listed", "a target with scheme and host"]
    (row,) = (row for row in rows if "a whole chat" in row)
    assert "HTTP 404" in row
    assert count == f"2 of {len(rows)} passed"
