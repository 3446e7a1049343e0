"""A small OpenAI-like server in a thread. A prompt, or else the model's name, may ask for misbehaviour: see MOODS."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BURSTS = (1, 3, 2)  # tokens of each chunk; a token is a letter
CACHED = 3  # of five tokens of every prompt
GAP = 0.01  # seconds between chunks
MOODS = ("strict", "busy", "html", "empty", "slow", "breaks", "stops", "error-event", "garbage")
STRICT = {"continuous_usage_stats", "return_token_ids", "cache_salt", "ignore_eos"}


class FakeServer:
    """Use as a context manager. `bodies` are the requests that it got. `peak` is the largest number of requests that it
    answered at once."""

    def __init__(self) -> None:
        self.reset()
        self.active = 0
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def reset(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.models = ["plain"]
        self.peak = 0

    def __enter__(self) -> FakeServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        mood = _mood(body)
        unknown = STRICT & (body.keys() | body.get("stream_options", {}).keys())
        if mood == "strict" and unknown:
            return JSONResponse({"error": {"message": f"unknown parameter {min(unknown)!r}"}}, 400)
        if mood == "busy":
            return JSONResponse({"error": {"message": "too many\nrequests"}}, 429)
        if mood == "html":
            return Response("<h1>Bad Gateway</h1>", 502)
        return StreamingResponse(self._counted(body, "messages" in body), media_type="text/event-stream")

    async def _counted(self, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            async for event in _events(body, chat):
                yield event
        finally:
            self.active -= 1


def _mood(body: dict[str, Any]) -> str:
    asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return str(asked if asked in MOODS else body["model"])


async def _events(body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    mood, done = _mood(body), 0
    options = body.get("stream_options", {})
    if mood == "empty":
        yield "data: [DONE]\n\n"
        return
    if chat:
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    if body.get("tools"):
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "run", "arguments": ""}}
        yield _event({"choices": [{"index": 0, "delta": {"reasoning_content": "So.", "tool_calls": [call]}}]})
        part = {"index": 0, "function": {"arguments": '{"command": "ls"}'}}
        yield _event({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]})
    for size in () if body.get("tools") else BURSTS:
        await asyncio.sleep(30 if mood == "slow" and done else GAP)
        text = " ".join("abcdef"[done : done + size]) + " "
        done += size
        choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if chat else {"text": text})
        if body.get("return_token_ids"):
            choice["token_ids"] = list(range(size))
        event: dict[str, Any] = {"choices": [choice]}
        if options.get("continuous_usage_stats"):
            event["usage"] = {"prompt_tokens": 5, "completion_tokens": done}
        yield _event(event)
        if mood == "breaks":
            raise ConnectionResetError
        if mood == "error-event":
            yield _event({"error": {"message": "out of memory"}})
            return
        if mood == "garbage":
            yield "data: {not json\n\n"
        if mood == "stops":
            return
    yield ": a comment\r\n\r\n"
    yield _event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
    if options.get("include_usage"):
        usage = {"prompt_tokens": 5, "completion_tokens": done, "prompt_tokens_details": {"cached_tokens": CACHED}}
        yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
