"""Streams that go on at another node. The nodes are scripted; tests/serve/test_resume.py has real ones."""

from __future__ import annotations

from typing import Any

import pytest

from lmkit.proxy import forward, health
from lmkit.proxy.journal import Journal
from lmkit.proxy.moves import MAX_LEFT, MAX_RESENDS
from lmkit.web.budget import Budget
from lmkit.web.resume import ERROR
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, Script, client, eventually, nodes, proxy_for

pytestmark = pytest.mark.anyio

HEADER, PRINT = "x-lmkit-stream", "fp_0123456789ab"
FIRST, SECOND, DONE = b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"
NOTE, END = b': lmkit [0,[5],"",0]\n\n', b": lmkit end\n\n"


def writes(*pieces: bytes, ends: bool, name: str = PRINT) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events((HEADER, name))
        for piece in pieces:
            await exchange.chunk(piece)
        if ends:
            await exchange.end()
        else:
            exchange.writer.close()

    return script


def keyed(name: str, script: Script) -> FakeNode:
    return FakeNode(name, api_key="k", script=script)


async def asked(first: Script, second: Script) -> tuple[str, Any, Any]:
    """What the client gets, and the requests that the nodes got."""
    async with (
        nodes(keyed("a", first), keyed("b", second)) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        text = (await http.post(CHAT, content=BODY, headers={HEADER: "mine"})).text
        return text, a.requests, b.requests


@pytest.mark.parametrize(
    "broken",
    [
        writes(FIRST + NOTE, SECOND, ends=False),
        writes(FIRST + NOTE, b"data: 2", ends=False),
        writes(FIRST + NOTE, SECOND + b": lmkit [0,[6]", ends=False),
        writes(FIRST + NOTE, b'data: {"error": "shutting down"}\n\n', ends=True),
    ],
    ids=["an event without its note", "half an event", "half a note", "the node's own error"],
)
async def test_a_stream_goes_on_at_another_node(broken: Script) -> None:
    text, (one,), (two,) = await asked(broken, writes(SECOND + NOTE, DONE + END, ends=True))
    assert text.encode() == FIRST + SECOND + DONE
    ((begun,), (resumed,)) = one.header(HEADER), two.header(HEADER)
    assert "mine" not in begun  # a client's own stays behind
    known = b'[[0,[5],"",0]]'
    assert resumed == f"{begun} {PRINT} {len(known)}"
    assert (one.body, two.body) == (BODY, known + BODY)


async def test_another_model_does_not_go_on_with_a_stream() -> None:
    other = writes(b"data: other\n\n" + NOTE, DONE + END, ends=True, name="fp_ffffffffffff")
    once = writes(FIRST + NOTE, ends=False)

    async def first(exchange: Exchange) -> None:
        if len(exchange.request.body) == len(BODY):
            await once(exchange)
        exchange.writer.close()

    text, one, two = await asked(first, other)
    assert text.startswith(FIRST.decode())
    assert "bad_gateway" in text
    assert "other" not in text
    assert len(one) + len(two) <= 2 * MAX_RESENDS + 2


async def test_a_stream_that_said_its_end_is_not_resumed() -> None:
    error = b'data: {"error": "your time is up"}\n\n'
    text, _, two = await asked(writes(FIRST + NOTE, ERROR.encode() + error, ends=True), writes(ends=True))
    assert text.encode() == FIRST + error
    assert not two


async def test_a_node_that_dies_behind_the_last_event_has_answered() -> None:
    text, _, two = await asked(writes(FIRST + NOTE, DONE + END, ends=False), writes(ends=True))
    assert text.encode() == FIRST + DONE
    assert not two


async def test_a_silent_node_that_goes_down_loses_its_stream_to_another() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.start_events((HEADER, PRINT))
        await exchange.chunk(FIRST + NOTE)
        await exchange.until_left()

    async with (
        nodes(FakeNode("a", script=silent), FakeNode("b", script=writes(SECOND + NOTE, DONE + END, ends=True))) as (
            a,
            b,
        ),
        proxy_for(a, b, policy="round_robin", health_interval=0.02, unhealthy_after=1) as (_, url),
        client(url) as http,
    ):
        async with http.stream("POST", CHAT, content=BODY) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == FIRST
            a.health = 503
            text = FIRST + b"".join([piece async for piece in pieces])
        assert text == FIRST + SECOND + DONE


async def test_a_node_without_a_key_is_told_nothing() -> None:
    async with (
        nodes(FakeNode("a", script=writes(FIRST, DONE, ends=True, name=""))) as (a,),
        proxy_for(a) as (_, url),
        client(url) as http,
    ):
        await http.post(CHAT, content=BODY, headers={HEADER: "mine"})
        assert a.requests[0].header(HEADER) == []


async def test_nodes_of_this_user_and_machine_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "proxy_key_at", lambda url, among: f"found for {url}")
    async with (
        nodes(
            FakeNode("a", script=writes(FIRST + NOTE, ends=False)),
            FakeNode("b", script=writes(SECOND + DONE + END, ends=True)),
        ) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).content == FIRST + SECOND + DONE
        for node in (a, b):
            assert node.requests[0].header("authorization") == [f"Bearer found for {node.url}"]
            assert node.checks[0].header("authorization") == []


