"""A Hugging Face Hub on this machine, of the routes that a download needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED, PRIVATE = "org/gated", "org/none"


class FakeHub(ThreadingHTTPServer):
    """Serves `files` as the model org/model. `cut` = the first answer with weights breaks off after that many bytes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.cut = files, 0
        self.fetched: list[tuple[str, str | None]] = []  # (file, its Range)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            repository, _, rest = path.removeprefix("api/models/").partition("/")
            name, _, rest = rest.partition("/")
            self._api(f"{repository}/{name}", rest)
        elif "/resolve/" in path:
            repository, _, file = path.partition("/resolve/")
            self._file(repository, file.partition("/")[2])
        else:
            self._answer(404)

    def _api(self, repository: str, rest: str) -> None:
        entries = [(name, data) for name, data in self.server.files.items()]
        if repository == PRIVATE:
            self._answer(404, code="RepoNotFound")
        elif "revision/" in rest and not rest.endswith(("main", COMMIT)):
            self._answer(404, code="RevisionNotFound")
        elif rest.startswith("tree"):
            self._json([{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in entries])
        else:
            siblings = [{"rfilename": n, "size": len(d), "blobId": _etag(d)} for n, d in entries]
            self._json({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings})

    def _file(self, repository: str, name: str) -> None:
        if repository == GATED:
            return self._answer(403, code="GatedRepo")
        data, wanted = self.server.files[name], self.headers.get("range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        headers = {"etag": f'"{_etag(data)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if wanted:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.fetched.append((name, wanted))
        cut, self.server.cut = (
            (self.server.cut, 0) if self.command == "GET" and len(data) > 1000 else (0, self.server.cut)
        )
        self._answer(206 if wanted else 200, data[start:], cut=cut, **headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), **{"content-type": "application/json"})

    def _answer(self, status: int, body: bytes = b"", *, code: str = "", cut: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, **({"x-error-code": code} if code else {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: cut or None])
            self.close_connection = self.close_connection or bool(cut)

    def log_message(self, *arguments: Any) -> None: ...


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(files) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
