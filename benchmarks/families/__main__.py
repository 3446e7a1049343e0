"""Every causal architecture of the installed transformers in lmkit, each as a tiny model with random weights.

    python -m benchmarks.families [--images] [--work FOLDER] [--again] [TYPE ...]

Each runs in a process of its own with a limit of time. Results are kept in FOLDER, a file each, and a later call goes
on where one ended; `--again` repeats those that fail. Without types, docs/notes/families_sweep.md is written. With
`--images` these are the architectures that write about images, and the page is docs/notes/images_sweep.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.families import image_table, sweep, sweep_images, table, tiny, tiny_images

SECONDS = 240  # of one architecture


class Sweep(NamedTuple):
    """What is asked of each architecture."""

    types: Callable[[], list[str]]
    examine: Callable[[str, Path], Any]  # gives a result, of which empty reasons say that all works
    result: Callable[..., Any]
    architecture_of: Callable[[str], str]
    reasons: tuple[str, ...]
    write: Callable[[list[dict[str, Any]]], None]


TEXT = Sweep(
    tiny.causal_types, sweep.examine, sweep.Result, tiny.architecture_of, ("transformers", *table.CHECKS), table.write
)
IMAGES = Sweep(
    tiny_images.image_types, sweep_images.examine_images, sweep_images.ImageResult, tiny_images.architecture_of,
    ("transformers", "refused", *sweep_images.CHECKS), image_table.write,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    kind = IMAGES if args.images else TEXT
    args.work = args.work or Path("build/families_images" if args.images else "build/families")
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a child must not inherit threads that are gone
    sweep.examine("llama", args.work / "models" / "llama")  # children inherit its compiled kernels
    for model_type in args.types or kind.types():
        path = args.work / f"{model_type}.json"
        if path.exists() and not args.types and not (args.again and not _works(path, kind)):
            continue
        result = _in_child(model_type, args.work, kind)
        path.write_text(json.dumps(result, indent=1))
        print(_line(result, kind), flush=True)
    if not args.types:
        kind.write([json.loads(path.read_text()) for path in sorted(args.work.glob("*.json"))])


def _in_child(model_type: str, work: Path, kind: Sweep) -> dict[str, object]:
    """The result of a child process, which may crash or hang."""
    start, out = time.monotonic(), work / f".{model_type}.part"
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(work / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            out.write_text(json.dumps(dataclasses.asdict(kind.examine(model_type, work / "models" / model_type))))
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
        result = dataclasses.asdict(kind.result(model_type, kind.architecture_of(model_type), served=reason))
    return result | {"seconds": round(time.monotonic() - start, 1)}


def _works(path: Path, kind: Sweep) -> bool:
    found = json.loads(path.read_text())
    return not any(found[name] for name in kind.reasons)


def _line(found: dict[str, object], kind: Sweep) -> str:
    told = [f"{name}: {found[name]}" for name in kind.reasons if found[name]]
    return f"{found['model_type']}: {found['kv']} {found['seconds']} s {'; '.join(told) or 'works'}"


if __name__ == "__main__":
    main()
