"""`python -m lmkit.cluster.child PARENT ARGUMENT ...` runs `lmkit ARGUMENT ...`, which drains if its parent ends.

The system sends SIGTERM when the parent has gone, even if it was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SIGNAL_AT_PARENT_S_END = 1  # PR_SET_PDEATHSIG; it survives execv


def main() -> None:
    parent, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENT_S_END, signal.SIGTERM)
    if os.getppid() == int(parent):  # else it ended before the call
        os.execv(sys.executable, [sys.executable, "-m", "lmkit", *arguments])


if __name__ == "__main__":
    main()
