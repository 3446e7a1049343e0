"""How each layer's KV cache is stored. The user's choice and the checkpoint decide it; `allocate` makes the blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, load_kv_config
from lmkit.formats.kv_scheme import KVScheme, parse_kv_scheme
from lmkit.kernels import ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kv_dtype import KVDtype
from lmkit.layers.batch import KVLayer, allocate_memory, allocate_state
from lmkit.layers.rope import Rope
from lmkit.layers.rope_spec import RopeSpec
from lmkit.log import get_logger
from lmkit.models.kv_layout import KVLayout
from lmkit.models.kv_transform import PLAIN, KVTransform
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

log = get_logger(__name__)

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-14, 65504 / 128  # in float16, so that a minimum of -128 scales is finite


@dataclass(frozen=True)
class KVStorage:
    """The storage of one layer. Scales by head, or none: then each token has its own."""

    k: KVDtype
    v: KVDtype
    transform: KVTransform = PLAIN
    k_scales: tuple[float, ...] = ()
    v_scales: tuple[float, ...] = ()

    @property
    def dtypes(self) -> tuple[KVDtype, KVDtype]:
        return self.k, self.v


def storage_text(storages: Sequence[KVStorage]) -> str:
    """The storage types of all layers in words: `int8`, or `int8/int4` if keys and values differ."""
    return " ".join(sorted({str(s.k) if s.k == s.v else f"{s.k}/{s.v}" for s in storages}))


def is_uncalibrated(spec: ModelSpec, storages: Sequence[KVStorage]) -> bool:
    """Whether a layer has keys that need a calibration and have had none."""
    plain = (s.k.needs_calibration and s.transform == PLAIN for s in storages)
    return any(p and layer.kv is not None and not layer.kv.shared for p, layer in zip(plain, spec.layers, strict=True))


def resolve_storage(
    reader: CheckpointReader, spec: ModelSpec, given: KVDtype | None, dense: KVDtype
) -> list[KVStorage]:
    """Each layer's storage. `given` is asked for, for all layers; None: the checkpoint's kv_config.json, else its
    kv_cache_scheme, else `dense`.

    A type that is asked for keeps the kv_config.json's treatment of keys, if keys become codes in it. Raises
    CheckpointError for files that cannot be honoured.
    """
    config = load_kv_config(reader.path)
    is_described = config is not None or (given is None and parse_kv_scheme(reader.config) is not None)
    if is_described and any(layer.kv is not None and layer.kv.shared for layer in spec.kinds):
        raise UnsupportedError(
            f"{reader.path}: kv_config.json and kv_cache_scheme are not for latent attention; remove them"
        )
    if is_described and not spec.has_kv:
        raise UnsupportedError(
            f"{reader.path}: kv_config.json and kv_cache_scheme are for keys and values, which this model does not have"
        )
    if config is not None:
        for kv in {layer.kv for layer in spec.kinds if layer.kv is not None}:
            config.check(spec.num_layers, kv.num_heads, kv.head_dim)
        of_layers = enumerate(spec.layers)
        return _filled(spec, [_configured(config, layer, index, dense, given) for index, layer in of_layers])
    scheme = parse_kv_scheme(reader.config) if given is None else None
    if scheme is not None:
        attending = {i: _fixed(reader, spec, scheme, i) for i, layer in enumerate(spec.layers) if layer.kv}
        return _filled(spec, [attending.get(i, next(iter(attending.values()))) for i in range(spec.num_layers)])
    dtype = given or dense
    for dim in {layer.kv.head_dim for layer in spec.kinds if layer.kv is not None}:
        if dim % dtype.unit:
            raise UnsupportedError(f"kv_dtype {dtype.needs_of_rows}, and {reader.path} has {dim}")
    return [KVStorage(dtype, dtype)] * spec.num_layers


def _filled(spec: ModelSpec, storages: list[KVStorage]) -> list[KVStorage]:
    """Storages where layers that store no keys and values have the types of the first other."""
    first = next(storage for layer, storage in zip(spec.layers, storages, strict=True) if layer.kv)
    plain = KVStorage(first.k, first.v)
    return [storage if layer.kv else plain for layer, storage in zip(spec.layers, storages, strict=True)]


def _configured(config: KVConfig, spec: LayerSpec, index: int, dense: KVDtype, given: KVDtype | None) -> KVStorage:
    layer = config.layers[index]
    k, v = config.dtypes(index, dense) if given is None else (given, given)
    if k.coded and (problem := mean_problem(spec, layer)):
        raise CheckpointError(f"kv_config.json: layer {index}: key_mean: {problem}")
    return KVStorage(k, v, KVTransform.of(layer, keys=k.coded, values=v.coded))


def mean_problem(spec: LayerSpec, layer: KVLayerConfig) -> str | None:
    """Why this model's keys cannot be stored without their mean, or None."""
    pairs = [pair for of_head in layer.key_mean for pair, _, _ in of_head]
    if pairs and spec.rope.by_length:
        return "angles depend on the length of the prompt"
    if pairs and spec.rope.sections:
        return "angles depend on the places of images"
    if max(pairs, default=-1) >= spec.rope.rotary_dim // 2:
        return f"pair {max(pairs)} does not turn, RoPE has {spec.rope.rotary_dim // 2} pairs"
    return None


