"""Compiled kernels on the emulated GPU: NVRTC's PTX, translated to C++ (translation.py), in place of the source text.

    pytest tests/kernels/cuda --ptx[=sm_80|sm_89|sm_90a|sm_100a|sm_120a]

The fibers, barriers and late copies are those of the emulator. In addition the runtime checks every access, because PTX
names each of them (shared_shadow.h, global_shadow.h), and counts what they move (traffic.py).
"""
