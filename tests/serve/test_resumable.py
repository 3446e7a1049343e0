"""A stream of `lmkit serve` that its client takes up again. tests/proxy/test_resumable.py has the rest."""

from __future__ import annotations

import json
import re
import socket

import pytest

from tests.serve.live import Server

BODY = json.dumps({"model": "demo", "prompt": "def add(a, b):", "max_tokens": 400, "seed": 3, "stream": True}).encode()
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> object:
    with Server("--api-key", "mine", engine="lmkit.turbo.engine.engine:Engine") as server:
        yield server


def texts(stream: bytes) -> list[str]:
    chunks = [json.loads(data) for data in re.findall(rb"data: (\{.*\})\n\n", stream)]
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


def test_a_stream_goes_on(server: Server) -> None:
    key = {"authorization": "Bearer mine", "content-type": "application/json"}
    whole = server.post(PATH, content=BODY, headers=key)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as link:
        fields = "".join(f"{name}: {value}\r\n" for name, value in (key | {"x-lmkit-resume": "60"}).items())
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{fields}"
        link.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        first = b""
        while len(re.findall(rb"data: .*\n\n", first)) < 3:
            piece = link.recv(4096)
            assert piece, first
            first += piece
    first = b"".join(re.findall(rb"id: .*\ndata: .*\n\n", first))
    last = re.findall(rb"id: (\S+)", first)[-1].decode()
    assert server.post(PATH, content=BODY, headers={"last-event-id": last}).status_code == 401
    rest = server.post(PATH, headers=key | {"last-event-id": last})
    assert "".join(texts(first + rest.content)) == "".join(texts(whole.content))
    assert rest.content.endswith(b"data: [DONE]\n\n")
