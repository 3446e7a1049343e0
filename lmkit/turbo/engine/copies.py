"""Copies of packed weights in 16 bits on a GPU (LMKIT_CUDA=copies=on). The library multiplies them with many tokens, so
that no call dequantizes the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lmkit.config import EngineConfig
from lmkit.kernels.cuda.gemm_pack import PackedWeight, dequantize
from lmkit.kernels.cuda.module import HALVES
from lmkit.kernels.cuda.switches import switches
from lmkit.layers.linear import MergedLinear
from lmkit.models.decoder import Decoder
from lmkit.models.resolved import ResolvedModel

EXPERTS = "mlp.experts."  # roles of weights without copies: many experts share a step's tokens


def planned_bytes(model: ResolvedModel, config: EngineConfig) -> int:
    """Bytes of the copies that an engine will try to keep."""
    return possible_bytes(model, config) if switches().copies else 0


def possible_bytes(model: ResolvedModel, config: EngineConfig) -> int:
    """Bytes of the copies that a checkpoint's weights can have, at most. Adapters need the packed weights alone."""
    adapts = config.adapter_folders or config.adapter_root is not None
    quantized = model.source.format.name != "dense" or config.quantize != "none"
    if not _possible(config) or adapts or not quantized or model.activation_dtype not in HALVES:
        return 0
    shapes = [
        shape for layer in model.spec.layers for role, shape in layer.linears.items() if not role.startswith(EXPERTS)
    ]
    return 2 * sum(map(math.prod, shapes))


def bytes_of(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes of the copies that a loaded decoder's weights would have."""
    found = _copied(decoder) if switches().copies and _possible(config) and decoder.dtype in HALVES else ()
    return sum(2 * each.weight.out_features * each.weight.in_features for each in found if each.weight.copy is None)


def keep(decoder: Decoder) -> None:
    """Make the copies."""
    for linear, place, weight in list(_copied(decoder)):
        assert linear.packed is not None
        copied = replace(weight, copy=dequantize(weight, decoder.dtype))
        linear.packed[place] = linear.packed[place]._replace(weight=copied)


class _Copied(NamedTuple):
    linear: MergedLinear
    place: int  # of its packed weights
    weight: PackedWeight


def _possible(config: EngineConfig) -> bool:
    return config.target.copies and config.weights_memory is None


def _copied(decoder: Decoder) -> Iterator[_Copied]:
    for linear in (linear for layer in decoder.layers for linear in layer.linears):
        for place, packed in enumerate(linear.packed or ()):
            if isinstance(packed.weight, PackedWeight) and not linear.roles[0].startswith(EXPERTS):
                yield _Copied(linear, place, packed.weight)
