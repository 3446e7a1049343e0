"""Blocks that other engines get while a step fills them, layer by layer. Their bytes are in the order of the layers.

    runner            begin | layer 0 | advance | layer 1 | advance ... | end -> the saver
    block server              frames:  ... layer 0 of all blocks    ... layer 1 of all blocks

Blocks that are filled come from the tiers, each in one frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.plan import Save

FRAME_BYTES = 4 << 20  # of one frame of blocks that are being filled, about


class LayerBytes(Protocol):
    """The device's blocks, whose layers are computed one after the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""

    def read_layer(self, layer: int, block: int, out: memoryview) -> int:
        """Copy a layer's bytes of a block to their place in `out` [nbytes]. Returns where they end."""


class _Step:
    """The blocks that a step fills, by key. The first `filled` bytes of each are there."""

    def __init__(self, saves: Sequence[Save], nbytes: int) -> None:
        self.numbers = {save.key: save.block for save in saves}  # two sequences may fill blocks of the same content
        self.blocks = {key: np.empty(nbytes, np.uint8).data for key in self.numbers}
        self.filled = 0
        self.has_ended = False

    def has_more(self, sent: int) -> bool:
        return self.filled > sent or self.has_ended

    def run(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `keys`, from the first on, that the step fills."""
        return keys[: next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))]


class Filling:
    """`has` counts the keys, from the first on, whose blocks the tiers have. `read` gives a block of them, or None.
    `keep` gets the blocks of a step that has filled them.

    One thread runs steps, and any others call `frames`.
    """

    def __init__(
        self,
        device: LayerBytes,
        has: Callable[[Sequence[bytes]], int],
        read: Callable[[bytes], memoryview | None],
        keep: Callable[[dict[bytes, memoryview]], None],
    ) -> None:
        self._device, self._has, self._read, self._keep = device, has, read, keep
        self._changed = threading.Condition()
        self._step: _Step | None = None

    @contextmanager
    def step(self, saves: Sequence[Save]) -> Iterator[None]:
        """A step that fills these blocks."""
        self._step = step = _Step(saves, self._device.nbytes)
        try:
            yield
        finally:
            self._step = None
            if step.filled == self._device.nbytes:
                self._keep(step.blocks)
            step.has_ended = True
            self.notify()

    def advance(self, layer: int) -> None:
        """The step has computed a layer, the one after the last."""
        if (step := self._step) is not None:
            end = step.filled
            for key, data in step.blocks.items():
                end = self._device.read_layer(layer, step.numbers[key], data)
            step.filled = end
            self.notify()

    def notify(self) -> None:
        """There is something new, of a step or of the tiers."""
        with self._changed:
            self._changed.notify_all()

    def frames(self, keys: Sequence[bytes]) -> Iterator[tuple[wire.Frame, bytes | memoryview]]:
        """The blocks with `keys`, in this order, as they come. An empty frame says that nothing came for WAIT_SECONDS.

        Raises WireError if a step fails or a block is lost.
        """
        at, whole = 0, self._device.nbytes
        while at < len(keys):
            step = self._step
            if step is not None and (run := step.run(keys[at:])):
                yield from self._of_step(step, at, run)
                at += len(run)
            elif self._has(keys[at : at + 1]):
                if (data := self._read(keys[at])) is None:
                    raise wire.WireError("a block is lost")
                yield wire.Frame(at, 1, 0, whole), data
                at += 1
            elif not self._wait(partial(self._is_new, step, keys[at])):
                yield wire.NOTHING, b""

    def _of_step(self, step: _Step, at: int, run: Sequence[bytes]) -> Iterator[tuple[wire.Frame, bytes]]:
        sent, most = 0, max(1, FRAME_BYTES // len(run))
        while sent < self._device.nbytes:
            self._wait(partial(step.has_more, sent))
            if (end := min(step.filled, sent + most)) > sent:
                yield wire.Frame(at, len(run), sent, end), b"".join(step.blocks[key][sent:end] for key in run)
                sent = end
            elif step.has_ended:
                raise wire.WireError("a step has failed")
            else:
                yield wire.NOTHING, b""

    def _is_new(self, step: _Step | None, key: bytes) -> bool:
        return self._step is not step or self._has([key]) > 0

    def _wait(self, is_there: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(is_there, wire.WAIT_SECONDS)
