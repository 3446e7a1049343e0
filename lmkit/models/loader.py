"""From a checkpoint to a decoder, one piece at a time: calibration holds a single layer, serving all of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.config import Activations
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import WeightFormat, resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.parts import FLOATS
from lmkit.formats.safetensors_file import DTYPES
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.log import get_logger
from lmkit.models import load_spec, roles
from lmkit.models.decoder import Decoder, DecoderLayer
from lmkit.models.identity import Packing, resolve_activations
from lmkit.models.packed_cache import PackedCache, PackedFile, PackedWriter, kinds_of
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor, QuantScheme, quantize

log = get_logger(__name__)

HEAD_SCHEME = QuantScheme(bits=8, group_size=128)  # of lm_head int8
QUANTIZED_ROWS = 2048
SCALES = (".scales", ".weight_scale", ".weight_scale_inv", ".input_scale")


class ModelSource:
    """An open checkpoint: its specification, weight format and pieces. Raises CheckpointError/UnsupportedError."""

    def __init__(self, path: str | Path) -> None:
        self.reader = CheckpointReader(path)
        self.config: dict[str, Any] = self.reader.config
        self.spec: ModelSpec = load_spec(self.config)
        self.format: WeightFormat = resolve_format(self.config)
        self._check_names()

    def _check_names(self) -> None:
        """Every weight the specification needs is there, in its shape, before anything is read."""
        spec, reader = self.spec, self.reader
        dense = {roles.EMBED: (spec.vocab_size, spec.hidden_size), roles.FINAL_NORM: (spec.hidden_size,)}
        for layer in range(spec.num_layers):
            for role, size in self._vectors():
                dense[roles.module_name(spec, layer, role)] = (size,)
            fused = roles.layer_prefix(layer) + "mlp.experts.gate_up_proj"
            if reader.has(fused):
                raise UnsupportedError(
                    f"{reader.path}: {fused} holds all experts of a layer; save the checkpoint with a tensor for each "
                    "(transformers: save_pretrained with save_original_format=True, its default)"
                )
        for module, shape in dense.items():
            name = module + ".weight"
            if not reader.has(name):
                raise CheckpointError(f"{reader.path}: tensor {name} is missing")
            if reader.info(name).shape != shape:
                raise CheckpointError(
                    f"{reader.path}: {name} is {list(reader.info(name).shape)}, config.json says {list(shape)}"
                )

    def _vectors(self) -> list[tuple[str, int]]:
        spec = self.spec
        vectors = [("norm.attn", spec.hidden_size), ("norm.mlp", spec.hidden_size)]
        return vectors + ([("attn.q_norm", spec.head_dim), ("attn.k_norm", spec.head_dim)] if spec.qk_norm else [])

    def layer_weights(self, index: int, dtype: torch.dtype | None = None) -> Weights:
        """All weights of a layer by role; dense ones as `dtype` (None = as stored)."""
        weights: Weights = {}
        for role, _ in self._vectors():
            weights[role] = self._plain(roles.module_name(self.spec, index, role) + ".weight", dtype)
        for role in (*roles.linears(self.spec, index), *roles.routers(self.spec, index)):
            module, (out_features, in_features) = (
                roles.module_name(self.spec, index, role),
                self.spec.linear_shape(role),
            )
            weight = self.format.read_linear(self.reader, module)
            shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
            if shape != (out_features, in_features):
                raise CheckpointError(
                    f"{self.reader.path}: {module} is {list(shape)}, config.json says {[out_features, in_features]}"
                )
            weights[role] = weight if isinstance(weight, QTensor) else _to(weight, dtype)
            if self.spec.has_bias(role):
                weights[role + ".bias"] = self._plain(module + ".bias", dtype)
            elif self.reader.has(module + ".bias"):
                raise CheckpointError(f"{self.reader.path}: {module}.bias is there, but config.json says there is none")
        return weights

    def layer(self, index: int, dtype: torch.dtype | None = None, device: str = "cpu") -> DecoderLayer:
        """A layer with plain weights, as calibration wants it."""
        at, weights = tensor_device(device), self.layer_weights(index, dtype)
        weights = {role: weight.to(at) for role, weight in weights.items()}
        return DecoderLayer(self.spec, index, weights, device, activation_dtype(device, dtype))

    def norms(self, index: int, dtype: torch.dtype | None = None) -> Weights:
        """A layer's vectors by role, all its weights but linears: as `layer_weights` has them, in float32."""
        names = {role: roles.module_name(self.spec, index, role) + ".weight" for role, _ in self._vectors()}
        return {role: self._plain(name, dtype).float().clone() for role, name in names.items()}

    def linear_shape(self, role: str) -> tuple[int, int]:
        """[out, in] of a linear of a layer, or of the head."""
        if role == roles.LM_HEAD:
            return self.spec.vocab_size, self.spec.hidden_size
        return self.spec.linear_shape(role)

    def stores(self, module: str, dtype: str) -> bool:
        """Whether the checkpoint has the module's weight in that dtype already."""
        return DTYPES[self.reader.info(module + ".weight").dtype] is getattr(torch, dtype)

    def embed_tokens(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain(roles.EMBED + ".weight", dtype)

    def final_norm(self) -> Tensor:
        return self._plain(roles.FINAL_NORM + ".weight", torch.float32)

    def lm_head(self, dtype: torch.dtype | None = None, device: str = "cpu", storage: str = "auto") -> MergedLinear:
        """The head as a plain linear; a checkpoint with tied embeddings has none of its own.

        `storage` int8 quantizes it to HEAD_SCHEME, unless the checkpoint has it quantized already.
        """
        weight = self._head(dtype)
        shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
        if shape != (self.spec.vocab_size, self.spec.hidden_size):
            raise CheckpointError(f"{self.reader.path}: the head is {list(shape)}, not [vocab, hidden]")
        head = weight.to(tensor_device(device))
        if storage == "int8" and not isinstance(head, QTensor):
            head = quantize_rows(head, HEAD_SCHEME)
        return MergedLinear((roles.LM_HEAD,), {roles.LM_HEAD: head}, device)

    def _head(self, dtype: torch.dtype | None) -> Tensor | QTensor:
        if self.spec.tie_embeddings:
            return self.embed_tokens(dtype)
        if not any(self.reader.has(f"{roles.LM_HEAD}.{part}") for part in ("weight", "weight_packed")):
            raise CheckpointError(
                f"{self.reader.path}: tensor {roles.LM_HEAD}.weight is missing and tie_word_embeddings is false"
            )
        weight = self.format.read_linear(self.reader, roles.LM_HEAD)
        return weight if isinstance(weight, QTensor) else _to(weight, dtype)

    def head(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Decoder:
        """A decoder without layers: `embed` and `head` work, plainly."""
        embed = self.embed_tokens(dtype).to(device)
        return Decoder(self.spec, embed, [], self.final_norm().to(device), self.lm_head(dtype, device))

    def _plain(self, name: str, dtype: torch.dtype | None) -> Tensor:
        if not self.reader.has(name):
            raise CheckpointError(f"{self.reader.path}: tensor {name} is missing")
        if (stored := self.reader.info(name).dtype) not in FLOATS:
            raise CheckpointError(f"{self.reader.path}: {name} is {stored}, expected {', '.join(FLOATS)}")
        return _to(self.reader.tensor(name), dtype)

    def weight_bytes(self, dtype: str, lm_head: str = "auto") -> int:
        """What the model takes in memory with dense weights as `dtype`: a tied head is a second, packed copy."""
        dense = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        total = 0
        for name in self.reader.names():
            info = self.reader.info(name)
            floating = info.dtype in FLOATS and not name.endswith(SCALES)
            total += math.prod(info.shape) * dense if floating else info.nbytes
        head = self.spec.vocab_size * self.spec.hidden_size
        if self.spec.tie_embeddings:
            total += head * dense
        if lm_head == "int8":  # a byte a weight, and for each group a float16 scale and a zero
            total += head - head * dense + 3 * self.spec.vocab_size * HEAD_SCHEME.num_groups(self.spec.hidden_size)
        return total

    def close(self) -> None:
        self.reader.close()


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    activations: Activations = "auto",
    lm_head: str = "auto",
    packed_cache: bool = False,
    attention_sinks: int = 0,
) -> Decoder:
    """A decoder ready to serve: every linear packed for the kernel that its format and this machine select.

    `dtype` of dense weights: see resolve_dtype. On a GPU it is that of activations too, see activation_dtype.
    `lm_head` int8 quantizes the head. `packed_cache` keeps
    packed weights in a file and maps it, see packed_cache.py; without it they are packed into memory. Embeddings are
    mapped from the checkpoint where they keep its dtype. `attention_sinks` of the first tokens stay visible to sliding
    windows; ConfigError for a model without any.
    """
    source = ModelSource(path)
    try:
        source.spec = source.spec.with_sinks(attention_sinks)
        weight_dtype = resolve_dtype(dtype, source.spec.dtype, device)
        packing = Packing(device, weight_dtype, resolve_activations(activations, device), lm_head)
        decoder = _load_cached(source, packing) if packed_cache else None
        return decoder or _load(source, packing)
    finally:
        if device != "cpu":  # nothing of the weights stays on the host
            trim_heap()
        source.close()


def _load_cached(source: ModelSource, packing: Packing) -> Decoder | None:
    """Through the cache file, which is written if it is not there; None if that is not possible."""
    cache = PackedCache(source.reader, packing)
    decoder = _load_mapped(source, packing, cache)
    num_bytes = source.weight_bytes(packing.dtype, packing.lm_head)
    if decoder is None and cache.create(lambda writer: _write(source, packing, writer), num_bytes):
        decoder = _load_mapped(source, packing, cache)
        trim_heap()
    return decoder


def trim_heap() -> None:
    """Give back what packing freed: glibc would keep it, a third of a small model's weights."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _load_mapped(source: ModelSource, packing: Packing, cache: PackedCache) -> Decoder | None:
    """Every linear with the file's tensors; None if there is no file, or one that does not fit."""
    file = cache.open()
    if file is None:
        return None
    device, dtype, at = packing.device, _dtype(packing), tensor_device(packing.device)
    try:
        layers = []
        for index in range(source.spec.num_layers):
            norms: Weights = {role: norm.to(at) for role, norm in source.norms(index, dtype).items()}
            layer = DecoderLayer(source.spec, index, norms, device, activation_dtype(device, dtype))
            for linear in layer.linears:
                _map_linear(source, packing, file, linear, index)
            layers.append(layer)
        lm_head = MergedLinear((roles.LM_HEAD,), {}, packing.device)
        _map_linear(source, packing, file, lm_head, source.spec.num_layers)
        return _decoder(source, packing, layers, lm_head, file)
    except (CheckpointError, UnsupportedError, LookupError) as error:
        cache.reject(file.path, error)
        return None


def _map_linear(source: ModelSource, packing: Packing, file: PackedFile, linear: MergedLinear, index: int) -> None:
    """Give a linear the file's tensors; `index` of its layer, num_layers for the head. Raises LookupError too."""
    kinds = [file.kinds[index][role] for role in linear.roles]
    shapes = [source.linear_shape(role) for role in linear.roles]
    biases = [role != roles.LM_HEAD and source.spec.has_bias(role) for role in linear.roles]
    linear.pack_outline(packing.activations, kinds, shapes, biases)
    at = tensor_device(packing.device)
    linear.replace_packed(f"layers.{index}", lambda name, outline: file.take(name, outline).to(at))


def _write(source: ModelSource, packing: Packing, writer: PackedWriter) -> None:
    """Pack one layer at a time into the file; no more than that is in memory."""
    for layer in _packed_layers(source, packing, writer):
        for linear in layer.linears:
            linear.replace_packed(f"layers.{layer.index}", writer.keep)
    lm_head = source.lm_head(_dtype(packing), packing.device, packing.lm_head)
    writer.kinds.append(kinds_of(lm_head.weights))
    lm_head.pack(packing.activations)
    lm_head.replace_packed(f"layers.{source.spec.num_layers}", writer.keep)
    if not source.stores(roles.EMBED, packing.dtype):
        writer.keep(roles.EMBED, source.embed_tokens(_dtype(packing)))


def _load(source: ModelSource, packing: Packing) -> Decoder:
    """Into memory."""
    layers = list(_packed_layers(source, packing))
    lm_head = source.lm_head(_dtype(packing), packing.device, packing.lm_head)
    lm_head.pack(packing.activations)
    _to_device((lm_head,), packing.device)
    return _decoder(source, packing, layers, lm_head)


def _to_device(linears: Iterable[MergedLinear], device: str) -> None:
    """What a kernel's `pack` may have left on the host."""
    if device != "cpu":
        for linear in linears:
            linear.replace_packed("", lambda _, tensor: tensor.to(tensor_device(device)))


def _packed_layers(source: ModelSource, packing: Packing, writer: PackedWriter | None = None) -> Iterator[DecoderLayer]:
    for index in range(source.spec.num_layers):
        layer = source.layer(index, _dtype(packing), packing.device)
        if writer is not None:
            writer.kinds.append(kinds_of(layer.weights))
        layer.pack(packing.activations)
        _to_device(layer.linears, packing.device)
        source.reader.release()
        yield layer


def _decoder(
    source: ModelSource,
    packing: Packing,
    layers: list[DecoderLayer],
    lm_head: MergedLinear,
    file: PackedFile | None = None,
) -> Decoder:
    """With embeddings from the checkpoint if it stores them as they are wanted, else from the cache file."""
    if file is not None and not source.stores(roles.EMBED, packing.dtype):
        shape = source.linear_shape(roles.LM_HEAD)
        embed = file.take(roles.EMBED, torch.empty(shape, dtype=_dtype(packing), device="meta"))
    else:
        embed = source.embed_tokens(_dtype(packing))
    source.reader.release()
    at = tensor_device(packing.device)
    final_norm = source.final_norm().clone().to(at)
    dtype = activation_dtype(packing.device, _dtype(packing))
    return Decoder(source.spec, embed.to(at), layers, final_norm, lm_head, dtype)


def _dtype(packing: Packing) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, packing.dtype)
    return dtype


