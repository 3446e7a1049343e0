"""How often a call moves: as long as the nodes that break by it have gone down, and its deadline allows."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from random import Random

import pytest

from lmkit.proxy import moves as module
from lmkit.proxy.journal import Journal
from lmkit.proxy.moves import FIRST_PAUSE, MAX_MOVES, MAX_RESENDS, Moves
from lmkit.web.budget import Budget
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for

DEADLINE, WAIT = 600.0, 30.0
MOST_SENDS = MAX_RESENDS + 1 + math.ceil(math.log2(DEADLINE / FIRST_PAUSE))  # the pauses double


@dataclass
class Struck:
    healthy: bool = True
    up_since: float = 0.0


class Run:
    """One call under a virtual clock. `breaks` are those since the last new token."""

    def __init__(self) -> None:
        self.now, self.breaks = 0.0, 0
        self.journal = Journal(Budget(1 << 20, what="bodies of requests").share())
        self.moves = Moves(self.journal, WAIT, DEADLINE, lambda: self.now)

    def broken(self, node: Struck | None, after: float = 0.0, *, dies: bool, streams: bool = False) -> None:
        """The node breaks the call after so many seconds. If it dies, checks see that, and it comes back."""
        self.now += after
        if streams:
            self.moves.move(node)
        else:
            assert node is not None
            self.moves.resend(node)
        self.breaks += 1
        if dies and node is not None:
            self.now += 0.1
            node.up_since = self.now

    def gets_on(self) -> None:
        self.journal.num_notes += 1
        self.breaks = 0


@pytest.mark.parametrize("seed", range(50))
def test_a_call_whose_nodes_are_struck_moves_until_its_deadline(seed: int) -> None:
    """Three nodes; breaks by nodes that die, after any time; now and then a stream gets on."""
    rng, run, cluster, num_moves, since = Random(seed), Run(), [Struck() for _ in range(3)], 0, 0.0
    while True:
        streams = rng.random() < 0.5
        run.broken(rng.choice(cluster), rng.uniform(0, 20), dies=True, streams=streams)
        num_moves += streams
        since = since if run.breaks > 1 else run.now
        if run.moves.are_over:
            break
        run.now += run.moves.pause
        if rng.random() < 0.2:
            run.gets_on()
    assert num_moves > MAX_MOVES or run.now + run.moves.pause - since > DEADLINE - 1


def test_a_request_that_kills_its_nodes_at_once_is_sent_few_times() -> None:
    run, node = Run(), Struck()
    run.broken(node, dies=True)
    while not run.moves.are_over:
        run.now += run.moves.pause
        run.broken(node, dies=True)
    assert MAX_RESENDS + 1 < run.breaks <= MOST_SENDS
    assert run.now <= DEADLINE


@pytest.mark.parametrize("streams", [False, True])
def test_breaks_of_nodes_that_stay_well_end_a_call_soon(streams: bool) -> None:
    run, well = Run(), Struck()
    for number in range(1, MAX_RESENDS + 1):
        run.broken(well, dies=False, streams=streams)
        assert (run.moves.are_over, run.moves.may_resend) == (False, number < MAX_RESENDS)
    run.broken(Struck(), dies=True)  # does not count
    assert not run.moves.are_over
    run.broken(None if streams else well, dies=False, streams=streams)
    assert run.moves.are_over


def test_a_node_that_took_a_call_begins_its_wait_anew() -> None:
    run = Run()
    assert run.moves.may_wait()
    run.now += WAIT
    assert not run.moves.may_wait()
    run.broken(Struck(), dies=True)
    assert run.moves.may_wait()


@pytest.mark.anyio
async def test_an_answer_is_asked_of_nodes_that_die_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.001)
    last, sent = 3 * MAX_RESENDS, 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        sent += 1
        if sent == last:
            await exchange.reply(200, {"node": exchange.node.name})
            return
        exchange.node.health = 503
        exchange.writer.close()
        await eventually(lambda: not next(n for n in proxy.registry.nodes() if n.url == exchange.node.url).healthy)
        exchange.node.health = 200

    checks = {"health_interval": 0.01, "unhealthy_after": 1, "node_wait": 30.0, "policy": "round_robin"}
    async with (
        nodes(FakeNode("a", script=script), FakeNode("b", script=script)) as fakes,
        proxy_for(*fakes, **checks) as (proxy, url),
        client(url) as http,
    ):
        answer = await asyncio.wait_for(http.post(CHAT, content=BODY), 30)
    assert (answer.status_code, sent) == (200, last)
