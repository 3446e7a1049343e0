"""One quantization in a process of its own. Standard library only, for any tool's Python.

    python -m benchmarks.quality_peers.TOOL JOB.json

The job names a checkpoint, a file of calibration rows and the folder to fill. A tool leaves there `checkpoint`, the
checkpoint that it would give its user, and `facts.json`. If its format is best read by the tool itself, it also leaves
`dense`: the same weights in float32 as the tool decodes them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FACTS = "facts.json"


@dataclass(frozen=True)
class Job:
    """The job of a tool."""

    model: str  # folder of the float32 checkpoint
    rows: str  # JSON: calibration rows, lists of token ids of equal length
    out: str  # an empty folder
    recipe: str  # a name that the tool's module knows
    threads: int
    group_size: int = 128  # inputs that share a scale, where the recipe leaves that open
    dataset: str = "demo"  # of the rows, for lmkit, which reads them itself

    def load_rows(self) -> list[list[int]]:
        return list(json.loads(Path(self.rows).read_text()))

    @property
    def checkpoint(self) -> Path:
        return Path(self.out) / "checkpoint"

    @property
    def dense(self) -> Path:
        return Path(self.out) / "dense"


@dataclass(frozen=True)
class Facts:
    """Facts about one quantization.

    `seconds`: from opening the model to the checkpoint on disk; `cpu_seconds`: of all threads; `peak_gib`: the
    process's largest resident memory until then, its libraries included; `settings`: the settings of the tool; `bits`:
    of a weight of the layers' linears, where lmkit cannot read them from the checkpoint.
    """

    version: str
    settings: str
    seconds: float
    cpu_seconds: float
    peak_gib: float
    bits: float | None = None


def run(quantize: Callable[[Job], tuple[str, str]], decode: Callable[[Job], float | None] | None = None) -> None:
    """Run the job of the command line: quantize, decode, then write facts.json. `quantize` returns the tool's version
    and settings, `decode` the bits of a weight or None (Facts)."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    start, start_cpu = time.perf_counter(), time.process_time()
    version, settings = quantize(job)
    facts = Facts(
        version=version,
        settings=settings,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - start_cpu,
        peak_gib=_peak_bytes() / 2**30,
    )
    if decode is not None:
        facts = replace(facts, bits=decode(job))
    (Path(job.out) / FACTS).write_text(json.dumps(asdict(facts)))


def _peak_bytes() -> int:
    """Peak memory of this program alone. getrusage's maximum would begin with that of the parent process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10
