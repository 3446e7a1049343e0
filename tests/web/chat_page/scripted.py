"""A server with the chat page and OpenAI's routes, whose answers are scripted: the last message chooses one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lmkit.web.chat_page import ChatPage

Delta = dict[str, Any]
Script = Callable[[str], list[Delta]]
KEY = "sesame"


def words(text: str, field: str = "content", size: int = 7) -> list[Delta]:
    """A text as deltas that end anywhere."""
    return [{field: text[i : i + size]} for i in range(0, len(text), size)]


class Scripted:
    """`answers` by message; a message that has none is echoed. "SLOW" in a message waits between deltas, "CUT" breaks
    off after the first, "BUSY" is refused."""

    def __init__(self, answers: dict[str, list[Delta]] | None = None, models: tuple[str, ...] = ("m",)) -> None:
        self.answers, self.models = answers or {}, models
        self.seeing: set[str] = set()  # models that take images
        self.needs_key = False
        self.requests: list[dict[str, Any]] = []
        self.gone: list[str] = []  # messages whose client left
        self.app = FastAPI()
        self.app.get("/v1/models")(self.list_models)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.add_middleware(ChatPage)

    def _refusal(self, request: Request) -> Response | None:
        if self.needs_key and request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "missing or wrong API key"}}, 401)
        return None

    async def list_models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"data": [self._card(name) for name in self.models]})

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "input_modalities": ["text", *(["image"] if name in self.seeing else [])]}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        asked = body["messages"][-1]["content"]
        if isinstance(asked, list):
            asked = "".join(part.get("text", "") for part in asked)
        if "BUSY" in asked:
            return JSONResponse({"error": {"message": "the queue is full <b>now</b>"}}, 503)
        return self._refusal(request) or StreamingResponse(self._events(asked), media_type="text/event-stream")

    async def _events(self, asked: str) -> Any:
        deltas = self.answers.get(asked, words(asked))
        try:
            for count, delta in enumerate([{"role": "assistant", "content": ""}, *deltas]):
                usage = {"prompt_tokens": 12, "completion_tokens": count}
                yield event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": usage})
                await asyncio.sleep(0.05 if "SLOW" in asked else 0)
                if "CUT" in asked and count:
                    return
            reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            details = {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
            yield event({"choices": [], "usage": details})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone.append(asked)
            raise


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The URL of an application on a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)
