"""A batch and its lines: what stands in the file that a client sends, and in those that it gets."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from lmkit.config import MAX_TIMEOUT
from lmkit.errors import RequestError
from lmkit.serve.auth import Owner
from lmkit.serve.protocol import MAX_PRIORITY
from lmkit.web.receive import decode_json

MAX_LINES = 50_000
MAX_ERRORS = 100  # of a file's mistakes, as many are told
ENDED = ("failed", "completed", "expired", "cancelled")
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
# The routes that a batch may call. Each has the fields priority and timeout.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class Batch(msgspec.Struct, kw_only=True):
    """All that is known of a batch, as its file has it. A batch is changed by its own task alone."""

    id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    results_id: str  # of the files of its results and failures, which are seen at its end
    failures_id: str
    kept_seconds: int  # how long these are kept
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}  # when it came to a status, by OpenAI's name for the time
    errors: list[dict[str, Any]] = []  # of its input file
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_to_end: bool = False  # the client has cancelled it

    def enter(self, status: Status, now: float) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(now)

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of the input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Recorded(msgspec.Struct, frozen=True):
    """The part of a result that is read again."""

    custom_id: str


def lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers. A longer line than `max_bytes` is cut, and so is no JSON."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield number, line
            while line and not line.endswith(b"\n") and len(line) > max_bytes:
                line = file.readline(max_bytes + 1)


def parse(raw: bytes, endpoint: str, max_bytes: int) -> Line:
    """Raises RequestError for a line that cannot be a request to `endpoint`."""
    if len(raw.rstrip()) > max_bytes:
        raise RequestError("request_too_large", f"the line is longer than {max_bytes} bytes")
    line: Line = decode_json(raw, Line, mismatch="the line is no request of a batch")
    if not 1 <= len(line.custom_id) <= 512:
        raise _wrong("custom_id: expected 1 to 512 characters", "custom_id")
    if line.method != "POST" or line.url != endpoint:
        raise _wrong(f"expected method POST and url {endpoint}, which is the batch's endpoint", "url")
    if line.body.get("stream"):
        raise _wrong("body.stream: an answer in a batch is not streamed", "body")
    if line.body.get("background"):
        raise _wrong("body.background: a batch waits for its answers; leave it out", "body")
    if str(line.body.get("encoding_format")).startswith("bytes"):
        raise _wrong("body.encoding_format: an answer in a batch is JSON; ask for base64", "body")
    if line.body.get("priority") is not None:
        raise _wrong("body.priority: the requests of a batch run after all others; leave it out", "body")
    return line


def check_file(path: Path, endpoint: str, max_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests, and the mistakes as OpenAI has them. It reads all of the file."""
    seen: set[str] = set()
    mistakes: list[dict[str, Any]] = []

    def mistake(code: str, message: str, number: int | None = None, param: str | None = None) -> None:
        mistakes.append({"code": code, "message": message, "line": number, "param": param})

    for number, raw in lines(path, max_bytes):
        if len(mistakes) >= MAX_ERRORS:
            break
        try:
            line = parse(raw, endpoint, max_bytes)
        except RequestError as error:
            mistake("invalid_request", error.message, number, error.param)
            continue
        if line.custom_id in seen:
            mistake("duplicate_custom_id", f"custom_id {line.custom_id!r} stands twice", number, "custom_id")
        seen.add(line.custom_id)
        if len(seen) > MAX_LINES:
            mistake("too_many_requests", f"a batch has at most {MAX_LINES} requests")
            break
    if not seen and not mistakes:
        mistake("empty_file", "the file has no requests")
    return len(seen), mistakes


def request_body(line: Line, seconds: float) -> bytes:
    """The body for the route: it runs after all other requests, and need not be done before the batch ends."""
    asked = line.body.get("timeout")
    timeout = min(seconds, MAX_TIMEOUT) if asked is None else asked
    return msgspec.json.encode({**line.body, "priority": MAX_PRIORITY, "timeout": timeout})


def result(batch_id: str, number: int, custom_id: str, response: Any, error: Any = None) -> bytes:
    """A line of the output or error file."""
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    fields = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


def recorded(path: Path) -> set[str]:
    """The custom_ids of the results in a file. A last line that a kill cut off is removed from it."""
    found: set[str] = set()
    whole = 0
    with path.open("a+b") as file:
        file.seek(0)
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            found.add(msgspec.json.decode(raw, type=Recorded).custom_id)
            whole += len(raw)
        file.truncate(whole)
        os.fsync(file.fileno())
    return found


def _wrong(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)
