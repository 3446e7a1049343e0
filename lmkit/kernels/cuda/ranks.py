"""Exchanges of ranks that have a GPU each (csrc/ranks.cu), by kernels on the stream: steps can be captured.

A rank maps the memory of all others: that of their GPUs, if these reach each other by NVLink or PCIe, else host memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.ops import Places

THREADS = 512
LEAST_PIECE = 4 * THREADS  # numbers of a block, if there are few: one load for each thread
SAVED_BYTES = 1 << 20  # that a second shot must spare a rank: so much is read while ranks meet once more
WAIT_SECONDS = 120.0  # for another rank: kernels that no one foresaw are compiled meanwhile
USES_HOST_ADDRESSES = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
MAPPED = 2  # cudaHostRegisterMapped
NAMES = "sum_ranks", "side_by_side", "from_first", "exchange_rows"  # kernels


class Layout(NamedTuple):
    """Sizes of a rank's memory: see csrc/ranks.cu. All blocks must run at once, two on a multiprocessor."""

    blocks: int = 64
    piece: int = 1 << 14  # numbers

    def num_bytes(self, size: int) -> int:
        return 4 * (size + 1) * self.blocks + 2 * self.blocks * self.piece * 4


LAYOUT = Layout()


class Sharing(Protocol):
    """How ranks get at each other's memory."""

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Zeroed memory of this rank's device: its address, and a handle by which other processes open it."""

    def open(self, handle: bytes) -> int:
        """The address of another rank's memory. Raises UnsupportedError if it cannot be mapped."""


class IpcSharing:
    """Through CUDA's handles of memory for other processes, on torch's current GPU."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        self._runtime: Any = runtime

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        address = self._runtime.malloc(num_bytes)  # not torch's: a handle stands for a whole allocation
        self._runtime.memset(address, 0, num_bytes)
        self._runtime.deviceSynchronize()
        return address, bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        try:
            return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))
        except self._runtime.CUDARuntimeError as error:
            raise UnsupportedError(f"a GPU cannot map the memory of another one ({error}); use one GPU") from None


class HostSharing:
    """Through host memory, which every GPU reads and writes over PCIe: for GPUs that do not reach each other's memory.
    `register(address, bytes)` lets the device use a range under its address."""

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._kept: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        file = os.memfd_create("lmkit-ranks")  # it stays open: the others open it by the handle
        os.ftruncate(file, num_bytes)
        return self._mapped(file, num_bytes), f"/proc/{os.getpid()}/fd/{file}".encode()

    def open(self, handle: bytes) -> int:
        file = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def _mapped(self, file: int, num_bytes: int) -> int:
        memory = mmap.mmap(file, num_bytes)
        self._kept.append(memory)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._register(address, num_bytes)
        return address


def register_host(address: int, num_bytes: int) -> None:
    """Let torch's current GPU use host memory. Raises UnsupportedError."""
    from cupy.cuda import runtime

    try:
        if not runtime.deviceGetAttribute(USES_HOST_ADDRESSES, torch.cuda.current_device()):
            raise UnsupportedError("this GPU cannot use host memory under its address; use one GPU")
        runtime.hostRegister(address, num_bytes, MAPPED)
    except runtime.CUDARuntimeError as error:
        raise UnsupportedError(f"a GPU cannot use host memory ({error}); use one GPU") from None