async def test_a_node_without_a_key_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="lmkit"):
        async with nodes(FakeNode("a"), keyed("b", writes(ends=True))) as (a, b), proxy_for(a, b):
            pass
    assert caplog.text.count("its streams end when it fails") == 1
    assert f"node {a.url}: " in caplog.text


def notes_whole(*pieces: bytes, ends: bool, name: str = PRINT) -> Script:
    """As a node writes an answer that is no stream."""

    async def script(exchange: Exchange) -> None:
        assert exchange.request.header("x-lmkit-whole") == ["1"]
        await exchange.start_events((HEADER, name), ("x-lmkit-whole", "1"))
        for piece in pieces:
            await exchange.chunk(piece)
        if ends:
            await exchange.end()
        else:
            exchange.writer.close()

    return script


WHOLE = b'data: {"answer": 1}\n\n'


@pytest.mark.parametrize(
    "broken",
    [
        notes_whole(NOTE, ends=False),
        notes_whole(NOTE, b'data: {"ans', ends=False),
        notes_whole(NOTE, b'event: 503\ndata: {"error": "shutting down"}\n\n', ends=True),
    ],
    ids=["after a note", "within the answer", "the node's own error"],
)
async def test_an_answer_that_is_no_stream_goes_on_at_another_node(broken: Script) -> None:
    async with (
        nodes(keyed("a", broken), keyed("b", notes_whole(WHOLE + END, ends=True))) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        answer = await http.post(CHAT, content=BODY)
        known = b'[[0,[5],"",0]]'
        assert [node.requests[0].body for node in (a, b)] == [BODY, known + BODY]
    assert (answer.status_code, answer.json()) == (200, {"answer": 1})
    assert answer.headers["content-type"] == "application/json"
    assert (answer.headers["content-length"], HEADER in answer.headers) == ("13", False)


async def test_an_answer_that_another_model_began_is_begun_again() -> None:
    other = notes_whole(NOTE + WHOLE + END, ends=True, name="fp_ffffffffffff")
    async with (
        nodes(keyed("a", notes_whole(NOTE, ends=False)), keyed("b", other)) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json() == {"answer": 1}
        assert b.requests[0].body == b'[[0,[5],"",0]]' + BODY
        assert b.requests[-1].body == BODY


@pytest.mark.parametrize("left", [NOTE + b'data: {"ans', NOTE, WHOLE], ids=["half an answer", "a note", "no note"])
async def test_an_answer_that_another_kind_of_server_begins_again_has_nothing_of_the_first(left: bytes) -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        await exchange.chunk(b'{"answer":')
        await exchange.chunk(b" 2}")
        await exchange.end()

    async with (
        nodes(keyed("a", notes_whole(left, ends=False)), FakeNode("b", script=plain)) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).text == '{"answer": 2}'
        assert b.requests[-1].body == BODY


async def test_an_answer_that_is_no_stream_counts_in_the_memory_for_bodies() -> None:
    large = notes_whole(b'data: "' + b"x" * 5000 + b'"\n\n' + END, ends=True)
    limits = {"max_body_bytes": 4096, "body_memory": 4096}
    async with nodes(keyed("a", large)) as (a,), proxy_for(a, **limits) as (_, url), client(url) as http:
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")


async def test_an_answer_whose_nodes_all_break_is_an_error_of_the_nodes() -> None:
    async with (
        nodes(keyed("a", notes_whole(NOTE, ends=False))) as (a,),
        proxy_for(a, node_wait=0) as (_, url),
        client(url) as http,
    ):
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")


async def test_the_error_of_an_answer_that_is_no_stream_has_its_status() -> None:
    failed = notes_whole(NOTE, ERROR.encode() + b'event: 422\ndata: {"error": "x"}\n\n', ends=True)
    async with nodes(keyed("a", failed)) as (a,), proxy_for(a) as (_, url), client(url) as http:
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, answer.json()) == (422, {"error": "x"})


async def test_an_answer_that_breaks_off_is_asked_of_another_node() -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        exchange.writer.close()

    async with (
        nodes(FakeNode("a", script=broken), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin") as (proxy, url),
        client(url) as http,
    ):
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, answer.json()["node"]) == (200, "b")
        assert (len(a.requests), len(b.requests)) == (1, 1)
        assert [node.in_flight for node in proxy.registry.nodes()] == [0, 0]


async def test_an_answer_of_a_node_that_goes_down_within_it_is_asked_of_another() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        exchange.node.health = 503
        await exchange.until_left()

    async with (
        nodes(FakeNode("a", script=silent), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin", health_interval=0.02, unhealthy_after=1) as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json()["node"] == "b"


def test_notes_count_in_the_memory_for_bodies() -> None:
    budget = Budget(100, what="bodies of requests")
    with budget.share() as share:
        share.add(60)
        journal = Journal(share)
        journal.begin(PRINT.encode())
        assert journal.feed(FIRST + NOTE) == FIRST
        assert budget.used == 60 + len(journal.known()) - 1
        for _ in range(4):  # no room: the stream stays, and nobody is refused
            assert journal.feed(SECOND + NOTE) == SECOND
        assert not journal.is_open
        assert budget.used == 60
        assert journal.feed(DONE + END) == DONE
    assert budget.used == 0


async def test_a_node_that_goes_down_after_the_only_other_came_back_loses_its_request() -> None:
    """The request waits at its second node. The first one broke off, and is the only other."""

    async def broken(exchange: Exchange) -> None:
        if len(exchange.node.requests) == 1:
            exchange.writer.close()
        else:
            await exchange.reply(200, {"node": "a"})

    async def silent(exchange: Exchange) -> None:
        exchange.node.health = 503
        await exchange.until_left()

    async with (
        nodes(FakeNode("a", script=broken), FakeNode("b", script=silent)) as (a, b),
        proxy_for(a, b, policy="round_robin", health_interval=0.02, unhealthy_after=1, node_wait=5.0) as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json()["node"] == "a"
        assert len(b.requests) == 1


async def test_a_request_leaves_silent_nodes_and_stays_at_the_last_that_it_may_freeze() -> None:
    """Checks may fail because the machines are busy. Then the answer comes late, and is better than none."""

    async def silent(exchange: Exchange) -> None:
        exchange.node.health = 503
        if sum(len(node.requests) for node in among) <= MAX_LEFT:
            await exchange.until_left()
        else:
            await eventually(lambda: sum(node.healthy for node in proxy.registry.nodes()) == len(among) - MAX_LEFT - 1)
            await exchange.reply(200, {"node": "late"})

    among = [FakeNode(name, script=silent) for name in "abcde"]
    checks = {"health_interval": 0.02, "unhealthy_after": 1, "retry_share": 1.0}
    async with (
        nodes(*among),
        proxy_for(*among, policy="round_robin", **checks) as (proxy, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json() == {"node": "late"}
        assert sum(len(node.requests) for node in among) == MAX_LEFT + 1
        assert not any(node.waiting for node in proxy.registry.nodes())


async def test_a_stream_that_has_moved_often_stays_at_a_node_whose_checks_fail() -> None:
    at = 0

    async def moves(exchange: Exchange) -> None:
        nonlocal at
        at += 1
        await exchange.start_events((HEADER, PRINT))
        if at <= MAX_RESENDS:
            exchange.writer.close()
            return
        await exchange.chunk(FIRST + NOTE)
        exchange.node.health = 503
        await eventually(lambda: sum(node.healthy for node in proxy.registry.nodes()) == len(among) - 1)
        await exchange.chunk(SECOND + NOTE + DONE + END)
        await exchange.end()

    among = [FakeNode(str(number), api_key="k", script=moves) for number in range(MAX_RESENDS + 2)]
    checks = {"health_interval": 0.02, "unhealthy_after": 1}
    async with (
        nodes(*among) as fakes,
        proxy_for(*fakes, policy="round_robin", **checks) as (proxy, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).content == FIRST + SECOND + DONE


async def test_a_node_that_is_well_but_stalls_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "STALL_SECONDS", 0.05)

    async def stalls(exchange: Exchange) -> None:
        await exchange.start_events((HEADER, PRINT))
        await exchange.chunk(FIRST + NOTE)
        await exchange.until_left()

    text, _, two = await asked(stalls, writes(SECOND + NOTE, DONE + END, ends=True))
    assert text.encode() == FIRST + SECOND + DONE
    assert len(two) == 1


async def test_a_response_is_looked_for_at_the_node_that_ended_it() -> None:
    async def ends(exchange: Exchange) -> None:
        if exchange.request.method == "POST":
            await writes(SECOND + NOTE, DONE + END, ends=True)(exchange)
        else:
            await exchange.reply(200, {"node": exchange.node.name})

    async with (
        nodes(keyed("a", writes(FIRST + NOTE, ends=False)), keyed("b", ends)) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        assert (await http.post("/v1/responses", content=BODY)).content == FIRST + SECOND + DONE
        key = a.requests[0].header(HEADER)[0].split()[0]
        assert (await http.get(f"/v1/responses/resp_{key}")).json()["node"] == "b"
        assert len(a.requests) == 1


async def test_a_stream_that_gets_on_moves_as_often_as_its_nodes_end() -> None:
    """More often than a stream may move without a token, back to nodes that ended it, and past ones that refuse it."""
    last, at = 3 * MAX_RESENDS, 0

    async def script(exchange: Exchange) -> None:
        nonlocal at
        at += 1
        if at % 3 == 0:
            await exchange.reply(503, {}, ("x-lmkit-error", "engine_not_ready" if at % 2 else "shutting_down"))
            return
        await exchange.start_events((HEADER, PRINT))
        await exchange.chunk(b"data: %d\n\n" % at + NOTE)
        if at < last and at % 4:
            exchange.writer.close()
            return
        await exchange.chunk(b'data: {"error": 1}\n\n' if at < last else DONE + END)
        await exchange.end()

    options: dict[str, Any] = {"policy": "round_robin", "node_wait": 20.0, "health_interval": 0.05}
    async with (
        nodes(keyed("a", script), keyed("b", script)) as fakes,
        proxy_for(*fakes, **options) as (_, url),
        client(url) as http,
    ):
        got = (await http.post(CHAT, content=BODY)).content
    assert got.endswith(DONE)
    assert b"error" not in got
    assert got.count(b"data: ") == at - at // 3 + 1
    assert at >= last


async def test_a_stream_that_ends_each_node_at_the_same_token_is_given_up() -> None:
    fatal = writes(FIRST + NOTE, b'data: {"error": 1}\n\n', ends=True)

    async def script(exchange: Exchange) -> None:
        if len(exchange.request.body) == len(BODY):
            await fatal(exchange)
        else:
            await exchange.reply(503, {}, ("x-lmkit-error", "engine_unavailable"))

    async with nodes(keyed("a", script)) as (a,), proxy_for(a, node_wait=20.0) as (_, url), client(url) as http:
        got = (await http.post(CHAT, content=BODY)).text
        assert "bad_gateway" in got
        assert len(a.requests) <= MAX_RESENDS + 2
