"""Residual streams of a model's last steps, kept for a head that drafts its next tokens.

Streams are large, so only those of a sequence's last WINDOW tokens are kept. A head that has not followed for longer
begins again with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmkit.turbo.plan import Chunk
from lmkit.turbo.runners.batch import in_order
from lmkit.turbo.runners.upload import upload

WINDOW = 128


class Streams:
    """See models.decoder.Kept. `layers` are the layers whose inputs are kept, on `device`."""

    def __init__(
        self, layers: tuple[int, ...], hidden_size: int, num_slots: int, max_step_tokens: int, device: torch.device
    ) -> None:
        width = len(layers) * hidden_size
        self.of_step = torch.zeros(max(max_step_tokens, num_slots), width, device=device)
        self.places = dict(zip(layers, self.of_step.split(hidden_size, 1), strict=True))
        self._kept = torch.zeros(num_slots * WINDOW, width, dtype=torch.bfloat16, device=device)
        self._spans = [(0, 0)] * num_slots  # the positions whose streams are kept
        self.are_wanted = True  # any thread may change it
        self.seconds = 0.0  # of keeping streams

    @staticmethod
    def num_bytes(num_streams: int, hidden_size: int, num_slots: int, max_step_tokens: int) -> int:
        return num_streams * hidden_size * (4 * max(max_step_tokens, num_slots) + 2 * num_slots * WINDOW)

    def enter(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self._spans[slot] = 0, 0

    def keep(self, chunks: list[Chunk]) -> None:
        """Keep the streams of a step of these chunks, if they are wanted."""
        if not self.are_wanted:
            self._spans = [(0, 0)] * len(self._spans)
            return
        start = time.perf_counter()
        rows, places, first = list[int](), list[int](), 0
        for chunk in in_order(chunks):
            end = chunk.start + chunk.num_tokens
            kept = range(max(chunk.start, end - WINDOW), end)
            rows += range(first + kept.start - chunk.start, first + chunk.num_tokens)
            places += [chunk.slot * WINDOW + position % WINDOW for position in kept]
            first += chunk.num_tokens
            begin, known = self._spans[chunk.slot]
            begin = min(begin, chunk.start) if chunk.start <= known else chunk.start
            self._spans[chunk.slot] = max(begin, end - WINDOW), end
        of_rows = self.of_step[:first] if len(rows) == first else self.of_step[self._index(rows)]
        self._kept.index_copy_(0, self._index(places), of_rows.bfloat16())
        self.seconds += time.perf_counter() - start

    def _index(self, numbers: list[int]) -> Tensor:
        return upload(np.array(numbers), self._kept.device)

    def span(self, slot: int) -> tuple[int, int]:
        """The positions [begin, end) whose streams are kept. The last ones may be those of rejected draft tokens."""
        return self._spans[slot]

    def take(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Streams float32 [positions, streams * hidden] of kept positions, given as (slot, begin, end)."""
        places = [slot * WINDOW + place % WINDOW for slot, begin, end in spans for place in range(begin, end)]
        return self._kept[self._index(places)].float()
