"""Runs a quantization again and again. SIGKILL ends each run one event later, and the run is then resumed.

    python -m tests.quant.killed SOURCE FOLDER EVERY

An event is a stage of a layer or a wait for the disk; one in EVERY is tried. Prints a JSON list. For each tried event
it holds the number of layers that were finished when the run was killed, and whether the files of the result are those
of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lmkit.errors import ConfigError
from lmkit.kernels.cpu import threads
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.run import Quantizer, prepare
from tests.quant.helpers import recipe

RECIPE = recipe(
    {"step": "awq_scale", "tokens": 32, "grid": 2},
    {"step": "awq_clip", "grid": 1},
    calibration={"num_samples": 3, "seq_len": 24},
)


def child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process. Returns its wait status. No thread was started before the fork."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        work()
        os._exit(0)
    except ConfigError:
        os._exit(2)
    finally:
        os._exit(1)


def run_until(quantizer: Quantizer, out: Path, event: int) -> None:
    """Run the quantization. SIGKILL replaces the event with the number `event`."""
    count, fsync = 0, os.fsync

    def happens() -> None:
        nonlocal count
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def synced(fd: int) -> None:
        happens()
        fsync(fd)

    def progress(what: str, done: int, total: int) -> None:
        if what == "layers":
            happens()

    for module in ("lmkit.formats.atomic.os", "lmkit.formats.safetensors_file"):
        owner = sys.modules["os"] if module.endswith(".os") else sys.modules[module]
        setattr(owner, "fsync", synced)  # noqa: B010
    quantizer.run(out, progress=progress)


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file. The report is hashed without its times and its memory. The page made of it is left out."""
    files = {}
    for file in sorted(path for path in folder.iterdir() if path.name != "report.html"):
        data = file.read_bytes()
        if file.name == "report.json":
            report = json.loads(data)
            del report["peak_bytes"]
            for part in (report, *report["layers"], report["refined"] or {"seconds": 0}):
                del part["seconds"]
            data = json.dumps(report).encode()
        files[file.name] = hashlib.sha256(data).hexdigest()
    return files


def main(source: Path, folder: Path, every: int) -> None:
    threads.configure(1)
    quantizer = prepare(source, RECIPE)
    assert child(lambda: void(quantizer.run(folder / "whole"))) == 0
    whole, results = digest(folder / "whole"), []
    while True:
        out = folder / f"out-{len(results)}"
        status = child(lambda out=out: run_until(quantizer, out, every * len(results)))  # type: ignore[misc]
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status  # noqa: PT018
        work = WorkFolder.beside(out)
        killed = {"layers": work.num_done, "placed": out.exists()}
        again = os.waitstatus_to_exitcode(child(lambda out=out: void(quantizer.run(out))))  # type: ignore[misc]
        results.append(killed | {"exit": again, "equal": digest(out) == whole, "left": work.path.exists()})
    json.dump(results, sys.stdout)


def void(result: object) -> None:
    pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
