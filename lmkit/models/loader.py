"""From a resolved checkpoint to a decoder that serves. Linears are packed for a kernel, or mapped from the cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmkit.devices import named
from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.safetensors_file import read_single_pages
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.blocks.base import Shape
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.log import get_logger
from lmkit.models import roles
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.engines import foreign_decoder
from lmkit.models.packed_cache import PackedCache, PackedFile, PackedWriter, kinds_of
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.models.stream_plan import Streaming
from lmkit.models.streamed import StreamedFile

log = get_logger(__name__)


def load_model(path: str | Path, *, packed_cache: bool = False, **options: Any) -> Decoder:
    """Resolve a checkpoint and `load` it. `options` are those of `resolved`."""
    with resolved(path, **options) as model:
        return load(model, packed_cache=packed_cache)


Check = Callable[[PackedFile], None]
Stored = PackedFile | StreamedFile


def load(
    model: ResolvedModel,
    *,
    packed_cache: bool = False,
    check: Check = PackedFile.check,
    streaming: Streaming | None = None,
) -> Decoder:
    """A decoder ready to serve. Every linear is packed for the kernel that its format and this machine select.

    `packed_cache` keeps packed weights in a file and maps it (see packed_cache.py). Without it they are packed into
    memory. `check` gets the mapped file, and raises CheckpointError if its data is damaged. Embeddings are the rows of
    a head that is tied to them, or else mapped from the checkpoint if they keep its dtype. With `streaming` some layers
    are read from the file in every step, see streamed.py. Raises ConfigError too if that is not possible.
    """
    if model.spec.foreign:
        return foreign_decoder(model.source, model.packing)
    try:
        if streaming is not None:
            return _load_streamed(model, streaming)
        decoder = _load_cached(model, check) if packed_cache else None
        return decoder or _load(model)
    finally:
        if named(model.packing.device).own_memory:  # the host keeps no weights
            trim_heap()


def _load_cached(model: ResolvedModel, check: Check) -> Decoder | None:
    """Load through the cache file and write it if it is missing. None if that is not possible."""
    cache = PackedCache(model)
    decoder = _load_mapped(model, cache, check)
    if decoder is not None:
        return decoder
    if reason := _pack(model, cache):
        log.warning("weights are packed at every start, because they cannot be cached: %s", reason)
        return None
    return _load_mapped(model, cache, check)


def _load_streamed(model: ResolvedModel, streaming: Streaming) -> Decoder:
    cache = PackedCache(model, streaming.folder)
    decoder = _load_mapped(model, cache, StreamedFile.check, streaming)
    if decoder is None:
        if reason := _pack(model, cache):
            raise ConfigError(f"weights_memory needs a file of packed weights: {reason}; choose another weights_path")
        decoder = _load_mapped(model, cache, StreamedFile.check, streaming)
    if decoder is None:
        raise CheckpointError(f"{model.reader.path}: its packed weights cannot be read back, see the line above")
    return decoder


def _pack(model: ResolvedModel, cache: PackedCache) -> str:
    """Write the cache file. Returns the reason if that is not possible, or an empty text."""
    reason = cache.create(lambda writer: _write(model, writer), model.weight_bytes())
    trim_heap()
    return reason


def trim_heap() -> None:
    """Return the memory that packing freed. glibc would keep it: a third of a small model's weights."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _load_mapped(
    model: ResolvedModel, cache: PackedCache, check: Callable[[Any], None], streaming: Streaming | None = None
) -> Decoder | None:
    """A decoder of the file's tensors. None if there is no file, or if the file does not fit."""
    opened = cache.open()
    if opened is None:
        return None
    device, at = model.packing.device, tensor_device(model.packing.device)
    try:
        if streaming is None:
            opened.read_ahead()
        file = opened if streaming is None else StreamedFile(opened, streaming, model)
        layers = []
        for index in model.stage.layers(model.spec):
            spec = model.spec.layers[index]
            norms: Weights = {role: norm.to(at) for role, norm in model.norms(index).items()}
            kind = file.layer_type(index) if isinstance(file, StreamedFile) else DecoderLayer
            layer = kind(spec, index, norms, device, model.activation_dtype)
            shapes = spec.linears | spec.routers
            for linear in layer.linears:
                biases = [spec.has_bias(role) for role in linear.roles]
                _map_linear(model, file, linear, index, [shapes[role] for role in linear.roles], biases)
            if isinstance(file, StreamedFile):
                file.stream(layer)
            layers.append(layer)
        lm_head = MergedLinear((roles.LM_HEAD,), {}, device)
        rows = model.head_rows
        head_shape = rows.stop - rows.start, model.spec.hidden_size
        _map_linear(model, file, lm_head, model.spec.num_layers, [head_shape], [False])
        decoder = decoder_of(model, layers, lm_head, file)
        check(file)
        return decoder
    except (CheckpointError, UnsupportedError, LookupError) as error:
        cache.reject(opened.path, error)
        return None


