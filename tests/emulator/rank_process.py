"""The process of a rank whose GPU is emulated: lmkit.turbo.engine.rank_process there."""

from __future__ import annotations

import sys

from lmkit.turbo.engine import rank_process
from tests import emulator
from tests.emulator.device import EmulatedDevice

if __name__ == "__main__":
    emulator.install(seed=1)
    sys.exit(rank_process.main(EmulatedDevice()))
