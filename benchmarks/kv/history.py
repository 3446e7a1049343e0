"""A history of 200,000 tokens that is answered twice by one process, and once more by another process.

    python -m benchmarks.kv.history MODEL DISK TOKENS THREADS ASKS      one process: JSON of its answers

The model is one layer of two heads. Nearly all the time goes to attention, as in a larger model at this length.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.kv.common import Client, Row, Setting, Timing, checkpoint, random_tokens
from benchmarks.random_llama import Shape

SHAPE = Shape(256, 512, 1, 2, 1, 64, 2048, 200_064)
TOKENS, ANSWER = 200_000, 16
GOAL = 13.0


def cases(setting: Setting) -> list[Row]:
    """Time to first token of the first answer, divided by that of the others."""
    tokens = 8_000 if setting.quick else TOKENS
    model, disk = checkpoint(setting, SHAPE), setting.workdir / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    _, (cold, again) = run_process(model, disk, tokens, setting.threads, asks=2)
    start, (restarted,) = run_process(model, disk, tokens, setting.threads, asks=1)
    shutil.rmtree(disk, ignore_errors=True)
    if not cold.tokens == again.tokens == restarted.tokens:
        raise RuntimeError("the answers differ")
    return [
        row("200k-token history, answered again", cold, again),
        row("200k-token history, after a restart, from disk", cold, restarted, start_seconds=start),
    ]


def row(case: str, cold: Timing, warm: Timing, **facts: float) -> Row:
    times = {"seconds_cold": cold.seconds, "seconds_warm": warm.seconds, "cached_tokens": warm.cached}
    return Row(case, cold.seconds / warm.seconds, GOAL, times | facts)


def run_process(model: Path, disk: Path, tokens: int, threads: int, *, asks: int) -> tuple[float, list[Timing]]:
    """(seconds that a new engine took to start, its answers)."""
    command = [sys.executable, "-m", "benchmarks.kv.history", model, disk, tokens, threads, asks]
    found = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise RuntimeError("the process with the long history failed")
    document = json.loads(found.stdout)
    return document["start"], [Timing(**answer) for answer in document["answers"]]


def main(model: str, disk: str, tokens: str, threads: str, asks: str) -> None:
    begin = time.perf_counter()
    client = Client(Path(model), kv_disk_path=disk, max_batch_size=1, num_threads=int(threads))
    start = time.perf_counter() - begin
    prompt = random_tokens(random.Random(0), int(tokens), SHAPE.vocab)
    answers = [client.ask(prompt, ANSWER) for _ in range(int(asks))]
    client.engine.close()  # finishes the writes to disk
    print(json.dumps({"start": start, "answers": [asdict(answer) for answer in answers]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
