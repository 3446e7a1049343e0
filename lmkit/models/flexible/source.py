"""A checkpoint whose architecture is no family of lmkit's, opened: transformers' module of it computes the layers."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import WeightFormat, resolve_format
from lmkit.formats.gguf import GgufReader
from lmkit.formats.parts import FLOATS
from lmkit.formats.safetensors_file import DTYPES
from lmkit.models.flexible.checks import checked
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.flexible.module import load_module, outline, read_config
from lmkit.models.flexible.spec import spec_of
from lmkit.models.flexible.trace import FLOAT_BYTES, trace
from lmkit.models.identity import Packing
from lmkit.models.opened import open_checkpoint
from lmkit.models.registry import architecture_of
from lmkit.models.source import ModelSource


class FlexibleSource(ModelSource):
    """See ModelSource. Nothing is read of weights but their headers: a pass on the meta device shows the rest.

    Raises UnsupportedError for an architecture that transformers does not know, needs code of the repository for, or
    cannot compute.
    """

    def __init__(self, path: str | Path, *, attention_sinks: int = 0, rounding: str = "none") -> None:
        """lmkit.conflicts refuses `attention_sinks` and `rounding` to engines."""
        self.reader = open_checkpoint(path)
        self.config = self.reader.config
        architecture = architecture_of(self.config)
        if isinstance(self.reader, GgufReader):
            raise UnsupportedError(f"{self.reader.path}: {architecture}: GGUF files are read for lmkit's own families")
        self.rounding, self.has_head = rounding, True
        self.format: WeightFormat = resolve_format(self.config)
        if self.format.name != "dense":
            raise UnsupportedError(f"{self.reader.path}: {architecture}: {self.format.name} weights have no engine")
        self.hf_config = read_config(self.reader.path, architecture)
        module = outline(self.hf_config, architecture)
        self.num_weights = sum(math.prod(part.shape) for part in module.parameters())
        tied = bool(getattr(module, "all_tied_weights_keys", None))
        self.seen = trace(module, architecture)
        self.spec = spec_of(module, self.seen, self.hf_config, architecture, self._stored_dtype(), tied)
        self.how_attends = self.seen.text
        if not self.seen.calls and not self.seen.cache:
            raise UnsupportedError(f"{architecture}: transformers keeps nothing of a sequence between its tokens")

    def _stored_dtype(self) -> str:
        """The dtype of most dense weights."""
        sizes: dict[str, int] = {}
        for info in (self.reader.info(name) for name in self.reader.names()):
            if info.dtype in FLOATS:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        if not sizes:
            raise CheckpointError(f"{self.reader.path}: it has no weights")
        return str(DTYPES[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")

    def weight_bytes(
        self, dtype: str | None, lm_head: str = "auto", device: str = "cpu", activations: str = "int8"
    ) -> int:
        """Bytes of the loaded module."""
        return FLOAT_BYTES * self.num_weights

    def decoder(self, packing: Packing) -> FlexibleDecoder:
        """The module with its weights, checked against transformers' own attention. Raises UnsupportedError if both
        differ."""
        module = load_module(self.reader.path, self.hf_config, self.spec.architecture, lambda name: None)
        return checked(FlexibleDecoder(self.spec, module, self.seen, packing.device))

    def module(self) -> nn.Module:
        """The module on the meta device, to discover its linears."""
        return outline(self.hf_config, self.spec.architecture)
