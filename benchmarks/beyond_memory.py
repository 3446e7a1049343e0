"""A model of three times the memory: layers read in every step, beside leaving it to the page cache.

    python -m benchmarks.beyond_memory MODEL [--limit BYTES] [--batch-size 32] [--rounds 3] [--json FILE]

Each engine runs in a control group of its own, whose memory is limited to a third of the model. "mapped" maps
them, and the kernel keeps what it can of them in the page cache. "streamed" runs with --weights-memory. The engines
take turns and begin with an empty page cache. Figures are medians over the rounds. It needs root, and control groups
of version 1 or 2 that this process may write to.

"of the disk" is the rate at which a streamed step reads its layers, divided by the disk's bandwidth before and after
the run. "read" is the kernel's count of all that a step reads from the disk. Tokens must be the same in all runs of a
batch size, and no run may be killed. "peak" is the kernel's count, pages of files included. The engine's own plan of
memory, which refuses mapped weights in such a group, is told of no limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.report import save, show
from lmkit.config import EngineConfig, parse_bytes
from lmkit.models.loader import load
from lmkit.models.resolved import resolved
from lmkit.models.stream_plan import Forecast, Streaming
from lmkit.models.streamed import forecast
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

GROUPS = Path("/sys/fs/cgroup")
V1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
V2 = ("memory.max", "memory.peak")
WAYS = ("mapped", "streamed")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
NUM_TOKENS = 12  # of each sequence


def size(text: str) -> int:
    return parse_bytes(text, "a size")


class Group:
    """A control group with a limit of memory."""

    def __init__(self, limit: int) -> None:
        is_v1 = (GROUPS / "memory").is_dir()
        self.folder = (GROUPS / "memory" if is_v1 else GROUPS) / f"lmkit-{os.getpid()}"
        limit_file, self._peak = V1 if is_v1 else V2
        self.folder.mkdir()
        (self.folder / limit_file).write_text(str(limit))

    def join(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """The most bytes that the group had."""
        return int((self.folder / self._peak).read_text())


@contextmanager
def limited(limit: int) -> Iterator[Group]:
    group = Group(limit)
    try:
        yield group
    finally:
        group.folder.rmdir()


def decode(model: str, batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Decode in this process: seconds of a step, bytes that it reads from the disk, and a digest of the tokens."""
    mock.patch("lmkit.turbo.runners.cpu_device.available_memory", return_value=1 << 40).start()
    config = EngineConfig(device="cpu", max_model_len=64, max_batch_size=batch_size, **options)
    engine = Engine(model, config)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(batch_size):
        engine.add(Request(request_id=f"{i:04}", prompt_ids=[2 + i, 3, 5, 7], params=params))
    tokens: dict[str, list[int]] = {}
    times: list[float] = []
    read: list[int] = []
    while engine.has_work():
        before, read_before = time.perf_counter(), read_bytes()
        for output in engine.step():
            if output.error:
                raise SystemExit(output.error)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        times.append(time.perf_counter() - before)
        read.append(read_bytes() - read_before)
    engine.close()
    digest = hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()
    warm = len(times) // 3
    return {"seconds": statistics.mean(times[warm:]), "read": statistics.mean(read[warm:]), "tokens": digest[:12]}


def read_bytes() -> int:
    """Bytes that this process has read from the disk."""
    entries = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(entries["read_bytes"])


def run(options: argparse.Namespace, way: str, batch_size: int) -> dict[str, Any]:
    """A process of its own in a group of its own, with an empty page cache."""
    engine: dict[str, Any] = {"kv_memory": options.kv_memory, "num_threads": options.threads}
    if way == "streamed":
        engine["weights_memory"] = options.limit - options.beside
        before = planned(options.model, engine["weights_memory"])
    DROP_CACHES.write_text("3")
    with limited(options.limit) as group:
        command = [sys.executable, "-m", "benchmarks.beyond_memory", options.model, "--batch-size", str(batch_size)]
        command += ["--engine", json.dumps(engine)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=group.join)
        if done.returncode:
            raise SystemExit(f"{way}: status {done.returncode}: {done.stderr.strip()[-2000:]}")
        result = {"way": way, "batch_size": batch_size, **json.loads(done.stdout), "peak": group.peak}
    if way == "streamed":
        after = planned(options.model, engine["weights_memory"])
        result |= {"step_bytes": before.plan.step_bytes, "bandwidth": (before.bandwidth + after.bandwidth) / 2}
    return result


def rows(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The medians of each way and batch size."""
    for batch_size in dict.fromkeys(one["batch_size"] for one in runs):
        if len({one["tokens"] for one in runs if one["batch_size"] == batch_size}) > 1:
            raise SystemExit(f"batches of {batch_size}: the tokens differ")
        mapped = None
        for way in WAYS:
            of_way = [one for one in runs if (one["way"], one["batch_size"]) == (way, batch_size)]
            seconds = statistics.median(one["seconds"] for one in of_way)
            mapped = mapped or seconds
            rates = [one["step_bytes"] / one["seconds"] / one["bandwidth"] for one in of_way if "bandwidth" in one]
            yield {
                "way": way,
                "batch size": batch_size,
                "tokens/s": batch_size / seconds,
                "seconds a step": seconds,
                "read GB a step": statistics.median(one["read"] for one in of_way) / 1e9,
                "of mapped": mapped / seconds,
                "of the disk": statistics.median(rates) if rates else None,
                "peak MiB": max(one["peak"] for one in of_way) >> 20,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch-size", default="32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=size, help="of the group; default a third of the model")
    parser.add_argument("--beside", type=size, default=320 << 20, help="of the limit, for all but weights")
    parser.add_argument("--kv-memory", type=size, default=40 << 20)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(decode(options.model, int(options.batch_size), json.loads(options.engine))))
        return
    with resolved(options.model, device="cpu") as model:
        load(model, packed_cache=True)  # packs them once
        options.limit = options.limit or model.weight_bytes() // 3
    expected = planned(options.model, options.limit - options.beside)
    print(f"limit: {options.limit >> 20} MiB", *expected.lines(1)[:3], sep="\n", flush=True)
    runs: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for batch_size in map(int, options.batch_size.split(",")):
            runs += [run(options, way, batch_size) for way in WAYS]
        table = list(rows(runs))  # all so far: a run that is cut short has some
        if options.json:
            save(options.json, "beyond_memory", table, limit=options.limit)
    show(table)


def planned(path: str, weights_memory: int) -> Forecast:
    """How a model of packed weights is streamed, and what to expect."""
    with resolved(path, device="cpu") as model:
        return forecast(model, Streaming(weights_memory))


if __name__ == "__main__":
    main()
