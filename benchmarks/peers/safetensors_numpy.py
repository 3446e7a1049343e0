"""Tensors of a checkpoint folder as numpy arrays, bfloat16 as float32: for a Python without torch and lmkit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


def tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Every tensor's name and values. The file is mapped, so memory holds one tensor at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        size = int(data[:8].view(np.uint64)[0])
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            first, last = (8 + size + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(data[first:last].tobytes(), np.uint16).astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(entry["shape"])
