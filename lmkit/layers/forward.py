"""The table of blocks: what computes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.devices import named
from lmkit.layers.attention import Attention
from lmkit.layers.block import Forward, Parts
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.blocks.base import Block
from lmkit.layers.blocks.cross import CrossAttentionSpec
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.layers.blocks.latent import LatentSpec
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.blocks.mlp import MLPSpec, PerLayerSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.blocks.parallel import ParallelSpec
from lmkit.layers.blocks.shared import SharedSpec
from lmkit.layers.blocks.short_conv import ShortConvSpec
from lmkit.layers.cross import CrossAttention
from lmkit.layers.delta import GatedDelta
from lmkit.layers.latent import LatentAttention
from lmkit.layers.latent_prompts import PlainHeads
from lmkit.layers.mamba import Mamba
from lmkit.layers.mlp import GatedMLP
from lmkit.layers.moe import MoE
from lmkit.layers.parallel import Parallel
from lmkit.layers.per_layer import PerLayerGate
from lmkit.layers.shared import Shared
from lmkit.layers.short_conv import ShortConv
from lmkit.layers.sparse_latent import SparseLatentAttention

Forwards = dict[type[Block], Callable[[Any, Parts], Forward]]


def _latent(spec: LatentSpec, parts: Parts) -> LatentAttention:
    if spec.indexer is not None:
        return SparseLatentAttention(spec, parts)
    block = LatentAttention(spec, parts)
    block.plain_heads = PlainHeads(block, parts.device) if named(parts.device).plain_heads else None
    return block


def with_parallel(forwards: Forwards) -> Forwards:
    """The table with ParallelSpec, whose parts it computes."""

    def parallel(spec: ParallelSpec, parts: Parts) -> Parallel:
        mixer, beside = (forwards[type(part)](part, parts) for part in spec.members)
        return Parallel(mixer, beside, parts, recurs=spec.beside.state is not None)

    return forwards | {ParallelSpec: parallel}


BLOCKS: Forwards = {
    SelfAttentionSpec: Attention,
    CrossAttentionSpec: CrossAttention,
    LatentSpec: _latent,
    DeltaSpec: GatedDelta,
    MambaSpec: Mamba,
    ShortConvSpec: ShortConv,
    MLPSpec: lambda spec, parts: GatedMLP(spec.role, spec, parts.weights, parts.device),
    MoESpec: lambda spec, parts: MoE(spec, parts.weights, parts.device),
    PerLayerSpec: PerLayerGate,
    SharedSpec: Shared,
}
FORWARDS = with_parallel(BLOCKS)