def quantize_rows(weight: Tensor, scheme: QuantScheme) -> QTensor:
    """`quantize`, some rows at a time: float32 copies of a whole head would take many times its memory."""
    parts = [quantize(rows, scheme) for rows in weight.split(QUANTIZED_ROWS)]
    codes, scales, zeros = (torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "scales", "zeros"))
    return QTensor(codes, scales, zeros, scheme)


def resolve_dtype(asked: str, stored: str, device: str) -> str:
    """The dtype of dense weights, decided once. `auto` keeps the checkpoint's as far as the device computes with it.

    A CPU multiplies no float16, which is widened to float32 (bfloat16 would round it). A GPU's kernels take float16 and
    bfloat16; float32, which runs through torch, has to be asked for.
    """
    if device != "cpu":
        if asked == "auto" and stored == "float32":
            log.info("float32 weights are rounded to float16 on a GPU; --dtype float32 keeps them, and is slow")
            return "float16"
        return stored if asked == "auto" else asked
    dtype = stored if asked == "auto" else asked
    if dtype == "float16":
        log.info("float16 weights are widened to float32 on the CPU")
        return "float32"
    return dtype


def activation_dtype(device: str, dtype: torch.dtype | None) -> torch.dtype:
    """Of what linears and attention pass on: float32 on a CPU, on a GPU that of the dense weights."""
    return torch.float32 if device == "cpu" or dtype is None else dtype


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
