"""An emulated GPU on one CPU thread: kernels run without a GPU. Its times mean nothing.

emulator.install(seed=0)        # from now on, kernels take tensors on the CPU
Engine(..., device=EmulatedDevice())        # emulator.device: an engine that takes them for tensors of a GPU

host.cuh defines CUDA's names for g++, and emulator.cpp runs a launch. Compiled kernels stay in lmkit's cache folder, by
the digest of their sources.
"""

from tests.emulator.backend import EmulatedBackend
from tests.emulator.installation import install, run_compiled

__all__ = ["EmulatedBackend", "install", "run_compiled"]