def _fixed(reader: CheckpointReader, spec: ModelSpec, scheme: KVScheme, layer: int) -> KVStorage:
    if scheme.dynamic:
        return KVStorage(scheme.dtype, scheme.dtype)
    k, v = (_scales(reader, spec, scheme, layer, name) for name in ("k_scale", "v_scale"))
    return KVStorage(scheme.dtype, scheme.dtype, k_scales=k, v_scales=v)


def scale_name(spec: ModelSpec, layer: int, which: str) -> str:
    """`k_scale` of layer 3 -> model.layers.3.self_attn.k_scale."""
    return spec.module_name(layer, "attn.k").rpartition(".")[0] + "." + which


def _scales(reader: CheckpointReader, spec: ModelSpec, scheme: KVScheme, layer: int, which: str) -> tuple[float, ...]:
    """One float16 number for each head."""
    name = scale_name(spec, layer, which)
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: config.json has a kv_cache_scheme, but tensor {name} is missing")
    num_heads = spec.layers[layer].num_kv_heads
    count = 1 if scheme.strategy == "tensor" else num_heads
    if math.prod(reader.info(name).shape) != count:
        raise CheckpointError(f"{reader.path}: {name} is {list(reader.info(name).shape)}, expected {count} numbers")
    scales = reader.tensor(name).float().flatten()
    if not bool(((scales >= SMALLEST_SCALE) & (scales <= LARGEST_SCALE)).all()):
        raise CheckpointError(f"{reader.path}: {name} is not within {SMALLEST_SCALE} .. {LARGEST_SCALE}")
    return tuple(scales.half().float().expand(num_heads).tolist())


def table_bytes(spec: ModelSpec, storages: list[KVStorage], positions: int) -> int:
    """Bytes of the angle tables that key means need, and of the matrices of keys and queries."""
    tables = sum(4 * rope.rotary_dim * positions for rope in _ropes_of_means(spec.layers, storages))
    return tables + sum(storage.transform.num_bytes() for storage in storages)


def _ropes_of_means(layers: Sequence[LayerSpec], storages: list[KVStorage]) -> dict[RopeSpec, None]:
    """The rotary embeddings of layers whose keys are stored without their mean."""
    return {layer.rope: None for layer, storage in zip(layers, storages, strict=True) if storage.transform.has_mean}


def allocate(
    layers: Sequence[LayerSpec],
    storages: list[KVStorage],
    num_blocks: int,
    block_size: int,
    positions: int,
    device: str = "cpu",
    layout: KVLayout | None = None,
    num_states: int = 16,
    num_draft_tokens: tuple[int, int] = (0, 0),
) -> list[KVLayer]:
    """Zeroed blocks for every layer, for sequences of at most `positions` tokens. The system provides zeroed pages only
    when they are first written. Groups of `layout` share their tensors; without it every layer has its own.
    Recurrent layers have no blocks, but states of `num_states` sequences, and room for `num_draft_tokens` of them (see
    allocate_states)."""
    tables = {rope: _angles(rope, positions, device) for rope in _ropes_of_means(layers, storages)}
    places = [(0, i) for i in range(len(layers))] if layout is None else layout.places()
    at, plain = tensor_device(device), dict[int, KVLayer]()
    for layer, storage, (_, place) in zip(layers, storages, places, strict=True):
        if place not in plain and (layer.kv is None or layer.kv.source is None):
            plain[place] = allocate_state(
                layer.state, num_blocks, block_size, storage.dtypes, num_states, num_draft_tokens, at
            )
    found = list[KVLayer]()
    for layer, storage, (group, place) in zip(layers, storages, places, strict=True):
        if layer.memory is not None:
            own = allocate_memory(layer.memory, num_states, block_size, storage.dtypes, at)
            plain[place] = replace(plain[place], memory=own)
        if layer.kv is None:
            found.append(replace(plain[place], group=group))
        elif layer.kv.source is not None:
            found.append(found[layer.kv.source])
        else:
            found.append(_layer(layer, storage, replace(plain[place], group=group), tables.get(layer.rope)))
    return found


def _layer(spec: LayerSpec, storage: KVStorage, plain: KVLayer, table: Tensor | None) -> KVLayer:
    k, v = storage.transform.keys(spec, plain.k, table), storage.transform.values(plain.v)
    k_scales, v_scales = (_vector(numbers, k.data.device) for numbers in (storage.k_scales, storage.v_scales))
    return replace(plain, k=replace(k, scales=k_scales), v=replace(v, scales=v_scales))


def _vector(numbers: tuple[float, ...], device: torch.device) -> Tensor | None:
    return torch.tensor(numbers, device=device) if numbers else None


def _angles(spec: RopeSpec, positions: int, device: str) -> Tensor:
    """float32 [R/2, 2, positions]: the same cosines and sines, bit for bit, that rotate keys."""
    rope = Rope(spec, device)
    angles = ops.rope_angles.select(device)
    every = torch.arange(positions, dtype=torch.int32, device=tensor_device(device))
    cos, sin = angles(every, rope.inv_freq, rope.magnitude)
    return torch.stack([cos.T, sin.T], dim=1).contiguous()
