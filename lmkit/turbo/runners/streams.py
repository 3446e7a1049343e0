"""Residual streams of a model's last steps, kept for a head that guesses its next tokens.

Streams are large, so only those of a sequence's last WINDOW tokens are kept. A head that has not followed for longer
begins again with them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lmkit.turbo.plan import Chunk
from lmkit.turbo.runners.batch import in_order

WINDOW = 128


class Streams:
    """See models.decoder.Kept. `layers` are the layers whose inputs are kept."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, num_slots: int, max_step_tokens: int) -> None:
        width = len(layers) * hidden_size
        self.of_step = torch.zeros(max_step_tokens, width)
        self.places = dict(zip(layers, self.of_step.split(hidden_size, 1), strict=True))
        self._kept = torch.zeros(num_slots * WINDOW, width, dtype=torch.bfloat16)
        self._spans = np.zeros((num_slots, 2), np.int64)  # the positions whose streams are kept

    @staticmethod
    def num_bytes(num_streams: int, hidden_size: int, num_slots: int, max_step_tokens: int) -> int:
        return num_streams * hidden_size * (4 * max_step_tokens + 2 * num_slots * WINDOW)

    def enter(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self._spans[slot] = 0

    def keep(self, chunks: list[Chunk]) -> None:
        """Keep the streams of a step of these chunks."""
        slots, starts, counts = np.array([(c.slot, c.start, c.num_tokens) for c in in_order(chunks)]).T
        ends, rows = starts + counts, np.arange(counts.sum())
        positions = rows - np.repeat(counts.cumsum() - ends, counts)
        owners = np.repeat(slots, counts)
        if counts.max() > WINDOW:
            rows = rows[positions >= np.repeat(ends, counts) - WINDOW]
            positions, owners = positions[rows], owners[rows]
        places = torch.from_numpy(owners * WINDOW + positions % WINDOW)
        self._kept.index_copy_(0, places, self.of_step[torch.from_numpy(rows)].bfloat16())
        begins, known = self._spans[slots].T
        begins = np.where(starts <= known, np.minimum(begins, starts), starts)
        self._spans[slots] = np.stack([np.maximum(begins, ends - WINDOW), ends], 1)

    def span(self, slot: int) -> tuple[int, int]:
        """The positions [begin, end) whose streams are kept. The last ones may be those of wrong guesses."""
        begin, end = self._spans[slot].tolist()
        return begin, end

    def take(self, slot: int, begin: int, end: int) -> Tensor:
        """Streams float32 [end - begin, streams * hidden] of kept positions."""
        return self._kept[slot * WINDOW + torch.arange(begin, end) % WINDOW].float()
