"""A GPU made of one CPU thread: kernels run where there is no GPU. Its times mean nothing.

emulator.install(seed=0)        # tensors on the CPU can be given to kernels from now on
Engine(..., device=EmulatedDevice())        # emulator.device: an engine that takes them for a GPU's

host.cuh puts CUDA's names before g++, and emulator.cpp runs a launch. Compiled kernels stay in lmkit's cache folder, by
the digest of their sources.
"""

from tests.emulator.backend import EmulatedBackend, install

__all__ = ["EmulatedBackend", "install"]
