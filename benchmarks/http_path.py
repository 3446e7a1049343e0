"""The cost of the way through HTTP: the same requests to `lmkit serve` and to AsyncPipeline, in turns.

    python -m benchmarks.http_path [MODEL] [--json FILE]

Both run the engine in a process of its own and turn its tokens into text. The server also parses a request, writes each
token as an event, and sends it. The client reads bytes and looks for the end, so it costs little. Prompts are fresh:
none is in a prefix cache. Of each round the rates of all choices together count, and the times to the first token of
single requests. A cost is the median over the rounds of the ratio between two neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import report
from lmkit import AsyncPipeline, GenerationConfig

LINE = re.compile(r"on (http\S+)")
NUM_WORDS, NUM_TOKENS = 48, 96  # of a prompt, and of an answer
OPTIONS: dict[str, Any] = {"max_batch_size": 64, "max_model_len": 1024}


class Times(NamedTuple):
    """Seconds to the first token, and to the last."""

    first: float
    last: float


Ask = Callable[[str], Awaitable[Times]]


def prompts(count: int, rng: random.Random, words: int = NUM_WORDS) -> list[str]:
    return [" ".join(rng.choice("abcdefghij") * rng.randint(1, 4) for _ in range(words)) for _ in range(count)]


def of_pipeline(pipe: AsyncPipeline) -> Ask:
    config = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)

    async def ask(prompt: str) -> Times:
        start, first = time.perf_counter(), 0.0
        async for part in pipe.stream_infer(prompt, config, do_preprocess=False):
            if part.text:  # the server sends no event without
                first = first or time.perf_counter() - start
        return Times(first, time.perf_counter() - start)

    return ask


def of_server(url: str, model: str) -> Ask:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    fields = {"model": model, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}

    async def ask(prompt: str) -> Times:
        start, first, tail = time.perf_counter(), 0.0, b""
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps(fields | {"prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while b"[DONE]" not in tail:
            piece = await reader.read(1 << 16)
            assert piece, tail
            tail = tail[-16:] + piece
            if not first and b"data: " in tail:
                first = time.perf_counter() - start
        seconds = time.perf_counter() - start
        writer.close()
        return Times(first, seconds)

    return ask


async def round_of(ask: Ask, count: int, rng: random.Random, words: int = NUM_WORDS) -> tuple[float, float]:
    """(tokens per second of `count` requests at once, median seconds to the first token)."""
    start = time.perf_counter()
    times = await asyncio.gather(*map(ask, prompts(count, rng, words)))
    rate = count * NUM_TOKENS / (time.perf_counter() - start)
    return rate, statistics.median(taken.first for taken in times)


async def compare(pipe: AsyncPipeline, url: str, model: str, count: int, rounds: int) -> dict[str, Any]:
    """One row: `count` requests at once."""
    asks, rng = (of_pipeline(pipe), of_server(url, model)), random.Random(count)
    samples = []
    for turn in range(rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {which: await round_of(asks[which], count, rng) for which in order}
        if turn:  # the first warms up
            samples.append((*found[0], *found[1]))
    rate, first, served_rate, served_first = (statistics.median(column) for column in zip(*samples, strict=True))
    return {
        "requests": count,
        "pipeline_tokens_per_s": rate,
        "server_tokens_per_s": served_rate,
        "cost": statistics.median(1 - sample[2] / sample[0] for sample in samples),
        "pipeline_ttft_ms": 1000 * first,
        "server_ttft_ms": 1000 * served_first,
        "ttft_cost_ms": 1000 * statistics.median(sample[3] - sample[1] for sample in samples),
    }


@contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """A server of model m, in processes of its own: its address, and the process that has the others."""
    command = [sys.executable, "-m", "lmkit", "serve", model, "--port", "0", "--served-model-name", "m", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        url = next(found[1] for line in server.stdout if (found := LINE.search(line)))
        drain = threading.Thread(target=server.stdout.read)
        drain.start()
        try:
            yield url, server.pid
        finally:
            server.terminate()
            drain.join()


async def measure(model: str, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    flags = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with serving(model, *flags) as (url, _):
        async with AsyncPipeline(model, **OPTIONS) as pipe:
            return [await compare(pipe, url, "m", count, rounds) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the way through HTTP.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="requests at once")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = asyncio.run(measure(given.model, given.requests, given.rounds))
    report.show(rows)
    if given.json:
        report.save(given.json, "http_path", rows, model=given.model)


if __name__ == "__main__":
    main()
