"""The same agents on lmkit's server and on llama.cpp's: what is cached of each next prompt, TTFT, processor seconds.

    python -m benchmarks.agent_peers FILE.gguf --peer PYTHON [--turns 40] [--agents 2] [--threads 1] [--json FILE]

PYTHON has `xllamacpp` installed, whose `Server` is llama.cpp's. Agents are made up, as by `lmkit bench agent
--synthetic`: each is on one server, then on the other, which goes first changes, and neither has anything else to do.

known: of the tokens of the last prompt and its answer, how many were cached, mean and least over the turns after the
first. ttft_ms: median over the second half of the turns. cpu_ms: user and system time of the server's processes for a
turn, with the time in which a tool runs, in which lmkit prepares the next prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import report
from benchmarks.ports import free_port
from lmkit.bench.agent import AgentRequest, measure_agents, synthetic
from lmkit.bench.agent_config import AgentConfig

LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel = int(sys.argv[3]), 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
time.sleep(1 << 20)
"""
READY_SECONDS = 600.0


@contextmanager
def server(name: str, given: argparse.Namespace, port: int) -> Iterator[psutil.Process]:
    """A server that answers."""
    sizes = (str(given.model), f"{port}", f"{given.context}", f"{given.threads}")
    ours = [sys.executable, "-m", "lmkit", "serve", sizes[0], "--port", sizes[1], "--max-model-len", sizes[2],
            "--num-threads", sizes[3], "--max-batch-size", "4"]  # fmt: skip
    command = ours if name == "lmkit" else [str(given.peer), "-c", LLAMA_CPP, *sizes]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + READY_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name} does not answer: {' '.join(command)}")
                time.sleep(0.5)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).is_success
    except httpx.HTTPError:
        return False


def computed(process: psutil.Process) -> float:
    """Seconds of the processor that a server has had, in steps of 0.01."""
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def known_shares(requests: list[AgentRequest]) -> Iterator[float]:
    """Of each turn after the first, the cached share of the last prompt with its answer."""
    for before, turn in itertools.pairwise(requests):
        known = before.prompt_tokens + before.output_tokens
        yield min(1.0, (turn.cached_tokens or 0) / known)


def main() -> None:
    parser = argparse.ArgumentParser(description="Agents on lmkit's server and on llama.cpp's.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="a Python with xllamacpp; without one, lmkit alone")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that a tool takes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    names = ["lmkit", *(["llama.cpp"] if given.peer else [])]
    turns: dict[str, list[list[AgentRequest]]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    with ExitStack() as stack:
        ports = {name: free_port() for name in names}
        servers = {name: stack.enter_context(server(name, given, port)) for name, port in ports.items()}
        for number in range(given.agents):
            for name in names if number % 2 else names[::-1]:
                config = AgentConfig(
                    url=f"http://127.0.0.1:{ports[name]}", tokenizer=str(given.model), num_agents=1, turns=given.turns,
                    input_len=32, output_len=24, wait=given.wait, seed=number,
                )  # fmt: skip
                before = computed(servers[name])
                _, run = asyncio.run(measure_agents(config, synthetic(config)))
                seconds[name] += computed(servers[name]) - before
                turns[name].append(run.requests)
    rows = [_row(name, turns[name], seconds[name]) for name in names]
    report.show(rows)
    if given.json:
        report.save(given.json, "agent_peers", rows, model=given.model.name, wait=given.wait)


def _row(name: str, agents: list[list[AgentRequest]], seconds: float) -> dict[str, Any]:
    requests = [request for agent in agents for request in agent]
    shares = [share for agent in agents for share in known_shares(agent)]
    ttfts = [turn.ttft_ms for agent in agents for turn in agent[len(agent) // 2 :] if turn.ttft_ms is not None]
    return {
        "server": name,
        "turns": len(requests),
        "failed": sum(request.error is not None for request in requests),
        "tokens": requests[-1].prompt_tokens,
        "known": statistics.fmean(shares),
        "least": min(shares),
        "ttft_ms": statistics.median(ttfts),
        "cpu_ms": 1e3 * seconds / len(requests),
    }


if __name__ == "__main__":
    main()
