"""The receipts of an answer that moved: the parts of its nodes, and which node is gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, Script, client, nodes, proxy_for

pytestmark = pytest.mark.anyio

ID, STREAM, PRINT = "chatcmpl-1", "x-lmkit-stream", "fp_0123456789ab"
ASKED = {"x-lmkit-receipt": "1"}
FIRST, SECOND, DONE = b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"
NOTE, END = b': lmkit [0,[5],"",0]\n\n', b": lmkit end\n\n"


def part(known: int, count: int) -> dict[str, Any]:
    choices = [{"known_tokens": known, "answer_tokens": count}]
    return {"record": {"id": ID, "choices": choices}, "salt": "00", "key": "k", "signature": f"of {known}"}


def node(name: str, *pieces: bytes, ends: bool = True, status: int = 200, **receipt: Any) -> FakeNode:
    """It streams these pieces, then ends or breaks off, and has a receipt if one is given."""

    async def script(exchange: Exchange) -> None:
        if exchange.request.target == f"/receipts/{ID}":
            await exchange.reply(status if receipt else 404, receipt)
            return
        await exchange.start_events((STREAM, PRINT), ("x-lmkit-receipt", ID))
        for piece in pieces:
            await exchange.chunk(piece)
        if ends:
            await exchange.end()
        else:
            exchange.writer.close()

    return FakeNode(name, script=script)


async def test_an_answer_that_moved_has_the_parts_of_both_nodes_and_says_who_is_gone() -> None:
    broken = node("a", FIRST + NOTE, ends=False, **part(0, 1))
    last = node("b", SECOND + NOTE, DONE + END, **part(1, 2))
    third = node("c")
    async with (
        nodes(third, last, broken),
        proxy_for(broken, last, third, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        answer = await http.post(CHAT, content=BODY, headers=ASKED)
        assert answer.content == FIRST + SECOND + DONE
        assert answer.headers["x-lmkit-receipt"] == ID
        assert [request.header("x-lmkit-receipt") for node in (broken, last) for request in node.requests] == [
            ["1"], ["1"],
        ]  # fmt: skip
        path = f"/receipts/{ID}"
        first, second = {"node": broken.url, **part(0, 1)}, {"node": last.url, **part(1, 2)}
        assert (await http.get(path)).json() == {"parts": [first, second], "silent": []}
        await broken.stop()
        assert (await http.get(path)).json() == {"parts": [second], "silent": [broken.url]}
        await last.stop()
        gone = await http.get(path)
        assert gone.status_code == 404
        assert all(node.url in gone.text for node in (broken, last))
        assert third.url not in gone.text


@pytest.mark.parametrize("wrong", [{"status": 500, **part(0, 1)}, {"status": 302, **part(0, 1)}])
async def test_a_node_whose_answer_is_no_receipt_is_named(wrong: dict[str, Any]) -> None:
    failing, good = node("a", **wrong), node("b", **part(1, 2))
    async with nodes(failing, good), proxy_for(failing, good) as (_, url), client(url) as http:
        told = (await http.get(f"/receipts/{ID}")).json()
    assert told == {"parts": [{"node": good.url, **part(1, 2)}], "silent": [failing.url]}


async def test_a_node_that_has_a_list_there_is_named() -> None:
    script: Script = lambda exchange: exchange.reply(200, [])  # noqa: E731
    async with nodes(odd := FakeNode("a", script=script)), proxy_for(odd) as (_, url), client(url) as http:
        answer = await http.get(f"/receipts/{ID}")
    assert (answer.status_code, odd.url in answer.text) == (404, True)
