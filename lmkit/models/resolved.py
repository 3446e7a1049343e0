"""A checkpoint, opened and resolved once. Everything that loads, plans or describes it takes this value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lmkit.config import Activations
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.log import get_logger
from lmkit.models.identity import Packing, resolve_activations
from lmkit.models.kv_storage import KVStorage, resolve_storage, table_bytes
from lmkit.models.source import ModelSource, activation_dtype
from lmkit.models.spec import ModelSpec

log = get_logger(__name__)


@dataclass(frozen=True)
class ResolvedModel:
    """An open checkpoint with every choice made from its config.json, the user's options and the device."""

    source: ModelSource
    packing: Packing
    storages: list[KVStorage]  # one for each layer

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec

    @property
    def reader(self) -> CheckpointReader:
        return self.source.reader

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of dense weights."""
        dtype: torch.dtype = getattr(torch, self.packing.dtype)
        return dtype

    @property
    def activation_dtype(self) -> torch.dtype:
        return activation_dtype(self.packing.device, self.dtype)

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights."""
        return self.source.weight_bytes(self.packing.dtype, self.packing.lm_head)

    def table_bytes(self, positions: int) -> int:
        """Bytes that the KV cache needs besides its blocks, for sequences of at most `positions` tokens."""
        return table_bytes(self.spec, self.storages, positions)


@contextmanager
def resolved(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    activations: Activations = "auto",
    lm_head: str = "auto",
    kv_dtype: str = "auto",
    attention_sinks: int = 0,
) -> Iterator[ResolvedModel]:
    """Open a checkpoint; the end of the `with` closes it.

    `dtype` is that of dense weights (see resolve_dtype), and on a GPU that of activations too. `lm_head` int8 quantizes
    the head. `kv_dtype` is a storage type for all layers, or auto (see resolve_storage). The first `attention_sinks`
    tokens stay visible to sliding windows. Raises CheckpointError, UnsupportedError, and ConfigError for sinks of a
    model without windows.
    """
    source = ModelSource(path, attention_sinks=attention_sinks)
    try:
        weight_dtype = resolve_dtype(dtype, source.spec.dtype, device)
        packing = Packing(device, weight_dtype, resolve_activations(activations, device), lm_head)
        yield ResolvedModel(source, packing, resolve_storage(source.reader, source.spec, kv_dtype, weight_dtype))
    finally:
        source.close()


def resolve_dtype(asked: str, stored: str, device: str) -> str:
    """The dtype of dense weights, decided once. `auto` keeps the checkpoint's dtype if the device computes with it.

    A CPU does not multiply float16; it is widened to float32, since bfloat16 would round it. A GPU's kernels take
    float16 and bfloat16. float32 runs through torch there and has to be asked for.
    """
    if device != "cpu":
        if asked == "auto" and stored == "float32":
            log.info("float32 weights become float16; --dtype float32 is slow")
            return "float16"
        return stored if asked == "auto" else asked
    dtype = stored if asked == "auto" else asked
    if dtype == "float16":
        log.info("float16 weights are widened to float32 on the CPU")
        return "float32"
    return dtype
