"""Requests as clients and proxies write them: targets, codings, byte order marks, and prompts beyond the context."""

from __future__ import annotations

import gzip
import json
import re
import time
from typing import Any

from lmkit.conform import messages, openai
from lmkit.conform.case import Server, case, json_of, need
from lmkit.conform.openai import CHAT, HI

BOM = b"\xef\xbb\xbf"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL = 0.1  # seconds
TOO_LONG = re.compile(r"prompt is too long: \d+ tokens > \d+ maximum")


def zstd(data: bytes) -> bytes:
    """A frame of zstd with one raw block (RFC 8878); 256 bytes to 64 KiB."""
    block = (len(data) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x60" + (len(data) - 256).to_bytes(2, "little") + block + data


CODINGS = {"gzip": gzip.compress, "zstd": zstd}


@case("openai", "a target with scheme and host")
def absolute(server: Server) -> None:
    need(server.get_absolute("/v1/models")["data"], "no models")


@case("openai", "bodies in gzip and zstd are read, or refused with 415")
def coded(server: Server) -> None:
    body = json.dumps({"model": server.model, "messages": [HI], "max_tokens": 1}).ljust(256).encode()
    for coding, encode in CODINGS.items():
        answer = server.post_bytes(CHAT, encode(body), **{"content-encoding": coding})
        status = answer.status_code
        need(status in (200, 415), f"{coding}: HTTP {status}, neither 200 nor 415")
        key = "choices" if status == 200 else "error"
        need(key in answer.json(), f"{coding}: HTTP {status} without {key}")


@case("openai", "a batch of a file that begins with a byte order mark")
def batch(server: Server) -> None:
    body = {"model": server.model, "messages": [HI], "max_tokens": 1}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body})
    file = server.upload("requests.jsonl", BOM + line.encode() + b"\n")
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    found: Any = json_of(server.post_bytes("/v1/batches", json.dumps(asked).encode()))
    deadline = time.monotonic() + 60
    while found["status"] not in ENDED and time.monotonic() < deadline:
        time.sleep(POLL)
        found = server.get(f"/v1/batches/{found['id']}")
    need(found["status"] == "completed", f"the batch is {found['status']}: {found.get('errors')}")
    need(found["request_counts"]["completed"] == 1, f"request_counts are {found['request_counts']}")


def beyond(server: Server) -> dict[str, Any]:
    """A turn with more words than the context has tokens."""
    return HI | {"content": "a " * max(8192, 2 * openai.context(server))}


@case("openai", "a prompt beyond the context is refused with its code")
def long_chat(server: Server) -> None:
    error = server.refusal(CHAT, {"messages": [beyond(server)], "max_tokens": 1}, 400)["error"]
    words = f"{error.get('code')} {error.get('type')} {error['message']}"
    need("context" in words, f"the error does not name the context: {words}")


@case("messages", "a prompt beyond the context is refused in Anthropic's words")
def long_message(server: Server) -> None:
    error = server.refusal(messages.PATH, {"messages": [beyond(server)], "max_tokens": 1}, 400)["error"]
    need(TOO_LONG.search(error["message"]), f"not 'prompt is too long: N tokens > M maximum': {error['message']}")
