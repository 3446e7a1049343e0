"""Sums over the ranks of one machine, through memory that they share.

    arrivals | lost | ... (64 bytes each) | buffer 0: slot of rank 0, slot of rank 1, ... | buffer 1: the same

Every rank writes its numbers to its slot, waits until all have arrived, and reads all slots in the order of ranks: all
get the same bits. If every row belongs to one rank alone, the rows lie side by side in a buffer, whoever writes them.
Exchanges use the two buffers in turns. A rank writes to a buffer again only after the exchange in between, at which all
have arrived, so all have read it. Waiting is one job of a program, and steps can be captured.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.intrinsics import FUTEX, WAKE_SHARED, add, copy, pointer, wait_for_ranks, wake_ranks
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import Places

HEADER = 256  # bytes before the buffers
LOST = 64  # the place of the mark
PIECE = 1 << 14  # numbers that a thread copies or adds at once


def shared_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    return HEADER + 2 * size * slot_bytes


class Meeting(NamedTuple):
    shared: int  # address of the shared memory
    turn: int  # address of the number of exchanges that this rank has begun
    rank: int
    size: int
    slot: int  # bytes


class ExchangeArgs(NamedTuple):
    at: Meeting
    x: int
    y: int
    numel: int  # numbers of x
    width: int  # numbers of a row of x
    vocab: int  # numbers of a row of y


class RowsArgs(NamedTuple):
    at: Meeting
    y: int  # the first row of this exchange
    width: int
    first: int  # its number
    active: int  # see ops.Places


@inline
def _turn(at: Any) -> Any:
    """The number of the exchange that this rank is about to begin."""
    return carray(pointer(at.turn), 1, np.int64)[0]


@inline
def _buffer(at: Any, turn: int) -> Any:
    """The address of the first slot of exchange `turn`."""
    return at.shared + HEADER + (turn & 1) * at.size * at.slot


def _share(args: int, scratch: int, index: int) -> None:
    """Write piece `index` of x to this rank's slot of the next exchange."""
    a = read(args, ExchangeArgs)
    start = index * PIECE
    slot = _buffer(a.at, _turn(a.at)) + a.at.rank * a.at.slot
    copy(a.x + 4 * start, slot + 4 * start, 4 * min(PIECE, a.numel - start))


def _meet(args: int, scratch: int, index: int) -> None:
    """Begin the next exchange: wait until all ranks have written to their slots."""
    at = read(args, Meeting)
    turn = carray(pointer(at.turn), 1, np.int64)
    turn[0] += 1
    add(at.shared, 1)
    wake_ranks(at.shared)
    wait_for_ranks(at.shared, at.shared + LOST, turn[0] * at.size)


def _sum(args: int, scratch: int, index: int) -> None:
    """Add up piece `index` of all slots."""
    a = read(args, ExchangeArgs)
    start = index * PIECE
    count = min(PIECE, a.numel - start)
    slots = _buffer(a.at, _turn(a.at) - 1) + 4 * start
    out = carray(pointer(a.y + 4 * start), count, np.float32)
    copy(slots, a.y + 4 * start, 4 * count)
    for rank in range(1, a.at.size):
        other = carray(pointer(slots + rank * a.at.slot), count, np.float32)
        for i in range(count):
            out[i] += other[i]


def _place(args: int, scratch: int, index: int) -> None:
    """Write row `index` of all slots side by side. Rank r has the columns vocab * r // size and on."""
    a = read(args, ExchangeArgs)
    slots, size = _buffer(a.at, _turn(a.at) - 1), a.at.size
    for rank in range(size):
        begin, end = a.vocab * rank // size, a.vocab * (rank + 1) // size
        source = slots + rank * a.at.slot + 4 * index * (end - begin)
        copy(source, a.y + 4 * (index * a.vocab + begin), 4 * (end - begin))


@inline
def _is_own(a: Any, row: int) -> Any:
    """Whether row `row` belongs to an active expert. Those of a rank have neighbouring rows."""
    number = carray(pointer(a.active), 1, np.int64)[0]
    entries = carray(pointer(a.active + 8), 3 * number, np.int64)
    return number > 0 and entries[1] <= row < entries[3 * number - 1]


