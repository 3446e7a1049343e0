"""Tenants, salts and sessions: who shares KV with whom, what is said about it, and which tokens a session keeps."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.serve.sessions import Sessions
from lmkit.text import TokenHistory
from lmkit.turbo.request import Request
from lmkit.web.auth import tenant_of
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

END = 2  # <|im_end|>
ODD = [token for char in "import os" for token in TOKENIZER.encode(char)]  # a token a character
PROMPT = list(range(10, 40))


def details(response: httpx.Response) -> tuple[int, int]:
    """(prompt tokens, cached ones) of a response, whole or streamed."""
    assert response.status_code == 200, response.text
    text = response.text
    if text.startswith("data: "):
        text = text.split("\n\n")[-3].removeprefix("data: ")
    usage = json.loads(text)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_keys_are_tenants_with_names_that_do_not_tell_the_key() -> None:
    engine = ScriptedEngine()
    app = App(engine, ServerConfig(api_keys=("first", "second")))
    for key in ("first", "second", "first"):
        for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
            assert app.post(path, body, key).status_code == 200
    names = [request.tenant for request in engine.requests]
    assert names == [tenant_of(key) for key in ("first", "first", "second", "second", "first", "first")]
    assert len(set(names)) == 2
    assert not any(key in name for key in ("first", "second") for name in names)
    open_engine = ScriptedEngine()
    App(open_engine).post(CHAT_PATH, CHAT)
    assert open_engine.requests[0].tenant == ""


FIRST, SECOND = "1" * 32, "2" * 32


def named(app: App, body: dict[str, Any], client: str, key: str | None = None, path: str = CHAT_PATH) -> httpx.Response:
    headers = {"x-lmkit-tenant": client} | ({"authorization": f"Bearer {key}"} if key else {})
    return app.request("POST", path, json=body, headers=headers)


def test_a_proxys_key_names_tenants_and_another_key_only_splits_its_own() -> None:
    engine = ScriptedEngine()
    app = App(engine, ServerConfig(api_keys=("p role=proxy", "q role=proxy", "u")))
    for key, client in (("p", FIRST), ("p", SECOND), ("q", FIRST), ("u", FIRST), ("u", SECOND)):
        assert named(app, CHAT, client, key).status_code == 200
    app.post(CHAT_PATH, CHAT, "p")
    owners = [(request.tenant, request.cache_salt) for request in engine.requests]
    assert len(set(owners)) == 6
    assert owners[-1][0] == tenant_of("p")
    tenants = [tenant for tenant, _ in owners]
    assert len({*tenants[:3]}) == 3
    assert tenants[3] == tenants[4] == tenant_of("u")  # its quota stays its own, whatever it names


@pytest.mark.parametrize("config", [ServerConfig(), ServerConfig(api_keys=("k",))])
def test_named_clients_share_nothing_under_one_key_or_none(config: ServerConfig) -> None:
    app, key = App(ScriptedEngine(), config), "k" if config.api_keys else None
    for salt in ({}, {"cache_salt": "x"}):
        total, cached = details(named(app, CHAT | salt, FIRST, key))
        assert cached == 0
        assert details(named(app, CHAT | salt, FIRST, key)) == (total, total - 1)
        assert details(named(app, CHAT | salt, SECOND, key)) == (total, 0)
    assert details(app.post(CHAT_PATH, CHAT, key))[1] == 0
    engine = ScriptedEngine()
    app = App(engine, config)
    for client in (FIRST, SECOND):
        named(app, CHAT | {"session_id": "s"}, client, key)
    assert len({request.session_id for request in engine.requests}) == 2


@pytest.mark.parametrize("name", ["", "x", "A" * 32, "1" * 31, "1" * 33, f"{FIRST},{SECOND}"])
def test_a_malformed_client_name_is_refused(name: str) -> None:
    response = named(App(ScriptedEngine()), CHAT, name)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("stream", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT | {"prompt": PROMPT})])
def test_cached_tokens_are_reported(path: str, body: dict[str, Any], stream: dict[str, Any]) -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("a", "b")))
    total, cached = details(app.post(path, body | stream, "a"))
    assert cached == 0
    assert details(app.post(path, body | stream, "a")) == (total, total - 1)
    assert details(app.post(path, body | stream, "b")) == (total, 0)
    assert details(app.post(path, body | stream | {"cache_salt": "x"}, "a")) == (total, 0)


def test_several_choices_count_their_prompt_once() -> None:
    app = App(ScriptedEngine())
    assert details(app.post(TEXT_PATH, TEXT | {"prompt": [PROMPT, PROMPT[:5]], "n": 3})) == (35, 4)
    assert details(app.post(TEXT_PATH, TEXT | {"prompt": PROMPT, "n": 2})) == (30, 29)


def test_the_openai_client_reads_them() -> None:
    from openai.types import CompletionUsage

    usage = App(ScriptedEngine()).post(CHAT_PATH, CHAT).json()["usage"]
    parsed = CompletionUsage.model_validate(usage)
    assert parsed.prompt_tokens_details is not None
    assert parsed.prompt_tokens_details.cached_tokens == 0


class Dialogue:
    """A client that sends back what it got."""

    def __init__(self, app: App, key: str | None = None, **fields: Any) -> None:
        self._app, self._key, self._fields = app, key, fields
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str, **fields: Any) -> tuple[int, int]:
        self.messages.append({"role": "user", "content": text})
        body = {"model": "model", "messages": self.messages, **self._fields, **fields}
        response = self._app.post(CHAT_PATH, body, self._key)
        if body.get("stream"):
            chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
            answer = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        else:
            answer = response.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        return details(response)


def odd_answers(finish_reason: Any = "stop") -> ScriptedEngine:
    answer = [*ODD, END] if finish_reason == "stop" else ODD
    return ScriptedEngine(lambda request: answer, finish_reason=finish_reason)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("stream", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_a_session_computes_only_its_new_tokens(finish_reason: Any, stream: dict[str, Any]) -> None:
    """Although tokenizing the answers again would give other tokens, from the first of them on."""
    assert TOKENIZER.encode("import os") != ODD
    engine = odd_answers(finish_reason)
    dialogue = Dialogue(App(engine), session_id="me", **stream)
    dialogue.ask("one")
    for _ in range(3):
        before = len(engine.requests[-1].prompt_ids) + len(ODD)
        _, cached = dialogue.ask("two")
        assert cached >= before
        assert TOKENIZER.decode(engine.requests[-1].prompt_ids, False) == TOKENIZER.render_chat(dialogue.messages[:-1])
    assert engine.requests[-1].session_id == "me"
    first = len(engine.requests[0].prompt_ids)
    without = Dialogue(App(odd_answers(finish_reason)))
    without.ask("one")
    assert without.ask("two")[1] < first + len(ODD)


def test_sessions_of_two_tenants_have_nothing_in_common() -> None:
    engine = odd_answers()
    app = App(engine, ServerConfig(api_keys=("a", "b")))
    mine, theirs = Dialogue(app, "a", session_id="me"), Dialogue(app, "b", session_id="me")
    mine.ask("one")
    theirs.messages = list(mine.messages)
    theirs.ask("two")
    assert engine.requests[-1].prompt_ids == TOKENIZER.encode_chat(theirs.messages[:-1])
    mine.ask("two")
    assert engine.requests[-1].prompt_ids != TOKENIZER.encode_chat(mine.messages[:-1])


@pytest.mark.parametrize("fields", [{"stop": "t o"}, {"stop": "t o", "include_stop_str_in_output": True}, {"n": 2}])
def test_answers_that_are_not_whole_leave_a_session_as_it_was(fields: dict[str, Any]) -> None:
    engine = odd_answers()
    dialogue = Dialogue(App(engine), session_id="me")
    dialogue.ask("one")
    kept = len(engine.requests[0].prompt_ids) + len(ODD)
    dialogue.ask("two", **fields)
    _, cached = dialogue.ask("three")
    assert cached >= kept, "the first turn's tokens are still known"
    text, ids = TOKENIZER.render_chat(dialogue.messages[:-1]), engine.requests[-1].prompt_ids
    known = TOKENIZER.decode(ids[:kept], False)
    assert text.startswith(known)
    assert ids[kept:] == TOKENIZER.encode(text.removeprefix(known))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def history(text: str) -> TokenHistory:
    return TokenHistory().encode(TOKENIZER, text).answered(TOKENIZER.encode("x"))


def test_sessions_end_with_their_lease() -> None:
    clock = Clock()
    sessions = Sessions(10, clock=clock)
    sessions.put(("t", "a"), history("one"))
    clock.now = 5
    sessions.put(("t", "b"), history("two"))
    clock.now = 9
    sessions.put(("t", "a"), history("three"))
    clock.now = 15
    assert sessions.get(("t", "b")) == TokenHistory()
    assert sessions.get(("t", "a")) == history("three")
    assert sessions.get(("u", "a")) == TokenHistory()
    clock.now = 19
    assert sessions.get(("t", "a")) == TokenHistory()
    assert len(sessions) == 0


def test_sessions_are_bounded_in_bytes() -> None:
    one = history("some words " * 20)
    sessions = Sessions(10, max_bytes=one.num_bytes * 3)
    for i in range(50):
        sessions.put(("t", str(i % 7)), one)
        assert len(sessions) <= 3
    assert [sessions.get(("t", str(i % 7))) == one for i in range(45, 50)] == [False, False, True, True, True]
    sessions.put(("t", "huge"), history("some words " * 100))
    assert sessions.get(("t", "huge")) == TokenHistory()
    assert len(sessions) == 3, "what cannot be kept at all pushes nothing out"


def test_an_engine_request_has_nothing_of_a_session_that_is_not_asked_for() -> None:
    engine = ScriptedEngine()
    App(engine).post(CHAT_PATH, CHAT | {"prompt_cache_key": "any"})
    (request,) = engine.requests
    assert request == Request(request_id=request.request_id, prompt_ids=request.prompt_ids, params=request.params)
