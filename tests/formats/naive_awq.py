"""An AWQ reader, the oracle for formats/awq.py. It was written from the format's description alone and works element
by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

CHANNEL_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


def nibble(word: int, channel: int) -> int:
    return (word & 0xFFFFFFFF) >> (4 * CHANNEL_OF_NIBBLE.index(channel)) & 15


def dequantized(path: Path, module: str, group_size: int) -> np.ndarray:
    """float32 [out, in]."""
    tensors = safetensors.numpy.load_file(path)
    words, zeros, scales = (tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales"))
    assert (words.dtype, zeros.dtype, scales.dtype) == (np.int32, np.int32, np.float16)
    in_features, out_features = words.shape[0], words.shape[1] * 8
    group = in_features if group_size == -1 else group_size
    assert zeros.shape == (in_features // group, words.shape[1])
    assert scales.shape == (in_features // group, out_features)
    weight = np.empty((out_features, in_features), np.float32)
    for k in range(in_features):
        for n in range(out_features):
            code = nibble(int(words[k, n // 8]), n % 8)
            zero = nibble(int(zeros[k // group, n // 8]), n % 8)
            weight[n, k] = np.float32(code - zero) * np.float32(scales[k // group, n])
    return weight
