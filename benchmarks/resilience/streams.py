"""Many clients of one server: streams that are read or left, wrong requests, and kills of the engine among them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, serving
from benchmarks.resilience.soak import LENGTHS, PROMPTS, REQUEST_SECONDS, body, new_client, undisturbed

SECONDS, NUM_KILLS = 180.0, 2
WRONG = (
    {"model": "no"}, {"prompt": 1}, {"temperature": -1}, {"max_tokens": 10**9}, {"n": 0},
    {"response_format": {"type": "x"}},
)  # fmt: skip


@dataclass
class Outcome:
    num_answers: int = 0
    num_wrong: int = 0  # answers that differ from those of an undisturbed engine
    num_told: int = 0  # requests that an engine's end cut, with an error in JSON or in an event
    num_left: int = 0  # streams whose client left
    num_refused: int = 0  # wrong requests, with a status between 400 and 499
    lost: list[str] = field(default_factory=list)  # requests with no answer and no error, and why
    num_stuck: float = 0.0  # requests that the engine still has after all have ended
    leaked: float = 0.0  # share of the KV blocks that is in use then, beside the prefix cache
    grown_mib: float = 0.0  # the front end, from the middle of the run to its end


async def client(url: str, answers: dict[tuple[str, int], str], outcome: Outcome, seed: int, end: float) -> None:
    rng = random.Random(seed)
    url += "/v1/completions"
    async with new_client() as http:
        while time.monotonic() < end:
            prompt, length, kind = rng.choice(PROMPTS), rng.choice(LENGTHS), rng.random()
            payload = body(prompt, length, stream=True)
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    if kind < 0.15:
                        await _wrong(http, url, payload | rng.choice(WRONG), outcome)
                    elif kind < 0.3:
                        await _leave(http, url, payload, rng.randrange(length), outcome)
                    else:
                        await _read(http, url, payload, answers[prompt, length], outcome)
            except (httpx.HTTPError, TimeoutError) as error:
                outcome.lost.append(f"{type(error).__name__} {error}")


async def _wrong(http: httpx.AsyncClient, url: str, payload: dict[str, object], outcome: Outcome) -> None:
    response = await http.post(url, json=payload)
    if 400 <= response.status_code <= 499:
        outcome.num_refused += 1
    elif response.status_code == 503:
        outcome.num_told += 1
    else:
        outcome.lost.append(f"{response.status_code} to {payload}: {response.text[:100]}")


async def _leave(http: httpx.AsyncClient, url: str, payload: dict[str, object], pieces: int, outcome: Outcome) -> None:
    async with http.stream("POST", url, json=payload) as response:
        async for _ in response.aiter_raw():
            pieces -= 1
            if pieces < 0:
                break
    outcome.num_left += 1


async def _read(http: httpx.AsyncClient, url: str, payload: dict[str, object], answer: str, outcome: Outcome) -> None:
    response = await http.post(url, json=payload)
    status, content = response.status_code, response.text
    if status == 200 and content.endswith("data: [DONE]\n\n"):
        events = [json.loads(line[6:]) for line in content.split("\n\n") if line.startswith("data: {")]
        outcome.num_answers += 1
        outcome.num_wrong += "".join(event["choices"][0]["text"] for event in events) != answer
    elif '"error"' in content and status in (200, 429, 500, 503):
        outcome.num_told += 1
    else:
        outcome.lost.append(f"{status} {content[-200:]}")


async def load(server: Command, outcome: Outcome, *, quick: bool) -> None:
    number, seconds = (24, 9.0) if quick else (256, SECONDS)
    answers = await asyncio.to_thread(undisturbed, server.url)
    end = time.monotonic() + seconds
    clients = [asyncio.create_task(client(server.url, answers, outcome, seed, end)) for seed in range(number)]
    for kill in range(NUM_KILLS):
        await asyncio.sleep(seconds / (NUM_KILLS + 1))
        server.engine().kill()
        if kill == 0:
            memory = server.resident_mib
    await asyncio.gather(*clients)
    outcome.grown_mib = server.resident_mib - memory


@shared
def run(setting: Setting) -> Outcome:
    """One run, for all cases. Takes three minutes and a start, or some seconds if quick."""
    outcome = Outcome()
    with serving() as server:
        asyncio.run(load(server, outcome, quick=setting.quick))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            outcome.num_stuck = sum(_gauge(server, f"num_requests_{state}") for state in ("running", "waiting"))
            if not outcome.num_stuck:
                break
            time.sleep(0.2)
        outcome.leaked = _gauge(server, "kv_cache_usage_perc")
        assert outcome.num_answers, "nothing was answered"
        assert outcome.num_told, "no kill met a request"
    return outcome


def _gauge(server: Command, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^lmkit:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def _figure(name: str, unit: str, limit: float, figure: Callable[[Outcome], float]) -> Case:
    return Case(f"streams: {name}", unit, limit, lambda setting: figure(run(setting)))


CASES = (
    _figure("requests without answer and error", "", 0, lambda outcome: len(outcome.lost)),
    _figure("answers that differ", "", 0, lambda outcome: outcome.num_wrong),
    _figure("requests that stay in the engine", "", 0, lambda outcome: outcome.num_stuck),
    _figure("share of KV blocks that stay in use", "", 0, lambda outcome: outcome.leaked),
    _figure("growth of the front end", "MiB", 32, lambda outcome: outcome.grown_mib),
)
