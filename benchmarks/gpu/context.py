"""The context of a section of the benchmark: its settings, and the file of its rows.

Each section is a process of its own (__main__), because a fault of a kernel ends the use of a GPU by its process. Rows
are written as they come, one JSON object a line. So the rows of a section that fails or runs out of time are kept.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.roofline import H200, Peak
from benchmarks.report import share

Row = dict[str, Any]


@dataclass
class Context:
    """Settings of a section. `device` holds the tensors. On "cpu" kernels are emulated, as a rehearsal: its times mean
    nothing."""

    out: Path
    device: str = "cuda"
    quick: bool = False
    peers: Path | None = None  # a folder of wheels to compare with
    seconds: float = 60.0  # for this section
    name: str = ""  # of the section
    started: float = field(default_factory=time.perf_counter)

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"

    @property
    def is_over(self) -> bool:
        """Whether no new measurement should begin. A measurement that has begun may take its time."""
        return time.perf_counter() - self.started > 0.9 * self.seconds

    @property
    def left(self) -> float:
        """Seconds that a process which the section starts may take, so that the section can still write its rows."""
        return max(0.93 * self.seconds - (time.perf_counter() - self.started), 1.0)

    def row(self, what: str, **values: Any) -> None:
        """Write a row down."""
        with self.file(self.name).open("a") as file:
            file.write(json.dumps({"section": self.name, "what": what, **values}) + "\n")

    @contextmanager
    def attempt(self, what: str, **values: Any) -> Iterator[None]:
        """Turn a failure inside the block into a row with its reason. The section goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any failure becomes a row
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.row(
                what, **values, error=f"{type(error).__name__}: {error}"[:500], at=f"{where.filename}:{where.lineno}"
            )
            if not self.rehearsal and torch.cuda.is_available():
                torch.cuda.synchronize()  # a fault of the GPU raises again here and ends the section

    def file(self, section: str) -> Path:
        """The file of a section's rows."""
        return self.out / f"{section}.jsonl"

    def peak(self) -> Peak:
        """The rates that the section "machine" has measured: bytes read or copied, operations of a bfloat16 matmul. A
        rate that could not be measured is that of an H200."""
        found = {row["what"]: row["value"] for row in read_rows(self.file("machine")) if "value" in row}
        rates = [found[name] for name in ("copy bandwidth", "read bandwidth") if name in found]
        return Peak(max(rates, default=H200.bytes_per_s), found.get("bfloat16 matmul", H200.flops))

    def share(self, figure: float, ceiling: float, what: str) -> float:
        """`figure` / `ceiling`. Raises AboveCeiling, except in a rehearsal, where neither means anything."""
        return figure / ceiling if self.rehearsal else share(figure, ceiling, what)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; no rows if there is no file. A line that was cut off is none."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
