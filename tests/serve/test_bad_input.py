"""Whatever a client sends, it gets OpenAI's error envelope with the right status, and the server goes on."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.live import Server

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "demo", "messages": HELLO, "max_tokens": 2}
TEXT = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
BAD_CACHE_FIELDS: list[tuple[str, Any]] = [
    *[("priority", value) for value in (1001, -1001, 1.5, "1", True, 10**30, [])],
    *[("cache_salt", value) for value in ("", "x" * 1025, 5, ["x"])],
    *[("session_id", value) for value in ("", "x" * 257, 1.5, {})],
    *[("timeout", value) for value in (0, -1, 86401, "5", True, 1e300)],
]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    numbers = {"n_prompt_tokens", "n_ctx"} if body["error"]["code"] == "context_length_exceeded" else set()
    assert body["error"].keys() - numbers == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert body["error"]["message"]
    for word in ("Traceback", "pydantic", "/lmkit", "site-packages"):
        assert word not in response.text
    return dict(body["error"])


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("max_tokens", 0, "invalid_request"),
        ("max_tokens", -2, "invalid_request"),
        ("max_tokens", 1.5, "invalid_request"),
        ("max_tokens", "5", "invalid_request"),
        ("max_tokens", 10**30, "invalid_request"),
        ("max_tokens", 4096, "context_length_exceeded"),
        ("max_completion_tokens", 0, "invalid_request"),
        ("n_predict", -2, "invalid_request"),
        ("temperature", "hot", "invalid_request"),
        ("temperature", -0.1, "invalid_request"),
        ("temperature", True, "invalid_request"),
        ("top_p", 0, "invalid_request"),
        ("top_p", 1.1, "invalid_request"),
        ("n", 0, "invalid_request"),
        ("n", 100_000, "invalid_request"),
        ("n", True, "invalid_request"),
        ("seed", -2, "invalid_request"),
        ("seed", 1 << 63, "invalid_request"),
        ("stop", ["a"] * 17, "invalid_request"),
        ("stop", [""], "invalid_request"),
        ("stop", ["a" * 1025], "invalid_request"),
        ("stop", 5, "invalid_request"),
        ("stop_token_ids", [4096], "invalid_request"),
        ("stop_token_ids", [0] * 1025, "invalid_request"),
        ("logit_bias", {"99999": 1}, "invalid_request"),
        ("logit_bias", {"x": 1}, "invalid_request"),
        ("logit_bias", {"5": 1000}, "invalid_request"),
        ("logit_bias", {"5": "a lot"}, "invalid_request"),
        ("logit_bias", {str(i): 0 for i in range(2000)}, "invalid_request"),
        ("logit_bias", [5], "invalid_request"),
        ("top_logprobs", 2, "invalid_request"),  # without logprobs
        ("presence_penalty", 1e6, "invalid_request"),
        ("min_tokens", 3, "invalid_request"),  # more than max_tokens
        ("min_p", 2, "invalid_request"),
        ("stream", "yes", "invalid_request"),
        ("stream_options", {"include_usage": True}, "invalid_request"),  # without stream
        ("stream_options", {"continuous_usage_stats": True}, "invalid_request"),  # without stream
        ("stream_options", {"include_usage": None}, "invalid_request"),
        ("messages", [], "invalid_request"),
        ("messages", {"role": "user", "content": "Hi"}, "invalid_request"),
        ("messages", [{"role": "root", "content": "Hi"}], "invalid_request"),
        ("messages", [{"role": "user", "content": "Hi", "tool_calls": [{}]}], "invalid_request"),
        ("messages", [{"role": "user", "content": 5}], "invalid_request"),
        ("messages", [{"role": "user", "content": "Hi", "contents": "x"}], "unknown_parameter"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "invalid_request"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}], "invalid_request"),
        ("messages", HELLO * 5000, "invalid_request"),
        ("messages", [{"role": "user", "content": "word " * 5000}], "context_length_exceeded"),
        ("chat_template_kwargs", {"tokenize": True}, "unknown_parameter"),
        ("chat_template_kwargs", {"messages": "x"}, "unknown_parameter"),
        ("chat_template_kwargs", {"x": [1]}, "invalid_request"),
        ("chat_template", "{{ 1 }}", "unsupported_parameter"),
        ("prompt_embeds", "x", "unsupported_parameter"),
        ("temprature", 1, "unknown_parameter"),
        ("tools", [{}], "invalid_request"),
        ("tool_choice", "required", "invalid_request"),
        ("response_format", {"type": "xml"}, "invalid_request"),
        ("guided_whitespace_pattern", " ", "unsupported_parameter"),
        ("store", 0, "invalid_request"),  # not the boolean false
        ("best_of", 2, "unsupported_parameter"),
        ("tenant", "x", "unsupported_parameter"),
        ("prompt_cache_key", 5, "invalid_request"),
        ("prompt_cache_key", "x" * 1025, "invalid_request"),
        *[(field, value, "invalid_request") for field, value in BAD_CACHE_FIELDS],
        ("model", 5, "invalid_request"),
        ("user", {"name": "x"}, "invalid_request"),
    ],
)
def test_bad_chat_fields(server: Server, field: str, value: Any, code: str) -> None:
    response = server.post("/v1/chat/completions", CHAT | {field: value})
    assert error_of(response, 400)["code"] == code


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("prompt", "", "invalid_request"),
        ("prompt", [], "invalid_request"),
        ("prompt", [[]], "invalid_request"),
        ("prompt", None, "invalid_request"),
        ("prompt", [1, "a"], "invalid_request"),
        ("prompt", [True], "invalid_request"),
        ("prompt", [4096], "invalid_request"),
        ("prompt", [-1], "invalid_request"),
        ("prompt", [10**25], "invalid_request"),
        ("prompt", ["a"] * 300, "invalid_request"),
        ("prompt", [5] * 5000, "context_length_exceeded"),
        ("suffix", "x", "unsupported_parameter"),
        ("best_of", 0, "invalid_request"),
        ("best_of", 129, "invalid_request"),
        ("best_of", 2.5, "invalid_request"),
        *[(field, value, "invalid_request") for field, value in BAD_CACHE_FIELDS],
        ("logprobs", 21, "invalid_request"),
        ("logprobs", True, "invalid_request"),
        ("echo", "yes", "invalid_request"),
        ("messages", HELLO, "unknown_parameter"),
    ],
)
def test_bad_completion_fields(server: Server, field: str, value: Any, code: str) -> None:
    response = server.post("/v1/completions", TEXT | {field: value})
    error = error_of(response, 400)
    assert error["code"] == code
    assert error["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "echo": True, "max_tokens": 0}, "best_of"),
        ({"prompt": ["a"] * 100, "best_of": 100}, "best_of"),
        ({"prompt": ["a", "b"], "session_id": "me"}, "session_id"),
    ],
)
def test_fields_that_do_not_go_together(server: Server, fields: dict[str, Any], param: str) -> None:
    error = error_of(server.post("/v1/completions", TEXT | fields), 400)
    assert (error["code"], error["param"]) == ("invalid_request", param)


def test_too_many_sequences(server: Server) -> None:
    response = server.post("/v1/completions", TEXT | {"prompt": ["a"] * 100, "n": 100})
    assert error_of(response, 400)["param"] == "n"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{} {}",
        b'{"model": "demo", "prompt": "Hi", "temperature": NaN}',
        b'{"model": "demo", "prompt": "Hi", "temperature": Infinity}',
        b'{"model": "demo", "prompt": "Hi", "temperature": 1e999}',
        b'{"model": "demo", "prompt": "Hi", "seed": ' + b"9" * 20_000 + b"}",
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "\\udc00\\ud800"}',
        b'{"model": "demo", "prompt": "a\xff"}',
        b'{"model": "demo", "prompt": "\xed\xa0\x80"}',
        b'{"model": "demo", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
def test_bad_json(server: Server, raw: bytes) -> None:
    assert error_of(server.post("/v1/completions", content=raw, headers=JSON), 400)["code"] == "invalid_request"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/xml"])
def test_other_content_types(server: Server, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = server.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers)
    assert "Content-Type" in error_of(response, 400)["message"]


def test_a_charset_beside_the_content_type_is_fine(server: Server) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers).status_code == 200


def test_large_bodies(server: Server) -> None:
    big = json.dumps(TEXT | {"prompt": "x" * (40 << 20)}).encode()
    assert error_of(server.post("/v1/completions", content=big, headers=JSON), 413)["code"] == "request_too_large"


def test_large_bodies_without_a_length_are_cut_off_while_they_come(server: Server) -> None:
    sent = 0

    def parts() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b"x" * (1 << 20)

    try:
        response = server.post("/v1/completions", content=parts(), headers=JSON)
    except httpx.WriteError:
        assert sent < 100 << 20
    else:
        assert error_of(response, 413)["code"] == "request_too_large"


def test_unknown_routes_and_methods(server: Server) -> None:
    assert error_of(server.get("/nowhere"), 404)["code"] == "not_found"
    assert error_of(server.get("/v1/chat/completions/"), 404)["code"] == "not_found"
    assert error_of(server.get("/docs"), 404)["code"] == "not_found"
    assert error_of(server.get("/redoc"), 404)["code"] == "not_found"
    response = server.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(server.get("/v1/models/" + "x" * 2000), 404)["code"] == "model_not_found"
    response = httpx.put(server.url + "/v1/batches")
    assert error_of(response, 405)["message"].endswith("use GET or POST")
    assert response.headers["allow"] == "GET, POST"


def test_unknown_model(server: Server) -> None:
    assert error_of(server.post("/v1/chat/completions", CHAT | {"model": "x\n" * 500}), 404)["param"] == "model"


def test_no_cors(server: Server) -> None:
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    preflight = httpx.options(server.url + "/v1/completions", headers=headers)
    assert preflight.status_code == 400
    answer = server.post("/v1/completions", TEXT, headers=headers)
    assert "access-control-allow-origin" not in {*preflight.headers, *answer.headers}


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken_http(server: Server, raw: bytes) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        connection.sendall(raw)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")) or not answer
    assert server.get("/health").status_code == 200


def test_a_body_shorter_than_it_says(server: Server) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    connection.close()
    assert server.get("/health").status_code == 200


def test_control_characters_do_not_forge_log_lines(server: Server) -> None:
    forged = "me\n2026-01-01 00:00:00 I forged"
    assert server.post("/v1/completions", TEXT | {"user": forged}).status_code == 200
    server.get("/%0aforged%20path")
    server.until(lambda: "GET /%0aforged%20path 404" in server.log)
    assert not [line for line in server.log.splitlines() if line.startswith(("2026-01-01", "forged"))]
    assert "user='me" in server.log
    assert server.post("/v1/completions", TEXT | {"prompt": "my secret words"}).status_code == 200
    assert "secret words" not in server.log
