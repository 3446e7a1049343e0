"""Sparse layers that are too large to be held: attention is one part, and each expert another. No torch here.

A part is a layer of its own with one block. The parts of a layer take their turns in memory, so a layer may be larger
than the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.moe import SHARED, MoESpec
from lmkit.models.layer_spec import LayerSpec

WHOLE_BYTES = 4 << 30  # of the float32 weights of a layer whose experts are held together, at most


class Part(NamedTuple):
    """`times` parts that are alike. `share`: of the tokens, that each one sees on average."""

    spec: LayerSpec
    share: float = 1.0
    times: int = 1


def mixture_alone(layer: LayerSpec) -> MoESpec | None:
    """The mixture of experts that ends a layer, if its experts can be taken one at a time."""
    end, block = layer.blocks[-1], layer.mixture
    if block is None or block is not end.block or block.beside or block.latent or block.scores_inputs:
        return None
    alone = len(layer.blocks) > 1 and end.norm and not (end.norm_out or end.norm_sum or end.scale)
    return block if alone and not (layer.per_layer or layer.factors) else None


def is_split(layer: LayerSpec) -> bool:
    """Whether the experts of a layer are held one at a time."""
    return 4 * layer.num_weights > WHOLE_BYTES and mixture_alone(layer) is not None


def before_experts(layer: LayerSpec) -> LayerSpec:
    """The layer without its last block."""
    return replace(layer, blocks=layer.blocks[:-1])


def without_experts(layer: LayerSpec) -> LayerSpec:
    """The last block of a layer, and of its linears the routers alone."""
    end, block = layer.blocks[-1], mixture_alone(layer)
    assert block is not None
    return replace(layer, blocks=(replace(end, block=replace(block, held=range(0))),))


def experts_of(layer: LayerSpec) -> dict[str, LayerSpec]:
    """Each expert of a split layer as a layer, by the role before its linears. A shared one is the last."""
    block = mixture_alone(layer)
    assert block is not None
    mlps = block.mlps
    names = [*(name for name in mlps if name != SHARED), *(name for name in mlps if name == SHARED)]
    return {name: replace(layer, blocks=(Residual(replace(mlps[name], role=name)),)) for name in names}


def parts_of(layer: LayerSpec) -> Iterator[Part]:
    """What is in memory in turns: the whole layer, or the parts of a split one."""
    if not is_split(layer):
        yield Part(layer)
        return
    block, experts = mixture_alone(layer), experts_of(layer)
    assert block is not None
    shared = experts.pop(SHARED, None)
    yield Part(before_experts(layer))
    yield Part(next(iter(experts.values())), block.experts_per_token / block.num_experts, block.num_experts)
    if shared is not None:
        yield Part(shared)
