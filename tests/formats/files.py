"""Checkpoints for tests. They are made without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a safetensors file with any header (bytes, or a value for JSON), right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def folder(path: Path, tensors: dict[str, torch.Tensor] | bytes, config: Any = None) -> Path:
    """A checkpoint of one file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({} if config is None else config))
    data = tensors if isinstance(tensors, bytes) else safetensors.torch.save(tensors, {"format": "pt"})
    (path / "model.safetensors").write_bytes(data)
    return path


def sharded(path: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, Any] | None = None) -> Path:
    """A checkpoint of several files. The index is right unless `weight_map` replaces it."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, tensors in shards.items():
        safetensors.torch.save_file(tensors, path / name)
    true_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": true_map if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
