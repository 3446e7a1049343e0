"""Hooks before and after generation, each in processes of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.serve.hooks.hooks import NEW_CHARS, Hooks
from lmkit.turbo.request import Request
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine

ANSWER = "The quick brown fox jumps. "
TEXT: dict[str, Any] = {"model": "model", "max_tokens": 500}


def app(*names: str, answer: str = ANSWER) -> tuple[App, ScriptedEngine]:
    engine = ScriptedEngine(answer=lambda request: TOKENIZER.encode(answer, False))
    return App(engine, ServerConfig(hooks=tuple(f"tests.serve.hook_examples:{name}" for name in names))), engine


def post(to: App, *bodies: dict[str, Any], paths: Sequence[str] = ()) -> list[httpx.Response]:
    """One request after the other, in one event loop."""
    each = zip(paths or ["/v1/completions"] * len(bodies), bodies, strict=True)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(to.app), base_url="http://localhost") as client:
            try:
                return [await client.post(path, json=TEXT | body) for path, body in each]
            finally:
                await to.serving.hooks.close()

    return asyncio.run(main())


def prompt(request: Request) -> str:
    return TOKENIZER.decode(request.prompt_ids)


def error(response: httpx.Response) -> tuple[int, str, str]:
    shown = response.json()["error"]
    return response.status_code, shown["code"], shown["message"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_request_and_its_answer_are_changed() -> None:
    to, engine = app("Redact")
    whole, streamed, plain = post(
        to, {"prompt": "a SECRET", "return_token_ids": True, "logprobs": 1}, {"prompt": "b", "stream": True},
        {"prompt": "c", "echo": True},
    )  # fmt: skip
    assert [prompt(request) for request in engine.requests] == ["a xxx", "b", "c"]
    choice = whole.json()["choices"][0]
    assert choice["text"] == ANSWER.replace("fox", "***")
    assert choice["token_ids"] == choice["logprobs"]["tokens"] == [], "they would tell what was taken out"
    assert whole.json()["usage"]["completion_tokens"] == len(TOKENIZER.encode(ANSWER, False))
    assert [c["text"] for event in events(streamed) for c in event["choices"]] == [ANSWER.replace("fox", "***")]
    assert plain.json()["choices"][0]["text"] == "c" + ANSWER.replace("fox", "***")


def test_a_request_and_an_answer_are_refused() -> None:
    to, engine = app("Moderate", answer="word " * NEW_CHARS + "lazy " + "word " * NEW_CHARS)
    first, second, third = post(to, {"prompt": "FORBIDDEN"}, {"prompt": "a"}, {"prompt": "b", "stream": True})
    assert error(first) == (400, "content_filter", "not on /v1/completions")
    assert error(second) == (400, "content_filter", "not here")
    *parts, last = events(third)
    assert last["error"]["code"] == "content_filter"
    sent = "".join(c["text"] for event in parts for c in event["choices"])
    assert len(sent) > NEW_CHARS, "the text so far is sent"
    assert "lazy" not in sent
    assert len(engine.requests) == 2


def test_the_text_so_far_is_seen_in_parts_and_sent_whole() -> None:
    text = "word " * NEW_CHARS
    to, _ = app("Moderate", answer=text)
    (streamed,) = post(to, {"prompt": "a", "stream": True})
    parts = [c["text"] for event in events(streamed) for c in event["choices"]]
    assert "".join(parts) == text
    assert len(parts) > 1


def test_hooks_run_in_their_order() -> None:
    to, engine = app("Redact", "Moderate")
    (response,) = post(to, {"prompt": "a SECRET"})
    assert prompt(engine.requests[0]) == "a xxx"
    assert response.json()["choices"][0]["text"] == ANSWER.replace("fox", "***")


@pytest.mark.parametrize(("word", "why"), [
    ("RAISE", "it raised ValueError at .*hook_examples.py:"), ("LEAVE", "its process ended"),
    ("SLEEP", "it took more than 2 s"), ("SEVEN", "before returned something else"),
])  # fmt: skip
def test_a_hook_that_fails_refuses_the_request_or_lets_it_pass(
    word: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("lmkit")
    logger.addHandler(caplog.handler)
    try:
        for name, passes in (("Fails", False), ("FailsOpen", True)):
            to, _ = app(name)
            first, second = post(to, {"prompt": word}, {"prompt": "fine"})
            assert second.status_code == 200, "the hook's process is there again"
            assert (first.status_code == 200) == passes
            if not passes:
                assert error(first) == (500, "hook_failed", first.json()["error"]["message"])
                assert "Traceback" not in first.text
                assert word not in first.text
    finally:
        logger.removeHandler(caplog.handler)
    found = {record.getMessage() for record in caplog.records if record.getMessage().startswith("hook ")}
    assert len(found) == 2
    for line in found:
        assert re.search(why, line), line
        assert word not in line, "a log has no prompts"


def test_a_text_that_is_partly_sent_cannot_change() -> None:
    to, _ = app("Changes")
    assert error(post(to, {"prompt": "a"})[0])[:2] == (500, "hook_failed")


def test_other_routes_have_the_hooks_too() -> None:
    to, engine = app("Moderate")
    chat = [{"role": "user", "content": "FORBIDDEN"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat}, "/v1/messages": {"messages": chat},
        "/v1/responses": {"input": "FORBIDDEN"}, "/generate": {"text": "FORBIDDEN"},
        "/v1/embeddings": {"input": "FORBIDDEN"}, "/v1/rerank": {"query": "FORBIDDEN", "documents": ["a"]},
        "/api/chat": {"messages": chat}, "/api/generate": {"prompt": "FORBIDDEN"}, "/api/embed": {"input": "FORBIDDEN"},
        "/completion": {"prompt": "FORBIDDEN"}, "/infill": {"prompt": "FORBIDDEN"},
    }  # fmt: skip
    for path, response in zip(bodies, post(to, *bodies.values(), paths=list(bodies)), strict=True):
        assert response.status_code == 400, path
        assert f"not on {path}" in response.text
    assert not engine.requests


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.serve.hook_examples:Nothing", "neither a function before nor after"),
        ("tests.serve.hook_examples:Wrong", "'some'"),
        ("tests.serve.hook_examples:Missing", "AttributeError"),
        ("tests.serve.hook_examples:Breaks", "RuntimeError: cannot be made"),
        ("no_such_hook", "ModuleNotFoundError: No module named 'no_such_hook'"),
    ],
)
def test_a_hook_that_cannot_be_used_is_a_mistake_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Hooks.load((name,))
    assert str(error.value).startswith(f"--hook {name}: ")
    assert "\n" not in str(error.value)
