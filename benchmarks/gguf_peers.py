"""lmkit against llama.cpp on one GGUF file as it is: tokens per second, in turns.

    python -m benchmarks.gguf_peers FILE.gguf [--peer NAME=PYTHON ...] [--rounds N] [--threads N]

Each engine loads once, in a process of its own, in the Python that has it installed, and is stopped while another one
computes. The table has medians, and those of the ratios within a round: what else runs on the machine slows both. With
one thread seconds are those of the processor, which no other work lengthens much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers.client import PeerProcess, parse_pythons
from benchmarks.peers.protocol import Options
from lmkit.formats.gguf import GgufReader

POINTS = {"1": (1, 64, 64), "4": (4, 64, 48), "16": (16, 64, 32), "prompt of 512": (1, 512, 0)}  # batch, prompt, steps
OURS, PEERS = "lmkit", {"llama.cpp": "llama_cpp", "ik_llama.cpp": "ik_llama_cpp"}  # module of each
DECODE_SECONDS = 12.0
MIB = 1 << 20


def measure(engine: PeerProcess, batch: int, length: int, steps: int, *, own_time: bool) -> float:
    """Tokens per second, of a clock or of the processor."""

    def ask(**command: Any) -> tuple[dict[str, Any], float]:
        before = computed(engine)
        answer = engine.ask(**command)
        return answer, computed(engine) - before if own_time else float(answer["seconds"])

    _, seconds = ask(do="prefill", batch=batch, prompt_len=length)
    if not steps:
        return batch * length / seconds
    decoded, seconds = ask(do="decode", steps=steps, limit=DECODE_SECONDS)
    return float(decoded["tokens"]) / seconds


def processes(engine: PeerProcess) -> list[psutil.Process]:
    root = engine.usage()
    return [root, *root.children(recursive=True)]


def computed(engine: PeerProcess) -> float:
    """Seconds of the processor that an engine has had, in steps of 0.01."""
    return sum(sum(process.cpu_times()[:2]) for process in processes(engine))


def held(engine: PeerProcess) -> str:
    """Memory of the process and its children, MiB: proportional, and what no file backs."""
    all_of_it = [process.memory_full_info() for process in processes(engine)]
    return f"{sum(info.pss for info in all_of_it) / MIB:.0f}, {sum(info.uss for info in all_of_it) / MIB:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    arguments = parser.parse_args()
    reader = GgufReader(arguments.model)
    vocab = reader.file.tensors["token_embd.weight"].shape[0]
    options = Options(arguments.model.resolve(), arguments.threads, 16, 1024, vocab)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = {OURS: PeerProcess(sys.executable, "benchmarks.peers.lmkit_gguf", options, logs / OURS)}
        for name, (python, *_) in parse_pythons(arguments.peer, PEERS).items():
            engines[name] = PeerProcess(python, f"benchmarks.peers.{PEERS[name]}", options, logs / name)
        for engine in engines.values():
            stack.callback(engine.close)
            engine.ready()
        rates = {point: {name: list[float]() for name in engines} for point in POINTS}
        for turn in range(1 + arguments.rounds):
            for point, (batch, length, steps) in POINTS.items():
                for name, engine in engines.items():
                    rate = measure(engine, batch, length, steps, own_time=arguments.threads == 1)
                    if turn:  # the first one warms up
                        rates[point][name].append(rate)
        show(arguments.model, rates, {name: held(engine) for name, engine in engines.items()})


def show(model: Path, rates: dict[str, dict[str, list[float]]], memory: dict[str, str]) -> None:
    table = Table("engine", *rates, "PSS, USS MiB", title=model.name)
    for name, text in memory.items():
        table.add_row(name, *(f"{statistics.median(of[name]):.1f}" for of in rates.values()), text)
    for name in memory.keys() - {OURS}:
        ratios = ([a / b for a, b in zip(of[OURS], of[name], strict=True)] for of in rates.values())
        texts = (f"{statistics.median(each):.2f}x ({min(each):.2f} to {max(each):.2f})" for each in ratios)
        table.add_row(f"{OURS} / {name}", *texts, "")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
