"""Answers of chats that are stored: `store: true` and the routes that fetch, list, label and delete them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lmkit.config import ServerConfig
from tests.serve.fake_engine import script
from tests.serve.in_process import CHAT, CHAT_PATH, App, ScriptedEngine
from tests.serve.live import Server

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        Server("--tool-parser", "hermes", "--reasoning-parser", "think") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return client.chat.completions.create(model="demo", messages=messages, store=True, **fields)


def test_what_was_answered_is_what_is_stored(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "max_tokens": 4, "metadata": {"a": "b"}}
    answer = ask(client, "Hi", **fields)
    assert client.chat.completions.retrieve(answer.id).to_dict() == answer.to_dict()
    assert answer.metadata == {"a": "b"}
    listed = client.chat.completions.messages.list(answer.id).data
    assert [(message.id, message.role, message.content) for message in listed] == [
        (f"{answer.id}-0", "system", "Be brief."),
        (f"{answer.id}-1", "user", "Hi"),
    ]


def test_a_stream_is_stored_as_its_chunks_add_up(client: openai.OpenAI) -> None:
    text = script([f"<think>\nHm.\n</think>\n\nI call.\n{CALL}\n{CALL}"])
    ids, seen = [], {"content": "", "reasoning": ""}
    for chunk in ask(client, text, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        ids += [call.id for call in delta.tool_calls or () if call.id]
        for name in seen:
            seen[name] += getattr(delta, name, None) or ""
    message = client.chat.completions.retrieve(chunk.id).choices[0].message
    assert {name: getattr(message, name) for name in seen} == seen == {"content": "I call.", "reasoning": "Hm."}
    assert message.tool_calls is not None
    assert [call.id for call in message.tool_calls] == ids
    assert len(set(ids)) == 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1}] * 2  # type: ignore[union-attr]


def test_lists_labels_and_deletion(client: openai.OpenAI) -> None:
    made = [ask(client, "Hi", max_tokens=1, metadata={"of": "list", "i": str(i)}).id for i in range(3)]
    chats = client.chat.completions

    def ids(**fields: Any) -> list[str]:
        return [chat.id for chat in chats.list(metadata={"of": "list"}, **fields)]

    assert ids() == made
    assert ids(limit=1, order="desc") == made[::-1]  # in three pages
    assert ids(after=made[0], model="demo") == made[1:]
    assert ids(model="other") == []
    assert [chat.id for chat in chats.list(metadata={"of": "list", "i": "1"})] == [made[1]]
    assert chats.update(made[0], metadata={"of": "list", "new": "x"}).metadata == {"of": "list", "new": "x"}
    assert ids() == made
    assert chats.delete(made[0]).deleted
    assert ids() == made[1:]
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made[0])


def test_chats_and_responses_do_not_meet(client: openai.OpenAI) -> None:
    chat, response = ask(client, "Hi", max_tokens=1).id, client.responses.create(model="demo", input="Hi").id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(chat)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", input="Hi", previous_response_id=chat)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(response)
    assert response not in [chat.id for chat in client.chat.completions.list()]


def test_mistakes_are_named() -> None:
    app = App(ScriptedEngine(), ServerConfig(response_store=0))
    error = app.post(CHAT_PATH, CHAT | {"store": True}).json()["error"]
    assert (error["param"], error["code"]) == ("store", "unsupported_parameter")
    app = App(ScriptedEngine())
    id = app.post(CHAT_PATH, CHAT | {"store": True}).json()["id"]
    assert app.post(f"{CHAT_PATH}/{id}", {"metadata": {"a": 1}}).json()["error"]["param"] == "metadata"
    for path, param in (("?limit=0", "limit"), ("?order=up", "order"), ("?x=1", "x"), ("?after=x", "after")):
        answer = app.request("GET", CHAT_PATH + path)
        assert answer.json()["error"]["param"] == param
    assert app.request("GET", f"{CHAT_PATH}/{id}?x=1").status_code == 400
