"""A node of another make, which says what a case wants."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class FakeNode(NamedTuple):
    port: int
    seen: list[dict[str, Any]]  # bodies of requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def fake_node(models: Sequence[str], usage: Callable[[], dict[str, int]] = dict) -> Iterator[FakeNode]:
    """A node that is well, has these models, and answers each request with one token and this usage."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _reply(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply({"object": "list", "data": [{"id": model, "object": "model"} for model in models]})

        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)))))
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            self._reply({"id": "x", "object": "text_completion", "choices": [choice], "usage": usage()})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield FakeNode(server.server_address[1], seen)
    finally:
        server.shutdown()
        server.server_close()
