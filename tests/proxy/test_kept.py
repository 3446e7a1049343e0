"""Files, batches, stored chats and conversations behind the proxy, with OpenAI's client and two real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.resilience.processes import Command, routing
from lmkit.proxy.config import ProxyConfig
from tests.proxy.fakes import FakeNode, client, nodes, proxy_for
from tests.serve.live import Server
from tests.serve.test_batches import ended, line, results, send

KEY, ALICE, BOB = "k" * 16, "alice-key-0123456", "bob-key-012345678"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with Server("--api-key", f"{KEY} role=proxy") as one, Server("--api-key", f"{KEY} role=proxy") as two:
        yield [one, two]


@pytest.fixture(scope="module")
def options(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    file = tmp_path_factory.mktemp("proxy") / "proxy.yaml"
    lines = [f"  - {{url: {server.url}, models: [demo], api_key: {KEY}}}" for server in servers]
    file.write_text("\n".join(["policy: round_robin", f"api_keys: [{ALICE}, {BOB}]", "nodes:", *lines]) + "\n")
    return "--config", str(file)


@pytest.fixture(scope="module")
def proxy(options: tuple[str, str]) -> Iterator[Command]:
    with routing(options=options) as command:
        yield command


def connect(proxy: Command, key: str = ALICE) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.url + "/v1", api_key=key, max_retries=0)


def test_batches_run_where_their_files_are(proxy: Command, servers: list[Server], options: tuple[str, str]) -> None:
    alice, bob = connect(proxy), connect(proxy, BOB)
    sent = [send(alice, [line("a", f"Hi {i}"), line("b")]) for i in range(4)]
    for batch in sent:
        done = ended(alice, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 2)
        assert set(results(alice, done.output_file_id)) == {"a", "b"}
    assert all("POST /v1/files 200" in server.log for server in servers)

    assert {batch.id for batch in alice.batches.list()} == {batch.id for batch in sent}
    everything = list(alice.files.list())
    assert len(everything) == 8
    assert [file.created_at for file in everything] == sorted((f.created_at for f in everything), reverse=True)
    assert [batch.id for batch in alice.batches.list(limit=1)] == [batch.id for batch in alice.batches.list()]
    assert len(list(alice.files.list(purpose="batch", limit=3))) == 4

    assert (list(bob.files.list()), list(bob.batches.list())) == ([], [])
    for ask in (lambda: bob.files.content(everything[0].id), lambda: bob.batches.retrieve(sent[0].id)):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.NotFoundError, match="there is no such file"):
        bob.batches.create(input_file_id=sent[0].input_file_id, endpoint="/v1/completions", completion_window="24h")

    with routing(options=options) as other:  # it knows nothing yet
        again = connect(other)
        assert again.batches.retrieve(sent[3].id).id == sent[3].id
        assert again.files.delete(sent[3].input_file_id).deleted
    assert len(list(alice.files.list())) == 7


def test_stored_chats_are_found_on_all_nodes(proxy: Command, servers: list[Server], options: tuple[str, str]) -> None:
    alice, bob = connect(proxy), connect(proxy, BOB)
    made = []
    for number in range(4):
        asked: list[Any] = [{"role": "user", "content": f"Hi {number}"}]
        labels = {"parity": "odd" if number % 2 else "even"}
        made.append(
            alice.chat.completions.create(model="demo", messages=asked, max_tokens=3, store=True, metadata=labels)
        )
        time.sleep(0.01)
    chats = alice.chat.completions
    assert sorted(chat.id for chat in chats.list(limit=3)) == sorted(chat.id for chat in made)
    of_labels = chats.list(metadata={"parity": "odd"}, model="demo", order="desc")
    assert {chat.id for chat in of_labels} == {made[1].id, made[3].id}
    assert list(chats.list(model="other")) == []
    assert [each.content for each in chats.messages.list(made[2].id)] == ["Hi 2"]
    assert chats.update(made[0].id, metadata={"parity": "none"}).metadata == {"parity": "none"}
    assert list(bob.chat.completions.list()) == []
    with pytest.raises(openai.NotFoundError):
        bob.chat.completions.retrieve(made[0].id)
    with routing(options=options) as other:  # it knows nothing yet
        again = connect(other).chat.completions
        assert again.retrieve(made[3].id).choices[0].message == made[3].choices[0].message
        assert again.delete(made[3].id).deleted
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made[3].id)
    with pytest.raises(openai.APIStatusError, match="unknown parameter"):
        alice.get("/chat/completions?frobnicate=1", cast_to=object)
    assert all("POST /v1/chat/completions 200" in server.log for server in servers)


def test_a_conversation_stays_with_the_node_that_keeps_it(proxy: Command, options: tuple[str, str]) -> None:
    alice, bob = connect(proxy), connect(proxy, BOB)
    for _ in range(3):
        conversation = alice.conversations.create(metadata={"a": "b"})
        for turn, name in enumerate([conversation.id, {"id": conversation.id}]):
            asked: dict[str, Any] = {"input": f"Turn {turn}", "max_output_tokens": 3, "conversation": name}
            answer = alice.responses.create(model="demo", stream=turn == 1, **asked)
            assert turn == 0 or [event.type for event in answer][-1] in ("response.completed", "response.incomplete")
        with routing(options=options) as other:
            again = connect(other).conversations
            assert again.retrieve(conversation.id).metadata == {"a": "b"}
            again.items.create(conversation.id, items=[{"role": "user", "content": "More", "type": "message"}])
        items = list(alice.conversations.items.list(conversation.id, order="asc", limit=2))
        assert [item.type for item in items] == ["message"] * len(items)
        assert len(items) >= 5
        first = items[0].id
        assert alice.conversations.items.retrieve(first, conversation_id=conversation.id).id == first
        alice.conversations.items.delete(first, conversation_id=conversation.id)
        assert len(list(alice.conversations.items.list(conversation.id))) == len(items) - 1
    for ask in (bob.conversations.retrieve, bob.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            ask(conversation.id)
    assert alice.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        alice.responses.create(model="demo", input="Hi", conversation=conversation.id)


def test_what_is_not_there(proxy: Command) -> None:
    alice = connect(proxy)
    with pytest.raises(openai.NotFoundError, match="keeps the file 'file-none'"):
        alice.files.retrieve("file-none")
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        send(alice, [line("a", model="other")])
    with pytest.raises(openai.NotFoundError, match="there is no such object"):
        alice.files.list(after="file-none")
    with pytest.raises(openai.BadRequestError, match="expected an input_file_id"):
        alice.post("/batches", body={"endpoint": "/v1/completions"}, cast_to=object)
    with pytest.raises(openai.APIStatusError, match="unknown parameter"):
        alice.get("/files?frobnicate=1", cast_to=object)


@pytest.mark.anyio
async def test_a_node_without_files_has_none_and_one_that_fails_is_no_empty_list() -> None:
    async def without(exchange: object) -> None:
        await exchange.reply(404, {"error": {}})  # type: ignore[attr-defined]

    async def failing(exchange: object) -> None:
        await exchange.reply(500, {"error": {}})  # type: ignore[attr-defined]

    async def nameless(exchange: object) -> None:
        await exchange.reply(200, {"data": [{"created_at": 1}], "has_more": True})  # type: ignore[attr-defined]

    for script, status, of_node in ((without, 200, 404), (failing, 502, 500), (nameless, 502, 200)):
        fakes = FakeNode("a", script=script), FakeNode("b", script=script)
        async with nodes(*fakes), proxy_for(*fakes) as (_, url), client(url) as http:
            assert (await http.get("/v1/files")).status_code == status
            form = {"file": ("in.jsonl", b'{"model": "\\q"}')}
            assert (await http.post("/v1/files", files=form)).status_code == of_node


def test_the_routes_can_be_left_out(tmp_path: Path) -> None:
    assert {"/v1/files", "/v1/batches"} <= set(ProxyConfig().forwarded_routes)
