"""OpenAI's conversations, with the official client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from lmkit.config import ServerConfig
from lmkit.web.response_store import ResponseStore, Stored
from tests.serve.in_process import App, ScriptedEngine
from tests.serve.responses.test_responses import PATH, ask, prompt_tokens
from tests.serve.test_openai_client import text

BEGUN: Any = [{"type": "message", "role": "user", "content": "I am Ada."}]


def said(client: openai.OpenAI, id: str) -> list[tuple[str, str]]:
    items: list[Any] = list(client.conversations.items.list(id, order="asc", limit=2))
    return [(item.role, item.content[0].text) for item in items]


@pytest.mark.parametrize("how", ["whole", "stream", "background", "not stored"])
def test_responses_go_on_with_a_conversation_and_add_to_it(client: openai.OpenAI, how: str) -> None:
    id = client.conversations.create(items=BEGUN).id
    answer = ask(client, conversation=id, stream=how == "stream", background=how == "background", store=how[0] != "n")
    if how == "stream":
        answer = list(answer)[-1].response
    while answer.status in ("queued", "in_progress"):
        answer = client.responses.retrieve(answer.id)
    assert (answer.conversation.id, answer.usage.input_tokens) == (
        id,
        prompt_tokens(("user", "I am Ada."), ("user", "Hello")),
    )
    turns = [("user", "I am Ada."), ("user", "Hello"), ("assistant", text(9))]
    assert said(client, id) == turns
    count = client.responses.input_tokens.count(model="demo", input="More", conversation=id).input_tokens
    assert ask(client, input="More", conversation={"id": id}).usage.input_tokens == count
    assert count == prompt_tokens(*turns, ("user", "More"))
    assert said(client, id) == [*turns, ("user", "More"), ("assistant", text(9))]


def test_its_items_and_labels(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"})
    assert client.conversations.retrieve(made.id).to_dict() == made.to_dict()
    added = client.conversations.items.create(made.id, items=[*BEGUN, *BEGUN])
    assert len(added.data) == 2
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    first, second = (item.id for item in added.data)
    assert first is not None
    assert client.conversations.items.retrieve(first, conversation_id=made.id).id == first
    client.conversations.items.delete(first, conversation_id=made.id)
    assert [item.id for item in client.conversations.items.list(made.id)] == [second]
    assert client.conversations.delete(made.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        ask(client, conversation=made.id)


def test_two_turns_at_once_are_both_kept(tmp_path: Path) -> None:
    store = ResponseStore(lambda: tmp_path, max_bytes=1 << 20, ttl=60)

    async def main() -> bytes:
        await store.put("me", Stored("conv_a", None, b"0", b"{}"))
        adding = (lambda stored, i=i: stored._replace(input=stored.input + b"%d" % i) for i in range(10))
        await asyncio.gather(*(store.change("me", "conv_a", change) for change in adding))
        assert not await store.change("you", "conv_a", lambda stored: stored)
        found = await store.get("me", "conv_a")
        assert found is not None
        return found.input

    assert sorted(asyncio.run(main())) == sorted(b"00123456789")


def test_a_turn_without_room_fails_and_leaves_the_conversation() -> None:
    app = App(ScriptedEngine(), ServerConfig(response_store=8 << 10))  # one may have 1 KiB
    id = app.post("/v1/conversations", {"items": BEGUN}).json()["id"]
    body = {"model": "model", "input": "x" * 900, "conversation": id}
    error = app.post(PATH, body)
    assert (error.status_code, error.json()["error"]["param"]) == (503, "conversation")
    assert len(app.request("GET", f"/v1/conversations/{id}/items").json()["data"]) == 1
