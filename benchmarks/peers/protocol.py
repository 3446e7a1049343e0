"""One engine in a process of its own: a JSON line in, a JSON line out. Standard library only, for any peer's Python.

    {"do": "prefill", "batch": 4, "prompt_len": 64}    ->  {"seconds": 0.9}
    {"do": "decode", "steps": 16, "limit": 5.0}        ->  {"seconds": 1.1, "tokens": 64}
    {"do": "answer", "prompt": [5, 6], "count": 160}   ->  {"seconds": 1.9, "tokens": 159, "ids": [7, 8, ...]}

When its model is loaded, a process writes its Facts as the first line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

PR_SET_PDEATHSIG = 1
MIN_STEPS = 2
KV_GIB = 2  # memory for the KV cache of an engine that is told how much


@dataclass(frozen=True)
class Facts:
    """An engine's description of itself. `kv_bytes` are read for each number in the KV cache."""

    version: str
    settings: str
    weight_bytes: int  # of the layers and the head
    kv_bytes: float = 2.0
    head_bytes: int = 0  # of the head alone

    def bytes_read(self, share: float) -> float:
        """Bytes of weights that a step reads: `share` of the layers' matrices, and the head."""
        return self.head_bytes + share * (self.weight_bytes - self.head_bytes)


@dataclass(frozen=True)
class Options:
    """The settings of an engine."""

    model: Path
    threads: int
    max_batch: int
    max_context: int  # tokens of one sequence, prompt and answer
    vocab: int
    drafts: int = 0  # tokens that prompt lookup drafts at most; 0: there is none


class Engine(Protocol):
    facts: Facts

    def prefill(self, prompts: list[list[int]]) -> None:
        """Drop all running sequences. Run the prompts until each has its first new token."""

    def step(self) -> int:
        """Make one more token for every sequence. Returns how many were made."""


@runtime_checkable
class Answering(Protocol):
    """An engine that may draft with prompt lookup."""

    def answer(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        """Greedily decode `count` tokens behind a prompt. Yields those of each step."""


Make = Callable[[Options], Engine]
Prepare = Callable[[Path, Path], None]


def prompts(batch: int, length: int, vocab: int, number: int = 0) -> list[list[int]]:
    """Random ids without special tokens (0 and 1). Each `number` gives other ids, so that no cache has seen them."""
    made = random.Random(number)
    return [made.choices(range(2, vocab), k=length) for _ in range(batch)]


def main(make: Make, prepare: Prepare) -> None:
    """`prepare SOURCE OUT` writes the checkpoint in the engine's own form. `run MODEL ...` serves commands on stdin."""
    _die_with_parent()
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    preparation = commands.add_parser("prepare")
    preparation.add_argument("source", type=Path)
    preparation.add_argument("out", type=Path)
    run = commands.add_parser("run")
    run.add_argument("model", type=Path)
    for name in ("threads", "max-batch", "max-context", "vocab"):
        run.add_argument(f"--{name}", type=int, required=True)
    run.add_argument("--drafts", type=int, default=0)
    arguments = vars(parser.parse_args())
    if arguments.pop("command") == "prepare":
        prepare(arguments["source"], arguments["out"])
    else:
        _serve(make, Options(**arguments))


def _serve(make: Make, options: Options) -> None:
    # Libraries print to descriptor 1, so answers get a descriptor of their own.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = make(options)
        print(json.dumps(asdict(engine.facts)), file=answers)
        for number, line in enumerate(sys.stdin):
            print(json.dumps(answer(engine, json.loads(line), options.vocab, number)), file=answers)


def answer(engine: Engine, command: dict, vocab: int, number: int) -> dict[str, Any]:
    """Do the engine's command `number`."""
    if command["do"] == "answer":
        assert isinstance(engine, Answering)
        return follow(engine, command["prompt"], command["count"])
    if command["do"] == "prefill":
        texts = prompts(command["batch"], command["prompt_len"], vocab, number)
        start = time.perf_counter()
        engine.prefill(texts)
        return {"seconds": time.perf_counter() - start}
    return decode(engine, command["steps"], command["limit"])


def decode(engine: Engine, steps: int, limit: float) -> dict[str, float]:
    """Time `steps` steps, or fewer if they take longer than `limit` seconds. One step before them warms up."""
    engine.step()
    tokens, start = 0, time.perf_counter()
    for index in range(steps):
        if index >= MIN_STEPS and time.perf_counter() - start > limit:
            break
        tokens += engine.step()
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def follow(engine: Answering, prompt: list[int], count: int) -> dict[str, Any]:
    """Time an answer from its first tokens on. `tokens` are those after them."""
    steps = engine.answer(prompt, count)
    ids = list(next(steps))
    first, start = len(ids), time.perf_counter()
    for new in steps:
        ids += new
    return {"seconds": time.perf_counter() - start, "tokens": len(ids) - first, "ids": ids}


def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 products. Without them, vLLM's bfloat16 products fall back to a path twenty
    times slower than float32."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(Path("/proc/cpuinfo").read_text().split()))


def _die_with_parent() -> None:
    """Let Linux end this process with its parent: a stopped process cannot notice that its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