class SharedMemory:
    """Memory of each process of a model, which all have mapped. `lost`: int32 [1] of host memory that the device reads.

    `handle` goes to all other processes, whose handles `connect` takes. `kernels` are those that use the memory.
    """

    def __init__(
        self,
        sharing: Sharing,
        device: str,
        lost: Tensor,
        rank: int,
        num_bytes: int,
        kernels: list[Kernel],
        seconds: float = WAIT_SECONDS,
    ) -> None:
        self._sharing, self._device, self._lost, self._rank = sharing, device, lost, rank
        self._limit = np.int64(1e9 * seconds)
        self._address, self.handle = sharing.allocate(num_bytes)
        self._kernels = kernels

    def connect(self, handles: Sequence[bytes]) -> None:
        """Map the memory of all processes, given in their order. Raises UnsupportedError."""
        addresses = [
            self._address if rank == self._rank else self._sharing.open(handle) for rank, handle in enumerate(handles)
        ]
        self._memories = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        for kernel in self._kernels:
            kernel.compile(self._memories.device.type)

    @property
    def _ends(self) -> list[Any]:
        """The last arguments of a kernel."""
        return [self._memories, self._lost, self._limit, self._rank]

    @property
    def is_lost(self) -> bool:
        return bool(self._lost[0])

    def lose(self) -> None:
        """From any thread: a process has ended. No kernel waits any longer, and results mean nothing."""
        self._lost[0] = 1


class GpuRanks(SharedMemory):
    """One rank's view of the ranks, see layers.ranks.Ranks and SharedMemory. Every rank calls the same methods with the
    same sizes in the same order."""

    def __init__(
        self,
        sharing: Sharing,
        device: str,
        lost: Tensor,
        rank: int,
        size: int,
        vocab_size: int,
        *,
        layout: Layout = LAYOUT,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        super().__init__(sharing, device, lost, rank, layout.num_bytes(size), kernels(size, layout), seconds)
        self._size, self._vocab, self._layout = size, vocab_size, layout

    def sum(self, x: Tensor) -> Tensor:
        """See layers.ranks.Ranks. The result lies in x."""
        assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
        grid, piece = self._pieces(x.numel())
        spared = 4 * x.numel() * (self._size - 1) * (self._size - 2) // self._size
        aligned = x.data_ptr() % 16 == 0
        args = [x, np.int64(x.numel()), piece, spared > SAVED_BYTES, aligned, *self._ends]
        self._kernels[0](grid, THREADS, args)
        return x

    def side_by_side(self, x: Tensor) -> Tensor:
        """See layers.ranks.Ranks."""
        assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
        rows = len(x)
        out = x.new_empty(rows if self._rank == 0 else 0, self._vocab)
        grid, piece = self._pieces(rows * -(-self._vocab // self._size))
        args = [x, out if self._rank == 0 else None, rows, self._vocab, piece, *self._ends]
        self._kernels[1](grid, THREADS, args)
        return out

    def agree(self, experts: Tensor) -> None:
        """See layers.ranks.Ranks. Tokens that pad a captured step mean nothing, and each rank has others there."""
        self.from_first(experts)

    def exchange(self, y: Tensor, places: Places) -> None:
        """See layers.ranks.Ranks."""
        assert (y.dtype, y.is_contiguous()) == (torch.float32, True)
        grid, piece = self._pieces(y.numel())
        aligned = y.data_ptr() % 16 == 0 and y.shape[1] % 4 == 0
        args = [y, np.int64(y.numel()), y.shape[1], piece, aligned, places.active, *self._ends]
        self._kernels[3](grid, THREADS, args)

    def from_first(self, x: Tensor) -> None:
        """Copy rank 0's x, int64 of any shape, to the others'."""
        words = x.view(torch.int32)
        for part in words.flatten().split(self._layout.piece):
            self._kernels[2](1, THREADS, [part, part.numel(), *self._ends])

    def _pieces(self, count: int) -> tuple[int, int]:
        """Blocks, and numbers of a piece, for so many numbers."""
        blocks, most = self._layout
        piece = min(most, max(LEAST_PIECE, -(-count // (4 * blocks)) * 4))
        return min(blocks, -(-count // piece)), piece


def kernels(size: int, layout: Layout = LAYOUT) -> list[Kernel]:
    """The kernels of `size` ranks: sum, side by side, from the first, exchange."""
    defines = {"SIZE": size, "BLOCKS": layout.blocks, "PIECE": layout.piece}
    return [Kernel("ranks.cu", name, **defines) for name in NAMES]
