"""The embeddings that an engine sends, as a matrix. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Vectors = np.ndarray[Any, np.dtype[np.float32]]


def matrix(rows: Sequence[bytes], size: int = 0, *, normalize: bool = True) -> Vectors:
    """float32 [rows, size], by default of unit length; size 0 = the model's.

    A row's result does not depend on the other rows.
    """
    import numpy as np  # a server that computes no embeddings does not need it

    whole = np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1)
    part = whole[:, :size] if size else whole
    if not normalize:
        return part
    wide = part.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    unit: Vectors = (wide / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(np.float32)
    return unit