def _map_linear(
    model: ResolvedModel, file: Stored, linear: MergedLinear, index: int, shapes: list[Shape], biases: list[bool]
) -> None:
    """Give a linear the file's tensors. `index` is its layer, num_layers for the head. Raises LookupError too."""
    kinds = [file.kinds[index][role] for role in linear.roles]
    activations = model.head_activations if index == model.spec.num_layers else model.packing.activations
    linear.pack_outline(activations, kinds, shapes, biases)
    at = tensor_device(model.packing.device)
    linear.replace_packed(f"layers.{index}", lambda name, outline: file.take(name, outline).to(at))


def _write(model: ResolvedModel, writer: PackedWriter) -> None:
    """Pack one linear at a time into the file. Memory has one packed linear, and the plain weights of one layer, which
    are mapped if they are dense."""
    for index in range(model.spec.num_layers):
        layer = model.layer(index)
        writer.kinds.append(kinds_of(layer.weights))
        layer.pack(model.packing.activations, partial(_keep, writer, index))
        model.reader.release()
        trim_heap()
    lm_head = model.lm_head()
    writer.kinds.append(kinds_of(lm_head.weights))
    lm_head.pack(model.head_activations)
    _keep(writer, model.spec.num_layers, lm_head)
    if not (model.shares_head or model.maps_embeddings):
        writer.keep(roles.EMBED, model.source.embed_tokens(model.kept_dtype))


def _keep(writer: PackedWriter, index: int, linear: MergedLinear) -> None:
    """Write a packed linear, and empty it."""
    linear.replace_packed(f"layers.{index}", writer.keep)
    linear.packed = None


def _load(model: ResolvedModel) -> Decoder:
    """Pack every linear into memory."""
    layers = list(_packed_layers(model))
    lm_head = model.lm_head()
    lm_head.pack(model.head_activations)
    to_device((lm_head,), model.packing.device)
    return decoder_of(model, layers, lm_head)


def to_device(linears: Iterable[MergedLinear], device: str) -> None:
    """Move the tensors that a kernel's `pack` may have left on the host."""
    if named(device).own_memory:
        for linear in linears:
            linear.replace_packed("", lambda _, tensor: tensor.to(tensor_device(device)))


def _packed_layers(model: ResolvedModel) -> Iterator[DecoderLayer]:
    for index in model.stage.layers(model.spec):
        layer = model.layer(index)
        layer.pack(model.packing.activations)
        to_device(layer.linears, model.packing.device)
        model.reader.release()
        yield layer


def decoder_of(
    model: ResolvedModel, layers: list[DecoderLayer], lm_head: MergedLinear, file: Stored | None = None
) -> Decoder:
    """The decoder. Embeddings are a tied head's rows, or the checkpoint's if it stores them in the wanted dtype, or
    those of `file`."""
    source = model.source
    embed: torch.Tensor | MergedLinear
    if model.shares_head:
        embed = lm_head
    elif file is not None and not model.maps_embeddings:
        embed = file.take(roles.EMBED, torch.empty(model.spec.head_shape, dtype=model.embed_dtype, device="meta"))
    else:
        embed = source.embed_tokens(model.kept_dtype)
        if isinstance(file, StreamedFile):
            read_single_pages(embed)
        embed = embed.to(tensor_device(model.packing.device))
    source.reader.release()
    at = tensor_device(model.packing.device)
    norm = source.final_norm()
    final_norm = None if norm is None else norm.clone().to(at)
    plain = {"final_bias": source.final_bias(), "positions": source.positions()}
    extras: dict[str, Any] = {name: None if tensor is None else tensor.to(at) for name, tensor in plain.items()}
    extras["per_layer"], extras["embed_norm"] = source.per_layer(model.kept_dtype, at), source.embed_norm(at)
    return Decoder(model.spec, embed, layers, final_norm, lm_head, model.activation_dtype, **extras)
