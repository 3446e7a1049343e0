"""The way of the residual stream from GPU to GPU, if each has some of the layers (csrc/stages.cu): kernels on the
stream, so that steps can be captured and hosts run ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.ranks import THREADS, WAIT_SECONDS, SharedMemory, Sharing

BLOCKS = 32
PIECE = 4 * THREADS  # numbers that a block copies at a time: one load for each thread
DEPTH = 2  # steps that have been sent and not received, at most
FLAGS = 4  # words of a block


class GpuLink(SharedMemory):
    """The place of a stage among the others, see models.stage_link.StageLink and SharedMemory. A step has at most
    `max_rows` rows of `width` numbers. Every stage sends and receives once in each step."""

    def __init__(
        self,
        sharing: Sharing,
        device: str,
        lost: Tensor,
        index: int,
        count: int,
        max_rows: int,
        width: int,
        *,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        self._most = -(-max_rows * width // 4) * 4
        num_bytes = 4 * (FLAGS * BLOCKS + DEPTH * self._most)
        super().__init__(sharing, device, lost, index, num_bytes, kernels(count), seconds)
        self.is_first, self._is_silent = index == 0, False
        self._arrived = torch.zeros(max_rows, width, device=device)
        self._leaving = torch.zeros_like(self._arrived)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing is sent or received: launches that no other stage makes."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def receive(self, num_rows: int) -> Tensor:
        """See StageLink. The next call overwrites the rows."""
        self._launch(1, self._arrived, num_rows)
        return self._arrived[:num_rows]

    def place(self, num_rows: int) -> Tensor:
        """See StageLink."""
        return self._leaving[:num_rows]

    def send(self, num_rows: int) -> None:
        """See StageLink."""
        self._launch(0, self._leaving, num_rows)

    def _launch(self, number: int, rows: Tensor, num_rows: int) -> None:
        if not self._is_silent:
            sizes = np.int64(num_rows * rows.shape[1]), np.int64(self._most)
            self._kernels[number](BLOCKS, THREADS, [rows, *sizes, *self._ends])


def kernels(count: int) -> list[Kernel]:
    """The kernels of `count` stages: send, receive."""
    defines = {"SIZE": count, "BLOCKS": BLOCKS, "PIECE": PIECE, "DEPTH": DEPTH}
    return [Kernel("stages.cu", name, **defines) for name in ("send_rows", "receive_rows")]
