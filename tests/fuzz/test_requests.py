"""Damaged requests: refused with a RequestError and its status, or served; the server lives on."""

from __future__ import annotations

import json
import logging
import random
import socket
from typing import Any

import psutil
import pytest

from lmkit.errors import RequestError
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.to_request import chat_requests, completion_requests
from lmkit.strict import validate
from lmkit.web.receive import decode_json
from tests.fuzz.mutations import SIZES, mutated_bytes, mutated_json, survives
from tests.serve.in_process import INFO, TOKENIZER
from tests.serve.live import Server

CHAT: dict[str, Any] = {
    "model": "model", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi", "name": "n"}],
    "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 1, "logit_bias": {"5": 1.5},
    "logprobs": True, "top_logprobs": 2, "stream": False, "priority": 3, "cache_salt": "s", "timeout": 5.0,
    "stream_options": None, "chat_template_kwargs": {"a": 1}, "stop_token_ids": [1, 2], "min_tokens": 1,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {
    "type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, "b"]}, "minItems": 1}, "c": {
        "type": "string", "pattern": "^[a-z]+$", "maxLength": 5}}, "required": ["a"]}}}  # fmt: skip
CONSTRAINED = {"model": "model", "messages": CHAT["messages"], "response_format": FORM}
TEXT: dict[str, Any] = {
    "model": "model", "prompt": ["a", "b"], "max_tokens": 5, "best_of": 2, "echo": True, "logprobs": 3, "n": 1
}  # fmt: skip
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "demo", "prompt": "Hi", "max_tokens": 2}'
RAW = [
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


def serve(data: Any) -> None:
    """Take a body as far as the engine."""
    if isinstance(data, dict) and "prompt" in data:
        completion_requests(validate(data, CompletionRequest), TOKENIZER, INFO, "id")
    else:
        chat_requests(validate(data, ChatCompletionRequest), TOKENIZER, INFO, "id")


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("body", [CHAT, CONSTRAINED, TEXT], ids=["chat", "schema", "text"])
def test_bodies(body: dict[str, Any], number: int) -> None:
    survives(number, "values", lambda rng: serve(mutated_json(body, rng)), RequestError)
    raw = json.dumps(body).encode()
    survives(number, "bytes", lambda rng: serve(decode_json(mutated_bytes(raw, rng))), RequestError)


@pytest.mark.parametrize("number", SIZES)
def test_bytes_on_a_connection(number: int) -> None:
    """Each connection gets an answer or its end; afterwards the server answers, in the memory that it had."""
    with Server() as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        memory = psutil.Process(server.process.pid).memory_info().rss
        statuses: dict[bytes, int] = {}
        for index in range(number):
            rng = random.Random(index)
            with socket.create_connection(address, timeout=60) as client:
                client.sendall(mutated_bytes(rng.choice(RAW), rng))
                client.shutdown(socket.SHUT_WR)
                try:
                    status = client.recv(65536)[9:12]
                except ConnectionError:
                    status = b""
            statuses[status] = statuses.get(status, 0) + 1
        logging.getLogger(__name__).info("%s", statuses)
        assert not [status for status in statuses if status.startswith(b"5")]
        assert server.get("/health").status_code == 200
        assert psutil.Process(server.process.pid).memory_info().rss < memory + (64 << 20)
