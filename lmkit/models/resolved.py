"""A checkpoint, opened and resolved once. Everything that loads, plans or describes it takes this value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from lmkit.config import Activations, ModelImpl
from lmkit.devices import named
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.parts import FLOATS
from lmkit.kv_dtype import KVDtype, dense_kv_dtype
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.log import get_logger
from lmkit.models import roles
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.engines import open_source
from lmkit.models.identity import Packing, resolve_activations
from lmkit.models.kv_storage import KVStorage, resolve_storage, table_bytes
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.opened import coded_scheme, has_planes
from lmkit.models.shard import COLUMNS, WHOLE, Shard
from lmkit.models.source import ModelSource, activation_dtype
from lmkit.models.spec import ModelSpec
from lmkit.models.stage import ALONE, Stage

log = get_logger(__name__)
SPLIT = "split"  # inputs keep 16 bits: see kernels.plane_ops.linear_split


@dataclass(frozen=True)
class ResolvedModel:
    """An open checkpoint with every choice made from its config.json, the user's options and the device.

    All that it gives is the part of `shard`, which is the whole model unless there are several ranks. The loader takes
    the layers of `stage` alone.
    """

    source: ModelSource
    packing: Packing
    storages: list[KVStorage]  # one for each layer
    shard: Shard = WHOLE
    stage: Stage = ALONE

    @cached_property
    def spec(self) -> ModelSpec:
        return self.shard.model(self.source.spec)

    @property
    def reader(self) -> CheckpointReader:
        return self.source.reader

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of dense weights."""
        dtype: torch.dtype = getattr(torch, self.packing.dtype)
        return dtype

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """The dtype that dense weights are read as; None = each as it is stored."""
        return None if self.packing.as_stored else self.dtype

    @property
    def embed_dtype(self) -> torch.dtype:
        """The dtype of embeddings in memory."""
        return self.source.embed_dtype if self.packing.as_stored else self.dtype

    @property
    def shares_head(self) -> bool:
        """Whether the packed head also gives the embeddings, which then have no memory of their own: a whole tied head
        on a CPU, as the checkpoint has it."""
        spec = self.source.spec
        whole = self.shard.size == self.stage.count == 1 and spec.num_logits == spec.vocab_size
        stored = self.packing.lm_head == "stored" or self.source.tied_scheme is not None
        tied = spec.tie_embeddings and not spec.projected and stored
        return named(self.packing.device).shares_head and whole and tied

    @property
    def maps_embeddings(self) -> bool:
        """Whether embeddings are in memory as the checkpoint stores them."""
        return not self.spec.projected and self.embed_dtype is self.source.embed_dtype

    @property
    def activation_dtype(self) -> torch.dtype:
        return activation_dtype(self.packing.device, self.dtype)

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights. Each rank has the whole embedding. If there are stages, those of the largest."""
        how = self.packing
        total = self.source.weight_bytes(None if how.as_stored else how.dtype, how.lm_head, how.device, how.activations)
        if self.spec.foreign:
            return total
        embedding = math.prod(self.spec.head_shape) * self.embed_dtype.itemsize
        head = self.source.head_bytes(self.embed_dtype.itemsize, how.lm_head)
        layers = total - embedding - head
        if self.stage.count > 1:
            first, *others = (self._share(part) for part in self.stage.cut(self.spec))
            return max(int(first * layers) + embedding + head, int(max(others) * layers))
        if self.shard.size > 1:
            share = self.spec.num_weights / self.source.spec.num_weights
            return int(share * layers) + head // self.shard.size + embedding
        return total - embedding if self.shares_head else total

    def _share(self, layers: range) -> float:
        """The share of all weights of linears that lie in these layers."""
        return sum(self.spec.layers[index].num_weights for index in layers) / self.spec.num_weights

    def layer(self, index: int) -> DecoderLayer:
        """A layer with plain weights, on the device."""
        if self.shard.size == 1:
            return self.source.layer(index, self.kept_dtype, self.packing.device)
        spec = self.spec.layers[index]
        weights = self.source.layer_weights(index, self.kept_dtype, spec.linears | spec.routers)
        weights = self.shard.weights(self.source.spec.layers[index], weights)
        return DecoderLayer(spec, index, weights, self.packing.device, self.activation_dtype)

    def check_cut(self) -> None:
        """Raise UnsupportedError if a rank's part of a quantized weight would have cut groups, as `layer` does.

        One weight of each role and kind of layer is read; all experts of a layer count as one.
        """
        found = set[tuple[LayerSpec, str]]()
        for index, layer in enumerate(self.source.spec.layers if self.shard.size > 1 else ()):
            for role in layer.linears:
                module = layer.module_name(index, role)
                kind = layer, "".join(part for part in role if not part.isdigit())
                if kind in found or role.rpartition(".")[2] not in COLUMNS or self._is_dense(module):
                    continue
                found.add(kind)
                self.shard.weights(layer, {role: self.source.format.read_linear(self.reader, module)})

    def _is_dense(self, module: str) -> bool:
        name = module + ".weight"
        return self.reader.has(name) and self.reader.info(name).dtype in FLOATS

    def norms(self, index: int) -> Weights:
        """A layer's vectors by role."""
        return self.shard.weights(self.source.spec.layers[index], self.source.norms(index, self.kept_dtype))

    def lm_head(self) -> MergedLinear:
        """The head as a plain linear."""
        head = self.source.lm_head(self.kept_dtype, self.packing.device, self.packing.lm_head)
        if self.shard.size > 1:
            head.weights[roles.LM_HEAD] = self.shard.rows(head.weights[roles.LM_HEAD], self.head_rows)
        return head

    @property
    def head_activations(self) -> str:
        """How the head's inputs are rounded. On a CPU those of a head that a GGUF file has in codes, or of an INT8 one,
        keep 16 bits, because with 8 the error would be larger than what often lies between the two likeliest tokens."""
        in_codes = self.source.tied_scheme or coded_scheme(self.reader, roles.LM_HEAD + ".weight") is not None
        keeps = (in_codes or self.packing.lm_head == "int8") and named(self.packing.device).exact_coded_heads
        return SPLIT if keeps else self.packing.activations

    @property
    def head_rows(self) -> slice:
        """The tokens whose logits the head computes."""
        return self.shard.part(self.spec.num_logits)

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
    kv_dtype: KVDtype | None = None,
    quantize: str = "none",
    attention_sinks: int = 0,
    model_impl: ModelImpl = "auto",
    shard: Shard = WHOLE,
    stage: Stage = ALONE,
) -> Iterator[ResolvedModel]:
    """Open a checkpoint; the end of the `with` closes it.

    `dtype` is that of dense weights (see resolve_dtype), and on a GPU that of activations too. `lm_head` int8 quantizes
    the head, and auto does what the checkpoint asks for. `kv_dtype` is a storage type for all layers; None: see
    resolve_storage. `quantize` rounds a dense checkpoint's linears (see models.rounding). The first `attention_sinks`
    tokens stay visible to sliding windows.
    Raises CheckpointError, UnsupportedError, and ConfigError for sinks of a model without windows or for `quantize` of
    weights that are quantized already. Inputs of a GGUF file's linears keep 16 bits on a CPU if some are in planes,
    unless `activations` say otherwise: publishers made it for products with exact inputs, and one row costs no more.
    `shard` takes one rank's part of everything, `stage` some layers.
    """
    source = open_source(path, model_impl, attention_sinks=attention_sinks, rounding=quantize)
    if not named(device).chooses_keys:
        source.spec = source.spec.whole()
    try:
        weight_dtype = resolve_dtype(dtype, source.spec.dtype, device)
        asked: str = resolve_activations(activations, device)
        whole = not any(layer.is_sparse for layer in source.spec.kinds)  # kernels of many experts round to 8 bits
        if activations == "auto" and named(device).exact_coded_heads and whole and has_planes(source.reader):
            asked = SPLIT
        as_stored = (dtype, weight_dtype) == ("auto", "float16") and not named(device).half_activations
        if as_stored:
            source.reader.narrow()
        head = source.asked_head if lm_head == "auto" else lm_head
        packing = Packing(device, weight_dtype, asked, head, shard.rank, shard.tp, shard.ep, quantize, as_stored)
        dense = weight_dtype if source.spec.reusable else "float32"  # that of transformers' caches
        storages = resolve_storage(source.reader, source.spec, kv_dtype, dense_kv_dtype(dense))
        heads = [layer.num_kv_heads for layer in source.spec.layers]
        storages = [shard.storage(storage, count) for storage, count in zip(storages, heads, strict=True)]
        yield ResolvedModel(source, packing, storages, shard, stage)
    finally:
        source.close()


def resolve_dtype(asked: str, stored: str, device: str) -> str:
    """The dtype of dense weights, decided once. `auto` keeps the checkpoint's dtype if the device computes with it.

    A CPU's kernels take all three, and multiply exact values. In a float16 checkpoint some weights may have another
    dtype, which they keep there: float16 would round them. A GPU's kernels take float16 and bfloat16. float32 runs
    through torch there and has to be asked for.
    """
    if named(device).half_activations and asked == "auto" and stored == "float32":
        log.info("float32 weights become float16; --dtype float32 is slow")
        return "float16"
    return stored if asked == "auto" else asked
