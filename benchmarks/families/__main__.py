"""Every causal architecture of the installed transformers in lmkit, each as a tiny model with random weights.

    python -m benchmarks.families [--work FOLDER] [--again] [TYPE ...]

Each runs in a process of its own with a limit of time. Results are kept in FOLDER, a file each, and a later call goes
on where one ended; `--again` repeats those that fail. Without types, docs/notes/families_sweep.md is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

from benchmarks.families.sweep import Result, as_data, examine
from benchmarks.families.table import write
from benchmarks.families.tiny import architecture_of, causal_types

SECONDS = 240  # of one architecture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--work", type=Path, default=Path("build/families"))
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a child must not inherit threads that are gone
    examine("llama", args.work / "models" / "llama")  # children inherit its compiled kernels
    for model_type in args.types or causal_types():
        path = args.work / f"{model_type}.json"
        if path.exists() and not args.types and not (args.again and not _works(path)):
            continue
        result = _in_child(model_type, args.work)
        path.write_text(json.dumps(result, indent=1))
        print(_line(result), flush=True)
    if not args.types:
        write([json.loads(path.read_text()) for path in sorted(args.work.glob("*.json"))])


def _in_child(model_type: str, work: Path) -> dict[str, object]:
    """The result of a child process, which may crash or hang."""
    start, out = time.monotonic(), work / f".{model_type}.part"
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(work / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            out.write_text(json.dumps(as_data(examine(model_type, work / "models" / model_type))))
        finally:
            os._exit(0)
    reason = "the process ended"
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - start > SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reason = f"no result after {SECONDS} s"
            break
        time.sleep(0.05)
    if out.exists():
        result: dict[str, object] = json.loads(out.read_text())
        out.unlink()
    else:
        result = as_data(Result(model_type, architecture_of(model_type), served=reason))
    return result | {"seconds": round(time.monotonic() - start, 1)}


def _works(path: Path) -> bool:
    found = json.loads(path.read_text())
    return not any(found[name] for name in ("transformers", "served", "batch", "prefix", "quantized"))


def _line(found: dict[str, object]) -> str:
    told = [
        f"{name}: {found[name]}" for name in ("transformers", "served", "batch", "prefix", "quantized") if found[name]
    ]
    return f"{found['model_type']}: {found['engine']} {found['kv']} {found['seconds']} s {'; '.join(told) or 'works'}"


if __name__ == "__main__":
    main()
