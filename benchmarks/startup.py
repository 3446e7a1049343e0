"""Start-up of `lmkit serve`: time from the start of the process to the first token, and the memory it takes.

    python -m benchmarks.startup MODEL [--runs 3] [options of serve]

There are three kinds of start. "first" has no packed weights on disk (they are packed and written), "warm" maps them,
"uncached" runs with --no-packed-cache. Compiled kernels are on disk in all three if the benchmark was run once before.
With LMKIT_CACHE_DIR set to an empty folder, the first start compiles them too. Memory is the engine process's peak
resident set (VmHWM). Memory that it shares with others (RssFile: libraries and mapped weights) is shown apart. The
bytes of packed weights and KV cache, as the engine reports them, are the floor of its memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from lmkit.formats.hub import resolve_model_path
from lmkit.models.packed_cache import cache_folders

MIB = 1 << 20


@dataclass
class Start:
    """One start of the server: seconds since the start of its process, and bytes of the engine process."""

    ready: float
    first_token: float
    peak: int
    anonymous: int
    file: int


def measure(model: Path, *options: str) -> Start:
    """Start a server, ask it for one token, and stop it."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "lmkit", "serve", str(model), "--port", "0", "--log-level", "WARNING", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = time.perf_counter() - begin
        if " on http" not in line:
            raise SystemExit(f"the server did not start: {line}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        body = {"model": model.name, "prompt": "import os\n", "max_tokens": 1}
        httpx.post(line.split()[-1] + "/v1/completions", json=body, timeout=60).raise_for_status()
        first_token = time.perf_counter() - begin
        children = psutil.Process(process.pid).children()
        (engine,) = (child for child in children if any("engine_process" in part for part in child.cmdline()))
        memory = settled(engine.pid)
        return Start(ready, first_token, memory["VmHWM"], memory["RssAnon"], memory["RssFile"])
    finally:
        process.terminate()
        process.wait(30)


def settled(pid: int) -> dict[str, int]:
    """`status` once the process takes no more memory: an engine takes the pages of its KV cache after its start."""
    memory, before = status(pid), -1
    while memory["VmRSS"] > before:
        before = memory["VmRSS"]
        time.sleep(0.5)
        memory = status(pid)
    return memory


def status(pid: int) -> dict[str, int]:
    """Bytes by name from /proc/PID/status."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if field[-1] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help='A checkpoint folder, or "demo".')
    parser.add_argument("--runs", type=int, default=3, help="Starts of each kind but the first.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    args, serve_options = parser.parse_known_args()
    model = resolve_model_path(args.model)
    for folder in cache_folders(model):
        shutil.rmtree(folder, ignore_errors=True)
    starts = {"first": [measure(model, *serve_options)]}
    starts["warm"] = [measure(model, *serve_options) for _ in range(args.runs)]
    starts["uncached"] = [measure(model, "--no-packed-cache", *serve_options) for _ in range(args.runs)]
    packed = sum(file.stat().st_size for folder in cache_folders(model) for file in folder.glob("packed-*.safetensors"))
    if args.json:
        print(json.dumps({kind: [vars(start) for start in runs] for kind, runs in starts.items()}))
        return
    print(f"{model.name}: {packed / MIB:.0f} MiB of packed weights on disk")
    for kind, runs in starts.items():
        best = min(runs, key=lambda start: start.first_token)
        print(
            f"{kind:9} ready {best.ready:5.2f} s   first token {best.first_token:5.2f} s   engine: "
            f"peak {best.peak / MIB:5.0f} MiB, anonymous {best.anonymous / MIB:.0f}, files {best.file / MIB:.0f}"
        )


if __name__ == "__main__":
    main()
