"""The same agents on lmkit's server and on others': what is cached of each next prompt, TTFT, processor seconds.

    python -m benchmarks.agent_peers FILE.gguf [--peer llama.cpp=PYTHON] [--peer vllm=PYTHON --folder DIR] [--rewritten]
                                     [--turns 40] [--agents 2] [--threads 1] [--json FILE]

llama.cpp's PYTHON has `xllamacpp` installed, whose `Server` is llama.cpp's. vLLM reads DIR, the same model with dense
weights (`lmkit convert FILE.gguf -o DIR --format dense`). Agents are made up, as by `lmkit bench agent --synthetic`:
each is on one server, then on the next, which goes first changes, and none has anything else to do. `--rewritten` gives
all servers a template that leaves out the first 40 characters of each earlier answer, as those do that strip reasoning.

known: of the tokens of a prompt before its new message, which are known when the answer before it has ended, how many
were cached, mean and least over the turns after the first. ttft_ms: median over the second half of the turns. cpu_ms:
user and system time of the server's processes for a turn, with the time in which a tool runs, in which lmkit prepares
the next prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import report
from benchmarks.agent_turns import TEMPLATE
from benchmarks.peers.client import parse_pythons
from benchmarks.peers.protocol import multiplies_bfloat16
from benchmarks.ports import free_port
from lmkit.bench.agent import AgentRequest, measure_agents, synthetic
from lmkit.bench.agent_config import AgentConfig

LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel = int(sys.argv[3]), 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
if len(sys.argv) > 5:
    params.use_jinja, params.chat_template = True, open(sys.argv[5]).read()
server = xllamacpp.Server(params)
time.sleep(1 << 20)
"""
READY_SECONDS = 600.0
SYSTEM, NEW = 512, 32  # tokens of the prompt that agents share, and of a turn's message


def command(name: str, given: argparse.Namespace, port: int, template: str | None) -> list[str]:
    """Starts a server."""
    length, threads = f"{given.context}", f"{given.threads}"
    chat_template = ["--chat-template", template] if template else []
    if name == "lmkit":
        options = ["--max-model-len", length, "--num-threads", threads, "--max-batch-size", "4"]
        return [sys.executable, "-m", "lmkit", "serve", str(given.model), "--port", f"{port}", *options, *chat_template]
    python = given.pythons[name][0]
    if name == "llama.cpp":
        return [python, "-c", LLAMA_CPP, str(given.model), f"{port}", length, threads, *chat_template[1:]]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-prompt-tokens-details"]
    dtype = ["--dtype", "bfloat16" if multiplies_bfloat16() else "float32"]
    sizes = ["--port", f"{port}", "--max-model-len", length, "--max-num-seqs", "4"]
    return [python, *module, "--model", str(given.folder), *sizes, *dtype, *chat_template]


@contextmanager
def server(command: list[str], given: argparse.Namespace, port: int) -> Iterator[psutil.Process]:
    """A server that answers."""
    cores = ",".join(map(str, range(given.threads)))
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env) as process,
    ):
        try:
            end = time.monotonic() + READY_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not answer: {log.read()[-2000:]}")
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
    """Of each turn after the first, the cached share of what comes before its message."""
    around = requests[0].prompt_tokens - NEW - SYSTEM  # a template's tokens around a message
    for turn in requests[1:]:
        yield min(1.0, (turn.cached_tokens or 0) / (turn.prompt_tokens - NEW - around))


def main() -> None:
    parser = argparse.ArgumentParser(description="Agents on lmkit's server and on others'.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="llama.cpp or vllm")
    parser.add_argument("--folder", type=Path, help="the model as vLLM reads it")
    parser.add_argument("--rewritten", action="store_true", help="a template that shortens earlier answers")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that a tool takes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    given.pythons = parse_pythons(given.peer, ("llama.cpp", "vllm"))
    if "vllm" in given.pythons and not given.folder:
        parser.error("vllm reads no GGUF file; name the model's folder with --folder")
    names = ["lmkit", *given.pythons]
    turns: dict[str, list[list[AgentRequest]]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    with ExitStack() as stack:
        template = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "template.jinja"
        template.write_text(TEMPLATE)
        ports = {name: free_port() for name in names}
        commands = {
            name: command(name, given, ports[name], str(template) if given.rewritten else None) for name in names
        }
        servers = {name: stack.enter_context(server(commands[name], given, ports[name])) for name in names}
        for number in range(given.agents):
            for name in names if number % 2 else names[::-1]:
                config = AgentConfig(
                    url=f"http://127.0.0.1:{ports[name]}", tokenizer=str(given.model), num_agents=1, turns=given.turns,
                    system_len=SYSTEM, input_len=NEW, output_len=24, wait=given.wait, seed=number,
                )  # fmt: skip
                before = computed(servers[name])
                _, run = asyncio.run(measure_agents(config, synthetic(config)))
                seconds[name] += computed(servers[name]) - before
                turns[name].append(run.requests)
    rows = [_row(name, turns[name], seconds[name]) for name in names]
    report.show(rows)
    if given.json:
        settings = {"model": given.model.name, "wait": given.wait, "rewritten": given.rewritten}
        report.save(given.json, "agent_peers", rows, **settings)


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
