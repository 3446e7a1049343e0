"""The process of a self-test on an emulated GPU, with faults: lmkit.turbo.engine.self_test_process there."""

from __future__ import annotations

import os
import sys

from lmkit.turbo.engine import self_test_process
from tests import emulator
from tests.emulator import faults

if __name__ == "__main__":
    os.write(1, b"what a library prints is no message\n")
    backend = emulator.install(seed=1)
    planted = os.environ.get(faults.VARIABLE, "")
    device = faults.FaultyDevice(planted)
    faults.plant(backend, planted, device)
    sys.exit(self_test_process.main(device))
