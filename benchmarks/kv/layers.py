"""Blocks that move layer by layer, beside blocks that move after a step: what a pair of engines costs a prompt.

    python -m benchmarks.kv.layers [MODEL] [--prompt-tokens 1024] [--rounds 8]

One engine computes prompts, and another one gets their blocks and samples the first token. Each has a process and a
thread of its own. Both ways take turns, prompt by prompt, each new to every cache. "prompt" is the time of the prompt
in the first engine, "after" the time from its end to the first token of the second one, and "left" the bytes that came
in that time. Figures are medians. MODEL is by default a Llama of 200M parameters with random 4-bit weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import secrets
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import report
from benchmarks.disaggregated import SMALL, prompt
from benchmarks.random_llama import make_awq, make_checkpoint
from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers.wire import Link
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling.planner import Planner

WAYS = {True: "layer by layer", False: "behind each step"}
MEMORY = 256 << 20


def engine(model: str, num_tokens: int, **options: Any) -> Engine:
    return Engine(model, EngineConfig(num_threads=1, kv_memory=MEMORY, max_model_len=num_tokens + 64, **options))


def compute(model: str, num_tokens: int, key: str, pipe: Connection) -> None:
    """The first engine. It takes prompts from the pipe, and says that one has begun, and when it began and ended."""
    first = engine(model, num_tokens, kv_host_memory=MEMORY, kv_listen="127.0.0.1:0", kv_key_file=key)
    pipe.send(first.info.kv_port)
    params = SamplingParams(max_tokens=0, seed=0)
    gives = Planner._gives
    while (asked := pipe.recv()) is not None:
        ids, by_layer = asked
        with mock.patch.object(Planner, "_gives", gives if by_layer else lambda *_: []):
            start, has_begun, end = time.monotonic(), False, 0.0
            first.add(Request(request_id="p", prompt_ids=ids, params=params, gives_kv=True, progress=True))
            while first.has_work():
                outputs = first.step()
                if outputs and not has_begun:
                    has_begun = True
                    pipe.send("begun")
                if any(output.finish_reason for output in outputs):
                    end = time.monotonic()
        pipe.send((start, end))


class Arrivals:
    """When bytes of blocks arrive."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._receive = Link.receive_raw

    def note(self, link: Link, out: memoryview, seconds: float | None) -> None:
        size = out.nbytes
        self._receive(link, out, seconds)
        self.times.append((time.monotonic(), size))


def measure(model: str, options: argparse.Namespace, key: str) -> list[dict[str, Any]]:
    here, there = multiprocessing.Pipe()
    given = model, options.prompt_tokens, key, there
    process = multiprocessing.get_context("spawn").Process(target=compute, args=given)
    process.start()
    source = f"127.0.0.1:{here.recv()}"
    second = engine(model, options.prompt_tokens, kv_peer="named", kv_key_file=key)
    arrivals, rng = Arrivals(), random.Random(0)
    found: dict[bool, list[tuple[float, float, float, int]]] = {way: [] for way in WAYS}
    with mock.patch.object(Link, "receive_raw", lambda *args: arrivals.note(*args)):
        for _ in range(options.rounds + 1):
            for way, rows in found.items():
                arrivals.times.clear()
                ids = prompt(rng, options.prompt_tokens)
                here.send((ids, way))
                here.recv()
                params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
                second.add(Request(request_id="d", prompt_ids=ids, params=params, kv_from=source))
                while second.has_work():
                    second.step()
                first_token = time.monotonic()
                start, end = here.recv()
                left = sum(size for at, size in arrivals.times if at > end)
                rows.append((first_token - start, end - start, first_token - end, left))
    here.send(None)
    process.join()
    rounds = {way: zip(*rows[1:], strict=True) for way, rows in found.items()}  # the first compiles
    medians = {way: list(map(statistics.median, columns)) for way, columns in rounds.items()}
    return [
        {
            "": WAYS[way],
            "first token ms": 1e3 * first,
            "prompt ms": 1e3 * alone,
            "behind ms": 1e3 * behind,
            "left MB": left / 1e6,
        }
        for way, (first, alone, behind, left) in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "kv.key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        if options.model is None:
            make_checkpoint(Path(folder) / "dense", SMALL)
            make_awq(Path(folder) / "dense", Path(folder) / "awq")
        report.show(measure(options.model or str(Path(folder) / "awq"), options, str(key)))


if __name__ == "__main__":
    main()
