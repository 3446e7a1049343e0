"""Several models in one server, under load: no request may fail, and the engines stay within the budget of memory.

    python -m benchmarks.models [--models 3] [--seconds 60] [--clients 16]

Copies of the demo model share a budget for two. The clients ask for a random model each time. Every 50 ms the
memory of all engine processes is added up, with shared pages counted once (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from lmkit.formats.hub import DEMO_FOLDER

NAMES = "abcdefgh"
BUDGET_MIB = 1500  # for two engines of 553 MiB, and one process that sleeps
LINE = re.compile(r"on (http\S+)")
AWAKE = re.compile(r" (\w) is awake after (\S+) s")


async def main(names: str, seconds: float, num_clients: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(shutil.copytree(DEMO_FOLDER, Path(folder) / name)) for name in names]
        options = ["--port", "0", "--kv-memory", "128M", "--memory-budget", f"{BUDGET_MIB}M"]
        command = [sys.executable, "-m", "lmkit", "serve", *paths, *options]
        log = (Path(folder) / "log").open("w+")
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            url = await _url(Path(log.name), server)
            statuses, latencies, peak = await _load(url, server.pid, names, seconds, num_clients)
        finally:
            server.terminate()
            server.wait()
        loads = [float(found[2]) for found in AWAKE.finditer(Path(log.name).read_text())]
    wakes = sorted(loads[len(names) :])  # the first load of each model starts a process and packs the weights
    failed = sum(status != 200 for status in statuses)
    print(f"requests: {len(statuses)}, failed: {failed}")
    print(f"engines: at most {peak:.0f} MiB of a budget of {BUDGET_MIB} MiB")
    print(f"wakes: {len(wakes)}, p50 {statistics.median(wakes):.2f} s, longest {wakes[-1]:.2f} s")
    print(f"latency: p50 {statistics.median(latencies):.2f} s, longest {max(latencies):.2f} s")
    return int(failed > 0 or peak > BUDGET_MIB)


async def _url(log: Path, server: subprocess.Popen[str]) -> str:
    while server.poll() is None:
        if found := LINE.search(log.read_text()):
            return found[1]
        await asyncio.sleep(0.1)
    raise SystemExit(f"the server ended:\n{log.read_text()}")


async def _load(
    url: str, pid: int, names: str, seconds: float, num_clients: int
) -> tuple[list[int], list[float], float]:
    """Statuses, latencies in seconds, and the most MiB that the engines took."""
    statuses: list[int] = []
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        chosen = random.Random(number)
        while (start := time.monotonic()) < end:
            body = {"model": chosen.choice(names), "prompt": "def add(", "max_tokens": chosen.randint(4, 64)}
            statuses.append((await client.post(f"{url}/v1/completions", json=body)).status_code)
            latencies.append(time.monotonic() - start)

    watching = asyncio.ensure_future(asyncio.to_thread(_peak, pid, end))
    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
    return statuses, latencies, await watching


def _peak(pid: int, end: float) -> float:
    peak = 0
    while time.monotonic() < end:
        total = 0
        for process in psutil.Process(pid).children():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended this moment
        peak = max(peak, total)
        time.sleep(0.05)
    return peak / (1 << 20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Several models in one server, under load.")
    parser.add_argument("--models", type=int, default=3, choices=range(3, len(NAMES) + 1))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(NAMES[: given.models], given.seconds, given.clients)))
