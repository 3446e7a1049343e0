"""Facts about NVIDIA's GPUs by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]

REGISTERS = 65536  # of a streaming multiprocessor (SM)
RESERVED_SHARED = 1024  # bytes of shared memory that CUDA reserves in each block


@dataclass(frozen=True)
class Gpu:
    """Facts that decide which kernels run and how they are laid out."""

    arch: str  # as NVRTC names it: sm_<arch>
    shared_kb: int  # shared memory of an SM, in KiB
    float8: bool = True  # whether tensor cores multiply float8 numbers

    @property
    def shared(self) -> int:
        """Bytes of shared memory of an SM. Each block on it costs RESERVED_SHARED of them."""
        return self.shared_kb << 10

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that one block may use."""
        return self.shared - RESERVED_SHARED


GPUS: dict[Capability, Gpu] = {
    (8, 0): Gpu("80", 164, float8=False),
    (8, 6): Gpu("86", 100, float8=False),
    (8, 7): Gpu("87", 164, float8=False),
    (8, 9): Gpu("89", 100),
    (9, 0): Gpu("90a", 228),
    (10, 0): Gpu("100a", 228),
    (10, 3): Gpu("103a", 228),
    (11, 0): Gpu("110a", 228),
    (12, 0): Gpu("120a", 100),
    (12, 1): Gpu("121a", 100),
}
MIN_CAPABILITY = min(GPUS)
EARLY_CAPABILITY = 9, 0  # from here on a kernel may begin while the one before it ends
FLOAT8_CAPABILITY = min(capability for capability, gpu in GPUS.items() if gpu.float8)


def gpu_of(capability: Capability) -> Gpu:
    """The entry of a capability. A GPU newer than the table gets the least shared memory of all entries."""
    major, minor = capability
    return GPUS.get(capability) or Gpu(f"{major}{minor}", min(gpu.shared_kb for gpu in GPUS.values()))


def version(capability: Capability) -> str:
    """The capability as NVIDIA writes it: "8.9"."""
    return "{}.{}".format(*capability)
