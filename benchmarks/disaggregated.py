"""Prompts on a node of their own: the time between tokens of running streams under long prompts.

    python -m benchmarks.disaggregated [MODEL] [--streams 4] [--prompt-tokens 1024] [--seconds 15] [--rounds 3]

Two ways to use two cores are measured in turns, each through the same kind of proxy: one server with two threads, and
a prefill and a decode node with one thread each. Some streams decode all the time. Beside them long prompts come one
after the other, each new to every cache. MODEL is by default a Llama of 200M parameters with random 4-bit weights.

The last rows have no streams: what a pair costs a prompt beside the prefill node itself, which gets it directly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.random_llama import Shape, make_awq, make_checkpoint

LINE = re.compile(r"on (http\S+)")
SMALL = Shape(hidden=1024, mlp=4096, layers=12, heads=16, kv_heads=8, head_dim=64, vocab=4096)
NODE_KEY = secrets.token_hex(16)
PREFILL_KEY = secrets.token_hex(16)  # to reach the prefill node directly
PAUSE = 0.2  # seconds between two long prompts


class Servers:
    """Processes that end with the benchmark."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._running = folder, list[subprocess.Popen[bytes]]()

    def start(self, *words: str) -> str:
        """The address of `lmkit WORDS` once it listens."""
        log = self._folder / f"log-{len(self._running)}"
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, "-m", "lmkit", *words], stdout=out, stderr=out)
        self._running.append(process)
        while not (found := LINE.search(log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        return found[1]

    def end(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait()


@contextlib.contextmanager
def servers(model: str) -> Iterator[dict[str, str]]:
    """The addresses: `mixed` and `pair` are proxies, `prefill` is the prefill node itself."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kv.key").touch(0o600)
        (folder / "kv.key").write_text(secrets.token_hex(32))
        (folder / "proxy.yaml").write_text(f"port: 0\nhealth_interval: 0.3\napi_keys: [{NODE_KEY} role=node]\n")
        started = Servers(folder)
        try:
            yield _started(started, folder, model)
        finally:
            started.end()


def _started(started: Servers, folder: Path, model: str) -> dict[str, str]:
    mixed, pair = (started.start("proxy", "--config", str(folder / "proxy.yaml")) for _ in range(2))

    def node(proxy: str, threads: int, *words: str) -> str:
        own = ["--port", "0", "--served-model-name", "m", "--kv-memory", "512M", "--num-threads", str(threads)]
        return started.start("serve", model, *own, "--proxy", proxy, "--node-key", NODE_KEY, *words)

    key = ("--kv-key-file", str(folder / "kv.key"))
    give = ("--kv-listen", "127.0.0.1:0", "--kv-host-memory", "512M", "--api-key", PREFILL_KEY)
    node(mixed, 2)
    prefill = node(pair, 1, "--role", "prefill", *key, *give)
    node(pair, 1, "--role", "decode", *key)
    for proxy, count in ((mixed, 1), (pair, 2)):
        while httpx.get(proxy + "/health").json()["healthy_nodes"] < count:
            time.sleep(0.1)
    return {"mixed": mixed, "pair": pair, "prefill": prefill}


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(300, 1900) for _ in range(num_tokens)]


async def tokens(http: httpx.AsyncClient, url: str, ids: list[int], count: int) -> AsyncGenerator[float]:
    """The times at which the tokens of an answer came."""
    body = {"model": "m", "prompt": ids, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"authorization": f"Bearer {PREFILL_KEY}"}
    async with http.stream("POST", url + "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


async def first(http: httpx.AsyncClient, url: str, ids: list[int]) -> float:
    """Seconds to the first token."""
    start = time.perf_counter()
    return min([at async for at in tokens(http, url, ids, 1)]) - start


async def under_prompts(url: str, options: argparse.Namespace, rng: random.Random) -> tuple[list[float], list[float]]:
    """Gaps between the tokens of the streams, and the seconds to the first token of the long prompts."""
    gaps, firsts = list[float](), list[float]()
    async with httpx.AsyncClient(timeout=120) as http:
        end = time.perf_counter() + options.seconds

        async def stream() -> None:
            while (last := time.perf_counter()) < end:
                last = 0.0
                async for at in tokens(http, url, prompt(rng, 16), 400):
                    if last:
                        gaps.append(at - last)
                    last = at
                    if at > end:
                        return

        async def prompts() -> None:
            await asyncio.sleep(1)
            while time.perf_counter() < end:
                firsts.append(await first(http, url, prompt(rng, options.prompt_tokens)))
                await asyncio.sleep(PAUSE)

        await asyncio.gather(prompts(), *(stream() for _ in range(options.streams)))
    return gaps, firsts


async def alone(url: str, options: argparse.Namespace, rng: random.Random) -> list[float]:
    async with httpx.AsyncClient(timeout=120) as http:
        return [await first(http, url, prompt(rng, options.prompt_tokens)) for _ in range(4)]


async def measure(at: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(options.seed)
    gaps, firsts, beside = ({name: list[list[float]]() for name in at} for _ in range(3))
    for name in at:
        await alone(at[name], options, rng)  # what is compiled or read on first use
    for _ in range(options.rounds):
        for name in ("mixed", "pair"):
            found = await under_prompts(at[name], options, rng)
            gaps[name].append(found[0])
            firsts[name].append(found[1])
        for name in at:
            beside[name].append(await alone(at[name], options, rng))
    rows = [row(f"{name}, {options.streams} streams", gaps[name], firsts[name]) for name in ("mixed", "pair")]
    return rows + [row(f"{name}, no streams", [], beside[name]) for name in at]


def row(name: str, gaps: list[list[float]], firsts: list[list[float]]) -> dict[str, Any]:
    """Medians over the rounds, in milliseconds."""

    def of(rounds: list[list[float]], rank: float) -> str:
        found = [1e3 * sorted(one)[int(rank * (len(one) - 1))] for one in rounds if one]
        return f"{statistics.median(found):.1f}" if found else "-"

    return {
        "": name,
        "token p50 ms": of(gaps, 0.5),
        "token p99 ms": of(gaps, 0.99),
        "tokens": sum(map(len, gaps)) or "-",
        "first p50 ms": of(firsts, 0.5),
        "prompts": sum(map(len, firsts)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make_checkpoint(Path(folder) / "dense", SMALL)
            make_awq(Path(folder) / "dense", Path(folder) / "awq")
        with servers(options.model or str(Path(folder) / "awq")) as at:
            rows = asyncio.run(measure(at, options))
    report.show(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": report.machine(), "rows": rows}))


if __name__ == "__main__":
    main()
