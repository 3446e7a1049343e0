"""The time that a step takes to compute each of its tokens, estimated before weights are loaded."""

from __future__ import annotations

import time
from math import prod

import torch

from lmkit.layers.linear import MergedLinear
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.packed_cache import PackedFile, kinds_of
from lmkit.models.resolved import ResolvedModel

_TOKENS = 64  # of the measured product
_TRIES = 3


def token_seconds(model: ResolvedModel, file: PackedFile | None) -> float:
    """Seconds for each token of a step of many. `file` has the packed weights, if there are any yet.

    Products with weights take nearly all of this time. The largest linear of the last layer is measured with zeros for
    weights, which take no memory, and stands for all others. Attention is left out.
    """
    index = model.spec.num_layers - 1
    spec = model.spec.layers[index]
    layer = DecoderLayer(spec, index, dict(model.norms(index)), model.packing.device, model.activation_dtype)
    shapes = spec.linears | spec.routers
    linear = max(layer.linears, key=lambda one: sum(prod(shapes[role]) for role in one.roles))
    weights = {} if file else model.source.layer_weights(index, model.kept_dtype, linear.roles)
    kinds = file.kinds[index] if file else kinds_of(weights)
    of_roles = [shapes[role] for role in linear.roles]
    linear.pack_outline(
        model.packing.activations, [kinds[role] for role in linear.roles], of_roles, [False] * len(of_roles)
    )
    linear.replace_packed("", lambda _, outline: torch.zeros(outline.shape, dtype=outline.dtype))
    seconds = _seconds(linear, torch.ones(_TOKENS, of_roles[0][1], dtype=model.activation_dtype)) / _TOKENS
    of_token = sum(layer.active_weights for layer in model.spec.layers) + prod(model.spec.head_shape)
    return seconds * of_token / sum(map(prod, of_roles))


def _seconds(linear: MergedLinear, x: torch.Tensor) -> float:
    """The least time of a product. The first one may compile its kernel."""
    linear(x)
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - start)
    return min(times)
