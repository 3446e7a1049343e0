"""The hidden states of one text, pooled as they come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class PooledText:
    """Takes in the final hidden states of a text, one token after the other, so chunks do not change the result."""

    def __init__(self, pooling: str, size: int) -> None:
        """`pooling`: modes of formats.sentences, joined by "+"."""
        self._modes = pooling.split("+")
        self.count = 0
        self.first = self.last = np.zeros(size, np.float32)
        self.total, self.weighted = np.zeros(size), np.zeros(size)
        self.most = np.full(size, -np.inf, np.float32)

    def add(self, states: np.ndarray) -> None:
        """float32 [tokens, size]: the next tokens."""
        if self.count == 0:
            self.first = states[0].copy()
        self.last = states[-1]
        for row in states:
            self.count += 1
            self.total += row
            if "weighted_mean" in self._modes:
                self.weighted += self.count * row.astype(np.float64)
        if "max" in self._modes:
            self.most = np.maximum(self.most, states.max(axis=0))

    def result(self) -> np.ndarray:
        """float32 [modes * size]."""
        return np.concatenate([_RESULTS[mode](self) for mode in self._modes]).astype(np.float32)


_RESULTS: dict[str, Callable[[PooledText], np.ndarray]] = {
    "last": lambda text: text.last,
    "cls": lambda text: text.first,
    "max": lambda text: text.most,
    "mean": lambda text: text.total / text.count,
    "mean_sqrt_len": lambda text: text.total / np.sqrt(text.count),
    "weighted_mean": lambda text: text.weighted / (text.count * (text.count + 1) / 2),
}
