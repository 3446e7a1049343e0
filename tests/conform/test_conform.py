"""`lmkit conform`: what it finds wrong, and that it is no more than a table where a server answers nonsense.

That lmkit's own server passes stands in test_end_to_end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.conform.case import Case, Failed, Server
from lmkit.conform.messages import built
from lmkit.conform.responses import check_stream
from lmkit.conform.suites import CASES, SUITES


def server(answer: httpx.Response) -> Server:
    """One that answers everything with this."""
    transport = httpx.MockTransport(lambda request: answer)
    return Server(httpx.Client(transport=transport, base_url="http://test"), "m")


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
    (case,) = (case for case in CASES if (case.suite, case.name) == ("openai", "a streamed chat"))
    answer = stream(*(one if isinstance(one, str) else json.dumps(one) for one in events))
    reason = case.outcome(server(answer))
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
    assert [row for row in rows if "passed" in row] == [row for row in rows if "models are listed" in row]
    assert "HTTP 404" in rows[1]
    assert count == f"1 of {len(rows)} passed"
