"""A checkpoint in float8 (formats.fp8) read as one of floats, so that a calibration starts from it.

Weights are `code * scale`, rounded to config.json's dtype as they are read; nothing else of the checkpoint changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.formats.base import resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.fp8 import SCALES, Fp8Format, read_scaled
from lmkit.formats.safetensors_file import NAMES, TensorInfo
from lmkit.formats.views import View
from lmkit.qtensor import dequantize

ENTRY = "quantization_config"
OF_INPUTS = ("input_scale", "activation_scale")


class Fp8Floats(CheckpointReader):
    """Tensors of float8 have config.json's dtype, and there are no scales. Raises CheckpointError, and UnsupportedError
    for a layout that the format does not read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        resolve_format(self.config)
        self._coded = CheckpointReader(path)
        self._block = self.config[ENTRY].get("weight_block_size")
        self.config = {key: value for key, value in self.config.items() if key != ENTRY}
        asked = self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16"
        self._dtype = getattr(torch, str(asked))
        of_modules = {name.rpartition(".")[0]: name for name in self._files if name.endswith(SCALES)}
        self._scaled = {f"{module}.weight": module for module in of_modules}
        for name in [name for name in self._files if name.rpartition(".")[2] in (*SCALES, *OF_INPUTS)]:
            del self._files[name]

    def show(self, views: Mapping[str, View]) -> None:
        coded = [view.source for view in views.values() if view.source in self._scaled]
        if coded:
            raise UnsupportedError(f"{self.path}: {coded[0]} has several weights in float8: not read as floats")
        super().show(views)

    def info(self, name: str) -> TensorInfo:
        info = super().info(name)
        if name not in self._scaled:
            return info
        return replace(info, dtype=NAMES[self._dtype], nbytes=info.nbytes * self._dtype.itemsize)

    def tensor(self, name: str) -> Tensor:
        if name not in self._scaled:
            return super().tensor(name)
        return dequantize(read_scaled(self._coded, self._scaled[name], self._block)).to(self._dtype)

    def release(self) -> None:
        super().release()
        self._coded.release()

    def close(self) -> None:
        super().close()
        self._coded.close()


def in_float8(config: Mapping[str, Any]) -> bool:
    """Whether config.json declares the format."""
    entry = config.get(ENTRY)
    return isinstance(entry, dict) and str(entry.get("quant_method")).endswith(Fp8Format.name)
