"""Conversations of the Responses API whose node is down: they go on at another, with their items as the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.errors import ConfigError
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import ProxyConfig
from tests.proxy.fakes import Exchange, FakeNode, Script, client, nodes, proxy_for

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"


def text(value: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": value}]}


class Writer:
    """A node that answers with the number of items that it got, and keeps what it made."""

    def __init__(self, name: str) -> None:
        self.kept = set[str]()
        self.inputs = list[Any]()
        self.breaks = False
        self.node = FakeNode(name=name, script=self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if self.breaks:
            exchange.reset()
            return
        if request.method != "POST":
            found = request.target.rpartition("/")[2] in self.kept
            await exchange.reply(200 if found else 404, {"of": self.node.name})
            return
        body = json.loads(request.body)
        if (previous := body.get("previous_response_id")) and previous not in self.kept:
            await exchange.reply(400, {"error": {"message": "not stored here"}})
            return
        self.inputs.append(body["input"])
        id, store = f"resp_{self.node.name}{len(self.inputs)}", body.get("store", True)
        self.kept.add(id)
        response = {"id": id, "status": "completed", "store": store, "output": [text(f"I am {id}")]}
        if not body.get("stream"):
            await exchange.reply(200, response)
            return
        await exchange.start_events()
        for kind, shown in (("created", {"id": id, "status": "in_progress"}), ("completed", response)):
            event = {"type": f"response.{kind}", "response": shown}
            await exchange.chunk(f"event: response.{kind}\ndata: {json.dumps(event)}\n\n".encode())
        await exchange.end()


@pytest.fixture
def pair() -> tuple[Writer, Writer]:
    return Writer("a"), Writer("b")


async def ask(http: httpx.AsyncClient, given: Any, previous: str | None = None, **fields: Any) -> str:
    answer = await http.post(PATH, json={"model": "m", "input": given, "previous_response_id": previous, **fields})
    assert answer.status_code == 200, answer.text
    return "resp_" + answer.text.partition('"resp_')[2].partition('"')[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["it is down", "it breaks off", "it drains"])
async def test_a_conversation_goes_on_at_another_node(
    pair: tuple[Writer, Writer], tmp_path: Path, stream: bool, how: str
) -> None:
    async with (
        nodes(pair[0].node, pair[1].node) as fakes,
        proxy_for(*fakes, policy="round_robin", data_dir=str(tmp_path / "data")) as (proxy, url),
        client(url) as http,
    ):
        first = await ask(http, "one", stream=stream)
        second = await ask(http, [{"role": "user", "content": "two"}], first, stream=stream)
        home, other = pair if first[5] == "a" else pair[::-1]
        assert second[5] == home.node.name
        if how == "it is down":
            await home.node.stop()
        elif how == "it breaks off":
            home.breaks = True
        else:
            await proxy.fleet.drain(home.node.url, True)
        third = await ask(http, "three", second, stream=stream)
        said = {"type": "message", "role": "user"}
        assert other.inputs == [[
            said | {"content": "one"}, text(f"I am {first}"),
            {"role": "user", "content": "two"}, text(f"I am {second}"),
            said | {"content": "three"},
        ]]  # fmt: skip
        fourth = await ask(http, "four", third, stream=stream)  # its own node keeps it now
        assert (fourth[5], other.inputs[-1]) == (other.node.name, "four")
        if how == "it is down":
            assert (await http.get(f"{PATH}/{second}")).json()["output"] == [text(f"I am {second}")]
            await http.delete(f"{PATH}/{second}")
            assert (await http.get(f"{PATH}/{second}")).status_code != 200
            refused = await http.post(PATH, json={"model": "m", "input": "x", "previous_response_id": second})
            assert refused.status_code == 503


async def test_a_stream_that_continues_a_response_goes_on_within(tmp_path: Path) -> None:
    """The other node gets the tokens that the client has, and the conversation in place of the id."""
    seen = list[bytes]()

    def streams(*pieces: bytes, ends: bool) -> Script:
        async def script(exchange: Exchange) -> None:
            seen.append(exchange.request.body)
            if b"resp_1" not in exchange.request.body and not ends:
                made = {"id": "resp_1", "status": "completed", "store": True, "output": [text("first")]}
                await exchange.reply(200, made)
                return
            await exchange.start_events(("x-lmkit-stream", "fp_0123456789ab"))
            for piece in pieces:
                await exchange.chunk(piece)
            if ends:
                await exchange.end()
            else:
                exchange.writer.close()

        return script

    note, end = b': lmkit [0,[5],"",0]\n\n', b": lmkit end\n\n"
    a = FakeNode("a", api_key="k", script=streams(b"data: 1\n\n" + note, ends=False))
    b = FakeNode("b", api_key="k", script=streams(b"data: 2\n\n" + note, end, ends=True))
    async with (
        nodes(a, b) as fakes,
        proxy_for(*fakes, policy="round_robin", data_dir=str(tmp_path / "data")) as (_, url),
        client(url) as http,
    ):
        id = await ask(http, "one")
        body = {"model": "m", "input": "two", "previous_response_id": id, "stream": True}
        assert (await http.post(PATH, json=body)).text == "data: 1\n\ndata: 2\n\n"
    known, _, resumed = seen[-1].partition(b"]]")
    assert known == b'[[0,[5],"",0'
    assert [item["content"] for item in json.loads(resumed)["input"]][::2] == ["one", "two"]
    assert "previous_response_id" not in json.loads(resumed)


async def test_copies_belong_to_one_client(pair: tuple[Writer, Writer], tmp_path: Path) -> None:
    async with (
        nodes(pair[0].node, pair[1].node) as fakes,
        proxy_for(*fakes, data_dir=str(tmp_path / "data"), api_keys=("one", "two")) as (_, url),
        client(url) as http,
    ):
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        http.headers = httpx.Headers(mine)
        id = await ask(http, "secret")
        await next(each for each in pair if each.node.name == id[5]).node.stop()
        assert (await http.get(f"{PATH}/{id}")).status_code == 200
        assert (await http.get(f"{PATH}/{id}", headers=other)).status_code != 200
        body = {"model": "m", "input": "x", "previous_response_id": id}
        assert (await http.post(PATH, json=body, headers=other)).status_code == 503
        assert b"Bearer" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.sqlite*"))
        assert (await http.post(PATH, json=body)).status_code == 200


async def test_what_is_not_stored_is_not_kept(pair: tuple[Writer, Writer], tmp_path: Path) -> None:
    async with (
        nodes(pair[0].node, pair[1].node) as fakes,
        proxy_for(*fakes, data_dir=str(tmp_path / "data")) as (proxy, url),
        client(url) as http,
    ):
        id = await ask(http, "secret", store=False)
        assert proxy.transcripts is not None
        assert await proxy.transcripts.store.get("", id) is None
        kept = await ask(http, "open")
        assert await proxy.transcripts.store.get("", kept) is not None


async def test_copies_outlive_the_proxy(pair: tuple[Writer, Writer], tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path / "data"), "policy": "round_robin"}
    async with nodes(pair[0].node, pair[1].node) as fakes:
        async with proxy_for(*fakes, **options) as (_, url), client(url) as http:
            id = await ask(http, "one")
        home, other = pair if id[5] == "a" else pair[::-1]
        await home.node.stop()
        async with proxy_for(*fakes, **options) as (_, url), client(url) as http:
            assert (await ask(http, "two", id))[5] == other.node.name


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Proxy(ProxyConfig(data_dir=str(tmp_path)))
