"""The embeddings that an engine sends, as a matrix. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmkit.turbo.request import VectorLayer

if TYPE_CHECKING:
    import numpy as np

    Vectors = np.ndarray[Any, np.dtype[np.float32]]


def matrix(
    rows: Sequence[bytes], size: int = 0, *, normalize: bool = True, layers: Sequence[VectorLayer] = ()
) -> Vectors:
    """float32 [rows, size], by default of unit length; size 0 = the model's. `layers` come first.

    A row's result does not depend on the other rows.
    """
    import numpy as np  # a server that computes no embeddings does not need it

    whole = through(layers, np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1))
    part = whole[:, :size] if size else whole
    return unit(part) if normalize else part


def through(layers: Sequence[VectorLayer], vectors: Vectors) -> Vectors:
    """What the layers make of each row of float32 [rows, size]."""
    import numpy as np

    for layer in layers:
        vectors = np.stack([_LAYERS[layer.kind](layer, row) for row in vectors])
    return vectors


def unit(vectors: Vectors) -> Vectors:
    """The rows float32 [rows, size] with length 1."""
    import numpy as np

    wide = vectors.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    scaled: Vectors = (wide / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(np.float32)
    return scaled


def similarities(first: Vectors, second: Vectors, name: str) -> list[float]:
    """Of each pair of rows, or of one `first` with each `second`; distances are negative. A pair's does not depend on
    the others.
    """
    import numpy as np

    wide, other = first.astype(np.float64), second.astype(np.float64)
    found: list[float]
    if name == "euclidean":
        found = (-np.sqrt(((wide - other) ** 2).sum(axis=1))).tolist()
    elif name == "manhattan":
        found = (-np.abs(wide - other).sum(axis=1)).tolist()
    else:  # of unit vectors, the dot product is the cosine
        found = (wide * other).sum(axis=1).tolist()
    return found


def _dense(layer: VectorLayer, row: Vectors) -> Vectors:
    import numpy as np

    weight = np.frombuffer(layer.weight, np.float32).reshape(-1, len(row))
    out: Vectors = _ACTIVATIONS[layer.activation](weight @ row + np.frombuffer(layer.bias, np.float32))
    if layer.has_residual:
        wide = np.frombuffer(layer.residual, np.float32).reshape(-1, len(row)) @ row if layer.residual else row
        out = out + wide
    return out.astype(np.float32)


def _layer_norm(layer: VectorLayer, row: Vectors) -> Vectors:
    import numpy as np

    centred = row.astype(np.float64) - row.mean(dtype=np.float64)
    scaled = centred / np.sqrt((centred**2).mean() + layer.eps)
    found: Vectors = scaled * np.frombuffer(layer.weight, np.float32) + np.frombuffer(layer.bias, np.float32)
    return found.astype(np.float32)


def _each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of a number, over a vector."""

    def over(values: Any) -> Any:
        import numpy as np

        return np.array([function(float(value)) for value in values], np.float32)

    return over


def _sigmoid(x: float) -> float:
    return 0.5 + 0.5 * math.tanh(0.5 * x)


_LAYERS: dict[str, Callable[[VectorLayer, Any], Any]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": lambda layer, row: unit(row),
}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {  # formats.sentences.ACTIVATIONS
    "Identity": lambda x: x,
    "Tanh": _each(math.tanh),
    "ReLU": _each(lambda x: max(x, 0.0)),
    "Sigmoid": _each(_sigmoid),
    "GELU": _each(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
    "SiLU": _each(lambda x: x * _sigmoid(x)),
}
