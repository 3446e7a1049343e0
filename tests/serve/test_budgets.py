"""Answers take bounded memory: those that nobody reads, and those that are sent whole."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lmkit.config import ServerConfig
from lmkit.serve.streaming import WholeAnswer, json_parts
from lmkit.turbo.request import Request, StepOutput, TokenLogprobs
from lmkit.turbo.transport.steps import Rest
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, ScriptedEngine, app_of, send, serving_of

KIB = 1 << 10
LOGPROBS = {"logprobs": True, "top_logprobs": 20}


class Talkative(ScriptedEngine):
    """Answers with `max_tokens` tokens, each with the log-probabilities that were asked for."""

    def __init__(self, *, pauses: bool = True) -> None:
        """`pauses`: other tasks run between two steps; else all steps are there at once."""
        super().__init__(max_model_len=1 << 20)
        self.num_made = 0
        self.num_open_now = 0
        self._pauses = pauses

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        most, num_top = request.params.max_tokens or 0, request.params.logprobs
        self.num_open_now += 1
        try:
            for i in range(most):
                top = [(300 + (7 * i + j) % 3000, -1.0 - j) for j in range(num_top or 0)]
                token = 300 + i % 3000
                self.num_made += 1
                yield StepOutput(
                    request_id=request.request_id,
                    token_ids=[token],
                    logprobs=[TokenLogprobs(token, -0.5, top)] if num_top is not None else [],
                    finish_reason="length" if i == most - 1 else None,
                )
                if self._pauses:
                    await asyncio.sleep(0)
        finally:
            self.num_open_now -= 1


class Reader:
    """A client in this process. It reads `num_read` pieces of the body, and more when `go_on` is set."""

    def __init__(self, num_read: int = 1 << 30) -> None:
        self.go_on, self.left = asyncio.Event(), asyncio.Event()
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self._num_read = num_read

    async def ask(self, app: Any, path: str, body: dict[str, Any]) -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await self.left.wait()
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.headers = dict(message["headers"])
            elif message.get("body"):
                if len(self.pieces) >= self._num_read:
                    await self.go_on.wait()
                self.pieces.append(message["body"])

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("1.2.3.4", 5), "server": ("x", 80),
            "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}, "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)

    @property
    def events(self) -> list[Any]:
        return [json.loads(piece[6:]) for piece in self.pieces if b"[DONE]" not in piece]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.anyio
async def test_a_stream_that_nobody_reads_ends_at_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    engine, reader = Talkative(), Reader(num_read=3)
    app = app_of(engine, ServerConfig(answer_memory=8 * 512 * KIB))
    logger = logging.getLogger("lmkit.serve.collect")
    logger.addHandler(caplog.handler)  # lmkit's loggers may not propagate
    asking = asyncio.create_task(reader.ask(app, CHAT_PATH, CHAT | LOGPROBS | {"stream": True, "max_tokens": 5000}))
    async with asyncio.timeout(30):
        while not engine.num_made or engine.num_open_now:
            await asyncio.sleep(0.01)
    logger.removeHandler(caplog.handler)
    assert engine.num_made < 200  # of about 4.6 KiB
    assert serving_of(app).answers.used == 0  # what waited is dropped at once
    assert "ends before its client has read it: the memory of one request for answers is used up" in caplog.text
    reader.go_on.set()
    await asking
    assert reader.events[-1]["error"]["code"] == "overloaded"


@pytest.mark.anyio
async def test_a_slow_reader_gets_the_same_text_in_fewer_events() -> None:
    prompt, slow = Reader(), Reader(num_read=3)
    engine = Talkative()
    app = app_of(engine, ServerConfig())
    body = CHAT | {"stream": True, "max_tokens": 300, "logprobs": True}
    await prompt.ask(app, CHAT_PATH, body)
    asking = asyncio.create_task(slow.ask(app, CHAT_PATH, body))
    async with asyncio.timeout(30):
        while engine.num_made < 600:
            await asyncio.sleep(0.01)
    assert len(serving_of(app).answers.holders) == 1
    slow.go_on.set()
    await asking
    assert len(prompt.events) > 250 > 10 > len(slow.events)
    assert text_of(slow.events) == text_of(prompt.events)

    def logprobs(events: list[Any]) -> list[Any]:
        found = [event["choices"][0].get("logprobs") for event in events]
        return [entry for item in found if item for entry in item["content"]]

    assert logprobs(slow.events) == logprobs(prompt.events)
    assert serving_of(app).answers.used == 0


@pytest.mark.anyio
async def test_a_client_that_leaves_gives_back_what_waited() -> None:
    engine, reader = Talkative(), Reader(num_read=3)
    app = app_of(engine, ServerConfig())
    asking = asyncio.create_task(reader.ask(app, CHAT_PATH, CHAT | {"stream": True, "max_tokens": 200}))
    async with asyncio.timeout(30):
        while engine.num_made < 200:
            await asyncio.sleep(0.01)
        assert serving_of(app).answers.used > 0
        reader.left.set()
        await asking
    assert (serving_of(app).answers.used, serving_of(app).bodies.used) == (0, 0)


@pytest.mark.anyio
async def test_steps_that_come_all_at_once_do_not_end_an_answer() -> None:
    """As after a moment in which the processor was busy. On their way they take more than a whole answer does."""
    app = app_of(Talkative(pauses=False), ServerConfig(answer_memory=8 * 256 * KIB))
    for stream in (False, True):
        reader = Reader()
        await reader.ask(app, CHAT_PATH, CHAT | LOGPROBS | {"max_tokens": 400, "stream": stream})
        last = reader.events[-1] if stream else json.loads(b"".join(reader.pieces))
        assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.anyio
async def test_a_whole_answer_with_log_probabilities_takes_less_than_a_kib_a_token() -> None:
    """As objects they would take 16 KiB."""
    app = app_of(Talkative(), ServerConfig())
    reader = Reader(num_read=0)
    await Reader().ask(app, CHAT_PATH, CHAT | LOGPROBS | {"max_tokens": 600})  # what is kept for all requests
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        asking = asyncio.create_task(reader.ask(app, CHAT_PATH, CHAT | LOGPROBS | {"max_tokens": 600}))
        async with asyncio.timeout(60):
            while not reader.headers:
                await asyncio.sleep(0.01)
        held = tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()
    assert held / 600 < KIB
    assert serving_of(app).answers.used >= 600 * 21 * 12  # until it is read
    reader.go_on.set()
    await asking
    answer = json.loads(b"".join(reader.pieces))
    (content,) = (choice["logprobs"]["content"] for choice in answer["choices"])
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * 600
    assert content[1]["top_logprobs"][2] == {
        "token": TOKENIZER.token_bytes(309).decode(errors="replace"),
        "logprob": -3.0,
        "bytes": list(TOKENIZER.token_bytes(309)),
    }
    assert len(reader.pieces) > 2
    assert b"content-length" not in reader.headers
    assert serving_of(app).answers.used == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT_PATH, CHAT | LOGPROBS | {"n": 128, "max_tokens": 1 << 16}, "n"),
        (CHAT_PATH, CHAT | LOGPROBS | {"max_tokens": 1 << 19}, "max_tokens"),
        (CHAT_PATH, CHAT | {"n": 128}, "n"),
        (TEXT_PATH, TEXT | {"prompt": ["a"] * 8, "n": 128, "logprobs": 20, "max_tokens": 4096}, "n"),
        (TEXT_PATH, TEXT | {"prompt": "a " * 20_000, "logprobs": 20, "echo": True, "stream": True}, "max_tokens"),
    ],
)
def test_answers_that_cost_too_much_are_refused_at_once(path: str, body: dict[str, Any], param: str) -> None:
    engine = Talkative()
    response = send(engine=engine, path=path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert "the limit is 64 MiB; lower n, max_tokens or the number of log-probabilities" in error["message"]
    assert not engine.num_made


def test_an_answer_of_common_size_is_not_refused() -> None:
    body = CHAT | {"n": 2, "max_tokens": 8, "logprobs": True, "top_logprobs": 20}
    response = send(engine=Talkative(), json=body)
    assert response.status_code == 200
    assert int(response.headers["content-length"]) == len(response.content)


def test_json_in_parts_is_json() -> None:
    value = {"a": iter([1, {"b": iter([])}, None]), 'k"': iter(["x", [1, 2]]), "c": {}}
    assert json.loads("".join(json_parts(value))) == {"a": [1, {"b": []}, None], 'k"': ["x", [1, 2]], "c": {}}
    assert WholeAnswer.BLOCK < 1 << 20
