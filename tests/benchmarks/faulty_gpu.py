"""benchmarks.gpu with a fault in a section: FAULT="gemm:dies@3" ends its process when it has written three rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.context import Context

VARIABLE = "FAULT"
KINDS = "raises", "dies", "hangs"


def plant(text: str) -> None:
    """Make sections fail, each after so many rows."""
    faults = dict(part.split(":") for part in text.split(","))
    row, written = Context.row, 0

    def faulty(self: Context, what: str, **values: Any) -> None:
        nonlocal written
        row(self, what, **values)
        if self.name in faults:
            kind, _, after = faults[self.name].partition("@")
            written += 1
            if written == int(after):
                _fail(kind)

    Context.row = faulty  # type: ignore[method-assign]


def _fail(kind: str) -> None:
    if kind == "raises":
        raise RuntimeError("planted")
    if kind == "hangs":  # in a process of its own, as pytest's
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1e6)"], check=False)
        time.sleep(1e6)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    plant(os.environ[VARIABLE])
    command.main()
