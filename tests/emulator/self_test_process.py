"""The process of a self-test on an emulated GPU, with faults: lmkit.turbo.engine.self_test_process there."""

from __future__ import annotations

import os
import sys

from lmkit.turbo.engine import self_test_process
from tests import emulator
from tests.emulator import faults
from tests.emulator.device import EmulatedDevice

if __name__ == "__main__":
    os.write(1, b"what a library prints is no message\n")
    backend = emulator.install(seed=1)
    faults.plant(backend, os.environ.get(faults.VARIABLE, ""))
    sys.exit(self_test_process.main(EmulatedDevice()))
