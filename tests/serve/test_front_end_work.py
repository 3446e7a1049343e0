"""Templates, tokenizing and detokenizing: off the event loop, refused early, in lanes by length, memory given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from lmkit.errors import RequestError
from lmkit.serve import text_pool
from lmkit.serve.response import ResponseBuilder
from lmkit.serve.text_pool import LANES, TextPool
from lmkit.text import Tokenizer
from tests.serve.in_process import CHAT_PATH, TEXT_PATH, App, ScriptedEngine
from tests.serve.live import Server

SHORT, MIDDLE, _ = (size for size, _ in LANES)
LONG = MIDDLE + 1
MODEL = {"model": "demo"}


async def _never() -> Any:
    """A client that stays."""
    await asyncio.Event().wait()


async def _left() -> Any:
    return {"type": "http.disconnect"}


def test_a_prompt_that_cannot_fit_is_refused_untokenized(server: Server) -> None:
    """4096 tokens of at most 45 characters fit."""
    text = "a b" * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["short", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "session_id": "s"}),
    ):
        answer = server.post(path, MODEL | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("this model's maximum context length is 4096 tokens")
        assert "or more" in error["message"]
        assert error["param"] in ("prompt", "messages")


def test_a_prompt_that_fits_by_its_characters_is_counted(server: Server) -> None:
    answer = server.post("/v1/completions", MODEL | {"prompt": "a b" * 10_000})
    assert "or more" not in answer.json()["error"]["message"]


def test_long_texts_do_not_hold_up_short_ones() -> None:
    async def run() -> None:
        pool, blocked = TextPool(), threading.Event()
        held = [
            asyncio.ensure_future(pool.run(_never, size, blocked.wait))
            for size, threads in zip((MIDDLE, LONG), (4, 3), strict=True)
            for _ in range(threads)
        ]
        assert await asyncio.wait_for(pool.run(_never, SHORT, lambda: "short"), 30) == "short"
        assert not any(task.done() for task in held)
        blocked.set()
        assert await asyncio.gather(*held) == [True] * len(held)

    asyncio.run(run())


def test_a_very_short_text_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only tokens are made of it: templates and schemas are the work of threads."""
    threads: list[str] = []
    completion, chat = {"prompt": "a", "max_tokens": 1}, {"messages": [{"role": "user", "content": "a"}]}
    monkeypatch.setattr(ResponseBuilder, "prepare", _named(threads, ResponseBuilder.prepare))
    app = App(ScriptedEngine())
    for path, body in (
        (TEXT_PATH, completion),
        (TEXT_PATH, completion | {"regex": "a"}),
        (TEXT_PATH, completion | {"prompt": "a" * (text_pool.QUICK_CHARS + 1)}),
        (CHAT_PATH, chat),
    ):
        app.post(path, body)
    assert [name.startswith("lmkit-") for name in threads] == [False, True, True, True]


def _named(names: list[str], work: Callable[[Any], None]) -> Callable[[Any], None]:
    """`work` that notes the names of its threads."""

    def noted(builder: Any) -> None:
        names.append(threading.current_thread().name)
        work(builder)

    return noted


def test_work_whose_client_left_is_dropped() -> None:
    async def run() -> None:
        pool, blocked, done = TextPool(), threading.Event(), []
        held = asyncio.ensure_future(pool.run(_never, LONG, blocked.wait))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as error:
            await pool.run(_left, LONG, lambda: done.append(1))
        assert error.value.code == "client_disconnected"
        blocked.set()
        await held
        await pool.run(_never, LONG, lambda: None)
        assert not done

    asyncio.run(run())


def test_too_much_waiting_text_is_refused() -> None:
    async def run() -> None:
        pool, blocked = TextPool(), threading.Event()
        size = text_pool.MAX_WAITING_CHARS // 2
        held = [asyncio.ensure_future(pool.run(_never, size, blocked.wait)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="waiting to be tokenized") as error:
            await pool.run(_never, MIDDLE, lambda: None)
        assert error.value.code == "queue_full"
        assert await pool.run(_never, SHORT, lambda: "short") == "short"
        blocked.set()
        await asyncio.gather(*held)
        assert await pool.run(_never, MIDDLE, lambda: "middle") == "middle"

    asyncio.run(run())


def test_memory_of_long_texts_is_given_back(server: Server) -> None:
    """The first body takes what is kept; further ones must not add to it."""

    def post() -> None:
        text = "some words of a text " * 120_000
        assert len(server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()["tokens"]) > 400_000

    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    post()
    assert process.memory_info().rss - before < 200 << 20


def test_the_event_loop_runs_beside_a_large_body(server: Server, demo_model: Path) -> None:
    """Long texts in threads: other requests are answered while one is worked on."""
    ids = Tokenizer.from_pretrained(demo_model).encode("some words of a text " * 40_000)
    for path, body in (
        ("/tokenize", {"prompt": "some words of a text " * 40_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": ids * 2}),
    ):
        answered = _answered_beside(lambda path=path, body=body: server.post(path, body, timeout=120), server)
        assert answered > 3, path


def _answered_beside(post: Callable[[], httpx.Response], server: Server) -> int:
    """How many times /health answered while `post` ran."""
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(post().status_code))
    count = 0
    with httpx.Client() as client:
        client.get(f"{server.url}/health", timeout=60)  # connected: opening a client takes as long as the work
        thread.start()
        while thread.is_alive():
            client.get(f"{server.url}/health", timeout=60)
            count += 1
    thread.join()
    assert status == [200]
    return count
