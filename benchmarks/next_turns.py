"""What requests lose to next turns that are computed ahead: the same chats with and without them, in turns.

    python -m benchmarks.next_turns [MODEL] [--load 0.5] [--seconds 60] [--json FILE]

The worst case: every chat ends after its first answer, its template writes each answer otherwise than the model did, so
that all of it is prepared, and nothing of it is used. Chats arrive at random (Poisson), at `load` times what the server
can do one after the other. A pair of windows has the same arrivals and the same prompts, once with and once without;
which comes first changes. One server, in this process, so other work on the machine slows both alike.

ratio: mean seconds of a chat with / without, the mean over pairs in logarithms, with the 95 % interval of a bootstrap.
cpu_ms: what the front end, which renders next turns, and the client compute more for a chat.
waited: the bound that the engine keeps, seconds that chats waited for steps ahead at most / seconds of all chats.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.http_path import prompts
from lmkit.config import EngineConfig, ServerConfig
from lmkit.formats.hub import resolve_model_path
from lmkit.serve.app import create_app
from lmkit.serve.pool import ModelPool, PooledModel, load_tokenizer
from lmkit.turbo.transport.async_engine import AsyncEngine

CHATS, WORDS, TOKENS = 3, 48, 24  # of a window; words of a prompt, tokens of an answer
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}Said: {% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Send = Callable[[str], Any]


def interval(
    values: list[float], rng: random.Random, times: int = 2000, *, of: Callable[[list[float]], float] = statistics.fmean
) -> tuple[float, float, float]:
    """The mean, or what `of` makes of values, and the 95 % interval of a bootstrap."""
    found = sorted(of(rng.choices(values, k=len(values))) for _ in range(times))
    return of(values), found[times // 40], found[-times // 40]


async def window(send: Send, seed: int, rate: float) -> float:
    """Mean seconds of the chats."""
    rng = random.Random(seed)
    arrivals, at = [], 0.0
    for text in prompts(CHATS, rng, WORDS):
        at += rng.expovariate(rate)
        arrivals.append((at, text))

    async def chat(at: float, text: str) -> float:
        await asyncio.sleep(at)
        start = time.perf_counter()
        await send(text)
        return time.perf_counter() - start

    return statistics.fmean(await asyncio.gather(*(chat(*arrival) for arrival in arrivals)))


@asynccontextmanager
async def served(model: str, **options: Any) -> AsyncGenerator[tuple[httpx.AsyncClient, ModelPool]]:
    """A server of one model in this process, without a socket; its engine has a process. `options`: the engine's."""
    engine = AsyncEngine(resolve_model_path(model), EngineConfig(**options))
    pool = ModelPool([PooledModel("m", engine)])
    await engine.start()
    try:
        app = create_app(pool, [load_tokenizer(engine)], ServerConfig())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            yield client, pool
    finally:
        await engine.shutdown()


async def measure(model: str, load: float, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        options: dict[str, Any] = {"chat_template": str(template), "max_model_len": 1024, "max_batch_size": 16}
        async with served(model, **options) as (client, pool):
            return await _pairs(client, pool, load, seconds)


async def _pairs(client: httpx.AsyncClient, pool: ModelPool, load: float, seconds: float) -> dict[str, Any]:
    turns, engine = pool.models[0].serving.next_turns, pool.models[0].engine
    salt, total = iter(range(1 << 30)), 0.0

    async def send(text: str) -> None:
        nonlocal total
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "ignore_eos": True}
        start = time.perf_counter()
        answer = await client.post("/v1/chat/completions", json=body | {"cache_salt": f"{next(salt)}"})
        total += time.perf_counter() - start
        assert answer.status_code == 200, answer.text

    with_turns = turns.add

    def without(*_: Any, **__: Any) -> None:
        """Prepare nothing."""

    times = []
    for text in prompts(8, random.Random(-1), WORDS):
        start = time.perf_counter()
        await send(text)
        times.append(time.perf_counter() - start)
    rate = load / statistics.median(times)
    ratios: list[float] = []
    cpu = {True: 0.0, False: 0.0}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < 4:
        found = {}
        for is_on in (True, False) if len(ratios) % 2 else (False, True):
            turns.add = with_turns if is_on else without  # type: ignore[method-assign]
            start = time.process_time()
            found[is_on] = await window(send, len(ratios), rate)
            cpu[is_on] += time.process_time() - start
        ratios.append(math.log(found[True] / found[False]))
    mean, low, high = interval(ratios, random.Random(0))
    stats = engine.stats()
    return {
        "load": load,
        "pairs": len(ratios),
        "ratio": math.exp(mean),
        "low": math.exp(low),
        "high": math.exp(high),
        "cpu_ms": 1e3 * (cpu[True] - cpu[False]) / len(ratios) / CHATS,
        "waited": stats.ahead_waited / total,
        "prepared": stats.next_turns["prepared"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What requests lose to next turns that are computed ahead.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--load", type=float, nargs="+", default=[0.5])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [asyncio.run(measure(given.model, load, given.seconds)) for load in given.load]
    report.show(rows)
    if given.json:
        report.save(given.json, "next_turns", rows, model=given.model)


if __name__ == "__main__":
    main()