def _give(args: int, scratch: int, index: int) -> None:
    """Write row `index` of this exchange to the buffer, which all slots are together, if it is this rank's."""
    a = read(args, RowsArgs)
    if _is_own(a, a.first + index):
        start = 4 * index * a.width
        copy(a.y + start, _buffer(a.at, _turn(a.at)) + start, 4 * a.width)


def _take(args: int, scratch: int, index: int) -> None:
    """Read row `index` of this exchange, unless it is this rank's."""
    a = read(args, RowsArgs)
    if not _is_own(a, a.first + index):
        start = 4 * index * a.width
        copy(_buffer(a.at, _turn(a.at) - 1) + start, a.y + start, 4 * a.width)


TASKS = SHARE, MEET, SUM, PLACE, GIVE, TAKE = tuple(Task(f) for f in (_share, _meet, _sum, _place, _give, _take))


class SharedRanks:
    """One rank's view of the ranks of a machine. `memory` has `shared_bytes`, zeroed, the same in all ranks."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, slot_bytes: int, vocab_size: int) -> None:
        self._memory = np.frombuffer(memory, np.int64)
        self._turn = np.zeros(1, np.int64)
        self._rank, self._size, self._slot, self._vocab = rank, size, slot_bytes, vocab_size

    def sum(self, x: Tensor) -> Tensor:
        """See layers.ranks.Ranks. The result lies in x."""
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        for part in x.split(max(1, self._slot // (4 * x.shape[1]))):
            args = self._exchange(part, part.data_ptr(), part.nbytes)
            pieces = -(-part.numel() // PIECE)
            threads.run(SUM, pieces, args, parallel=pieces > 1)
        return x

    def side_by_side(self, x: Tensor) -> Tensor:
        """See layers.ranks.Ranks."""
        widest = -(-self._vocab // self._size)
        out = workspace.empty(len(x) if self._rank == 0 else 0, self._vocab)
        at, address = 0, out.data_ptr()
        for part in x.split(max(1, self._slot // (4 * widest))):
            args = self._exchange(part, address + 4 * at * self._vocab, 4 * len(part) * widest)
            if self._rank == 0:
                threads.run(PLACE, len(part), args, parallel=len(part) > 1)
            at += len(part)
        return out

    def agree(self, experts: Tensor) -> None:
        """See layers.ranks.Ranks. They have computed the same bits."""

    def exchange(self, y: Tensor, places: Places) -> None:
        """See layers.ranks.Ranks."""
        assert y.is_contiguous()
        assert y.dtype == torch.float32
        width, first = y.shape[1], 0
        for part in y.split(max(1, self._size * self._slot // (4 * width))):
            args = numbers(RowsArgs(self._meeting, part.data_ptr(), width, first, places.active.data_ptr()))
            is_large = part.numel() > PIECE
            threads.run(GIVE, len(part), args, parallel=is_large)
            self._meet(args, self._slot)
            threads.run(TAKE, len(part), args, parallel=is_large)
            first += len(part)

    @property
    def _meeting(self) -> Meeting:
        shared, turn = self._memory.ctypes.data, self._turn.ctypes.data
        return Meeting(shared, turn, self._rank, self._size, self._slot)

    def _meet(self, args: list[int], num_bytes: int) -> None:
        """Begin the next exchange: wait until all ranks have written to their slots, at most `num_bytes` each."""
        threads.run(MEET, 1, args, parallel=False)

    def _exchange(self, x: Tensor, y: int, num_bytes: int) -> list[int]:
        """Write x to this rank's slot, and wait for the others. Returns the arguments of the job that reads."""
        args = numbers(ExchangeArgs(self._meeting, x.data_ptr(), y, x.numel(), x.shape[1], self._vocab))
        pieces = -(-x.numel() // PIECE)
        threads.run(SHARE, pieces, args, parallel=pieces > 1)
        self._meet(args, num_bytes)
        return args

    @property
    def is_lost(self) -> bool:
        return bool(self._memory[LOST // 8])

    def lose(self) -> None:
        """From any thread, also again: a rank has ended. The others wait no longer, and their results mean nothing."""
        self._memory[LOST // 8] = 1
        self._memory[0] += 1  # a thread that is about to sleep sees a change
        if FUTEX is not None:
            ctypes.CDLL(None).syscall(FUTEX, ctypes.c_void_p(self._memory.ctypes.data), WAKE_SHARED, 1 << 30, 0, 0, 0)
