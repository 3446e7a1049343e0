"""Many clients through the proxy for minutes, while engines and whole nodes are killed in turn.

Two nodes serve the demo model. Every client sends one request after the other, half of them streamed, and compares each
greedy answer with the answer that an undisturbed node gave. A request may be repeated by the proxy alone: the clients
do not retry.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from benchmarks.ports import free_port
from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, HealthProbe, routing

SECONDS, KILL_EVERY = 600.0, 20.0
REQUEST_SECONDS = 120.0
PROMPTS = [f"def {name}(items):\n    " for name in ("total", "largest", "is_empty", "reverse", "mean", "count_words")]
LENGTHS = (8, 32, 96)


@dataclass
class Outcome:
    """What happened in one run. Memory and open files are those of the proxy."""

    num_answers: int = 0
    num_wrong: int = 0  # answers that differ from those of an undisturbed node
    num_broken_streams: int = 0  # they had begun, and ended with an error event
    lost: list[str] = field(default_factory=list)  # requests without an answer, and why
    num_kills: int = 0
    worst_health: float = 0.0  # seconds
    grown_mib: float = 0.0
    grown_files: int = 0


class Node:
    """A server on a fixed port that can be killed and started again."""

    def __init__(self) -> None:
        self._port = str(free_port())
        self.start()

    def start(self) -> None:
        self.command = Command("serve", "demo", "--port", self._port)

    def kill_engine(self) -> None:
        self.command.engine().kill()

    def kill(self) -> None:
        os.killpg(self.command.process.pid, signal.SIGKILL)
        self.command.process.wait()


def body(prompt: str, length: int, *, stream: bool) -> dict[str, object]:
    return {
        "model": "demo", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": stream
    }  # fmt: skip


def undisturbed(url: str) -> dict[tuple[str, int], str]:
    """The answer to each prompt at each length."""
    answers = {}
    for prompt, length in itertools.product(PROMPTS, LENGTHS):
        answer = httpx.post(f"{url}/v1/completions", json=body(prompt, length, stream=False), timeout=REQUEST_SECONDS)
        answers[prompt, length] = answer.raise_for_status().json()["choices"][0]["text"]
    return answers


def new_client() -> httpx.AsyncClient:
    """A client of servers on this machine, made in no time: it loads no authorities."""
    return httpx.AsyncClient(timeout=REQUEST_SECONDS, trust_env=False, verify=False)


async def ask(http: httpx.AsyncClient, url: str, payload: dict[str, object]) -> str | None:
    """The answer's text. None if it is a stream that had begun and ended with an error event.

    Raises ValueError for another status than 200, and for a stream that just ends.
    """
    async with http.stream("POST", url, json=payload) as response:
        if response.status_code != 200 or not payload["stream"]:
            await response.aread()
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text[:200]}")
        if not payload["stream"]:
            return str(response.json()["choices"][0]["text"])
        text = ""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return None
                text += event["choices"][0]["text"] if event["choices"] else ""
    raise ValueError("the stream ended without an error and without [DONE]")


async def client(url: str, answers: dict[tuple[str, int], str], outcome: Outcome, seed: int, end: float) -> None:
    rng = random.Random(seed)
    async with new_client() as http:
        while time.monotonic() < end:
            prompt, length = rng.choice(PROMPTS), rng.choice(LENGTHS)
            payload = body(prompt, length, stream=rng.random() < 0.5)
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    text = await ask(http, f"{url}/v1/completions", payload)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                outcome.lost.append(f"{type(error).__name__} {error}")
                continue
            outcome.num_answers += text is not None
            outcome.num_broken_streams += text is None
            outcome.num_wrong += text is not None and text != answers[prompt, length]


async def kill_in_turn(proxy: str, nodes: list[Node], outcome: Outcome, every: float, end: float) -> None:
    """Kill an engine, then the other node, then that node's engine, and so on. A killed node starts again at once.

    While a node is down the other one lives: slow machines take their time to start it.
    """
    for turn in itertools.count():
        await asyncio.sleep(every)
        while not await asyncio.to_thread(all_healthy, proxy, nodes):
            await asyncio.sleep(0.2)
        if time.monotonic() > end - every / 2:
            return
        node = nodes[turn % 2]
        if turn % 4 in (0, 3):
            node.kill_engine()
        else:
            node.kill()
            await asyncio.to_thread(node.start)
        outcome.num_kills += 1


def all_healthy(proxy: str, nodes: list[Node]) -> bool:
    """Whether the nodes say so themselves, and the proxy has seen it."""
    themselves = all(httpx.get(f"{node.command.url}/health", timeout=5).status_code == 200 for node in nodes)
    return themselves and httpx.get(f"{proxy}/health", timeout=5).json()["healthy_nodes"] == len(nodes)


async def load(proxy: Command, nodes: list[Node], outcome: Outcome, *, quick: bool) -> None:
    number, seconds, every = (32, 9.0, 3.0) if quick else (256, SECONDS, KILL_EVERY)
    answers = await asyncio.to_thread(undisturbed, proxy.url)
    end = time.monotonic() + seconds
    clients = [asyncio.create_task(client(proxy.url, answers, outcome, seed, end)) for seed in range(number)]
    kills = asyncio.create_task(kill_in_turn(proxy.url, nodes, outcome, every, end))
    await asyncio.sleep(every / 2)  # by now every client has its connection
    memory = proxy.resident_mib
    await asyncio.gather(*clients)
    await kills
    outcome.grown_mib = proxy.resident_mib - memory


@shared
def run(setting: Setting) -> Outcome:
    """One run, for all cases. Takes ten minutes, or about half of one if quick."""
    outcome = Outcome()
    nodes = [Node(), Node()]
    try:
        with routing(*(node.command.url for node in nodes)) as proxy:
            time.sleep(1)
            files = proxy.num_open_files
            with HealthProbe(proxy.url) as health:
                asyncio.run(load(proxy, nodes, outcome, quick=setting.quick))
            time.sleep(5)
            undisturbed(proxy.url)  # a use of the pool closes the connections to nodes that were idle for too long
            outcome.worst_health = health.worst
            outcome.grown_files = proxy.num_open_files - files
    finally:
        for node in nodes:
            node.command.stop()
    return outcome


def _figure(name: str, unit: str, limit: float, figure: Callable[[Outcome], float]) -> Case:
    return Case(f"soak: {name}", unit, limit, lambda setting: figure(run(setting)))


CASES = (
    _figure("requests lost", "", 0, lambda outcome: len(outcome.lost)),
    _figure("answers that differ", "", 0, lambda outcome: outcome.num_wrong),
    _figure("worst /health of the proxy", "s", 0.5, lambda outcome: outcome.worst_health),
    _figure("growth of the proxy's memory", "MiB", 32, lambda outcome: outcome.grown_mib),
    _figure("growth of the proxy's open files", "", 8, lambda outcome: outcome.grown_files),
)
