"""What audits and receipts cost: processor time of a request with and without them, in turns.

    python -m benchmarks.audit_cost [MODEL] [--every 10] [--tokens 1 24] [--seconds 60] [--json FILE]

audits: an engine in this process gets hits of four prefixes of 200 tokens, one after the other. It has all the time
between two of them for audits, so every audit is computed whole: this is the most that they cost. receipts: a server in
processes of its own answers 8 clients at once, each with a fresh prompt. With `fetched`, each client fetches its
receipt, which is signed then.

cpu_ms: of a request without, the processor time of the engine, or of all processes of the server. more: how much more
it is with, the median over pairs of windows, with the 95 % interval of a bootstrap. direct: the same without a second
server or window, so other work moves it little: processor time of the steps of audits, for one of 1,000 hits, or
of making a receipt and signing it if fetched, of `cpu_ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks import report
from benchmarks.audits import engine_of, hits
from benchmarks.http_path import prompts, serving
from benchmarks.next_turns import interval
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.serve.auth import NOBODY
from lmkit.serve.receipts import Receipts
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web.receipt import HEADER

ANSWERS, CLIENTS, WORDS = 16, 8, 48  # of a window of receipts; words of a prompt
HITS = 40  # of a window of audits, at least
RECEIPTS, PROMPT = 2000, 150  # made one after the other; tokens of such a prompt


def compared(name: str, tokens: int, window: Callable[[bool], float], seconds: float) -> dict[str, Any]:
    """Pairs of windows (is it on) -> processor seconds of a request."""
    ratios, without = list[float](), list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < 4:
        found = {is_on: window(is_on) for is_on in ((True, False) if len(ratios) % 2 else (False, True))}
        without.append(found[False])
        ratios.append(100 * (found[True] / found[False] - 1))
    slower = interval(ratios[1:], random.Random(0), of=statistics.median)  # the first pair warms up
    more = {key: f"{value:+.2f} %" for key, value in zip(("more", "low", "high"), slower, strict=True)}
    return {"cost": name, "tokens": tokens, "pairs": len(ratios), "cpu_ms": 1e3 * statistics.median(without), **more}


def of_audits(model: str, every: int, tokens: int, seconds: float) -> dict[str, Any]:
    with closing(engine_of(model, every)) as engine:
        requests, turns, ahead = hits(tokens), engine.scheduler._next_turns, {True: 0.0, False: 0.0}
        note, number = turns.audits.note, max(every, HITS)

        def window(is_on: bool) -> float:
            turns.audits.note = note if is_on else lambda _: None  # type: ignore[method-assign, assignment]
            start = time.process_time()
            for _ in range(number):
                turns.allowance._left = 1.0  # nobody waits for an audit here
                engine.add(next(requests))
                has_ended = False
                while engine.has_work():
                    before = time.process_time()
                    outputs = engine.step()
                    ahead[is_on] += (time.process_time() - before) * has_ended
                    has_ended = has_ended or any(output.finish_reason for output in outputs)
            return (time.process_time() - start) / number

        row = compared(f"audits, 1 of {every}", tokens, window, seconds)
        done = engine.scheduler.stats().audits["done"]
        audit = (ahead[True] - ahead[False]) / done
        return row | {"direct": f"{100 * 1e3 * audit / EngineConfig().audit / row['cpu_ms']:.2f} %"}


def clock_of(pid: int) -> Callable[[], float]:
    """Processor seconds of a process, and of those that it has started."""
    own = psutil.Process(pid)
    pids = [process.pid for process in (own, *own.children(recursive=True))]
    return lambda: sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # Linux: clock_getcpuclockid


def alone(tokens: int, *, fetched: bool) -> float:
    """Processor seconds of a receipt, besides HTTP."""
    info = SimpleNamespace(computed={"isa": "x" * 600}, model_path=str(DEMO_FOLDER))
    server: Any = SimpleNamespace(
        info=info, model_name="m", adapter="", edition="", engine=SimpleNamespace(config=EngineConfig())
    )
    request = Request(request_id="r", prompt_ids=[*range(PROMPT)], params=SamplingParams(max_tokens=tokens, seed=1))
    output = RequestOutput(
        request_id="r", text="", token_ids=[5], num_prompt_tokens=PROMPT, num_output_tokens=1, kv=[(PROMPT, "computed")]
    )

    async def outputs() -> AsyncGenerator[tuple[int, RequestOutput]]:
        for _ in range(tokens):
            yield 0, output

    async def make(folder: str) -> float:
        receipts = Receipts(f"{folder}/key", for_all=False)
        start = time.process_time()
        for i in range(RECEIPTS):
            noted = receipts.begin({HEADER: "1"}, f"{i}", server, NOBODY)
            assert noted is not None
            async for _ in noted.noted([request], [], outputs()):
                pass
            if fetched:
                msgspec.json.encode(await receipts.get(f"{i}", NOBODY))
        return (time.process_time() - start) / RECEIPTS

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(make(folder))


def of_receipts(model: str, tokens: int, seconds: float, *, fetched: bool) -> dict[str, Any]:
    numbers = count()

    async def answers(url: str, is_on: bool) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600, headers={"x-lmkit-receipt": str(int(is_on))}) as client:

            async def ask(text: str) -> None:
                body = {"model": "m", "prompt": text, "max_tokens": tokens, "ignore_eos": True, "seed": 1}
                answer = (await client.post("/v1/completions", json=body)).raise_for_status()
                if is_on and fetched:
                    (await client.get(f"/receipts/{answer.headers['x-lmkit-receipt']}")).raise_for_status()

            texts = iter(prompts(ANSWERS, random.Random(next(numbers)), WORDS))

            async def several() -> None:
                for text in texts:
                    await ask(text)

            await asyncio.gather(*(several() for _ in range(CLIENTS)))

    with tempfile.TemporaryDirectory() as folder:
        flags = ("--receipt-key", f"{folder}/key", "--max-model-len", "1024", "--max-batch-size", "16")
        with serving(model, *flags) as (url, pid):
            clock = clock_of(pid)

            def window(is_on: bool) -> float:
                start = clock()
                asyncio.run(answers(url, is_on))
                return (clock() - start) / ANSWERS

            row = compared(f"receipts{', fetched' if fetched else ''}", tokens, window, seconds)
            return row | {"direct": f"{100 * 1e3 * alone(tokens, fetched=fetched) / row['cpu_ms']:.2f} %"}


def main() -> None:
    parser = argparse.ArgumentParser(description="What audits and receipts cost.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--every", type=int, nargs="*", default=[10], help="of so many hits one is audited")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 24], help="of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row, at least")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [of_audits(given.model, every, tokens, given.seconds) for every in given.every for tokens in given.tokens]
    rows += [
        of_receipts(given.model, tokens, given.seconds, fetched=fetched)
        for fetched in (False, True)
        for tokens in given.tokens
    ]
    report.show(rows)
    if given.json:
        report.save(given.json, "audit_cost", rows, model=given.model)


if __name__ == "__main__":
    main()
