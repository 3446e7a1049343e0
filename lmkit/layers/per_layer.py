"""Per-layer embeddings (Gemma 3n and 4): each token has a small vector for each layer, which the layer adds after its
MLP, as far as the residual stream x opens a gate.

    vectors of a token = (norm(projection(embedding)) + table[token]) / sqrt(2)      of all layers, before the first
    x <- (x + norm(out(activation(gate(x)) * the layer's vector))) * stream scale    after each layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.blocks.mlp import PerLayerSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.ranks import Ranks


@dataclass(frozen=True)
class PerLayerWeights:
    """`table` [vocab, layers * width], `projection` [layers * width, hidden], `norm` [width]."""

    table: Tensor
    projection: Tensor
    norm: Tensor
    table_scale: float  # a factor on the table


class PerLayerVectors:
    """The vectors of a step's tokens."""

    def __init__(self, weights: PerLayerWeights, eps: float, device: str, dtype: torch.dtype) -> None:
        """`dtype`: what linears read."""
        half = math.sqrt(0.5)
        self.width, self._table, self._scale = len(weights.norm), weights.table, weights.table_scale * half
        hidden = weights.projection.shape[1]
        # The projection's factor 1 / sqrt(hidden) is taken from eps: norm(c y, eps) = norm(y, eps / c^2).
        self._norm = Norm(weights.norm.float() * half, eps * hidden, None, torch.float32)
        self._dtype = dtype
        self._projection = MergedLinear(("projection",), {"projection": weights.projection}, device)
        self._projection.pack("exact")
        self._embedding, self._rms_norm = ops.embedding.select(device), ops.rms_norm.select(device)
        self._add = ops.keep.select(device)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Token ids int64 [T] and embeddings float32 [T, hidden] -> float32 [T, layers * width]."""
        projected = self._projection(embedded.to(self._dtype)).float()
        vectors: Tensor = self._rms_norm(projected.view(len(projected), -1, self.width), self._norm).view(
            projected.shape
        )
        self._add(vectors, self._embedding(self._table, token_ids, self._scale), vectors)
        return vectors


class PerLayerGate(Forward):
    """What a layer does with its vectors. The weights have `per_layer.gate` and `per_layer.out`."""

    def __init__(self, spec: PerLayerSpec, parts: Parts) -> None:
        self.spec, self.index = spec, parts.layer
        self.gate = MergedLinear(("per_layer.gate",), parts.weights, parts.device)
        self.last = MergedLinear(("per_layer.out",), parts.weights, parts.device)
        self._multiply = ops.multiply_gates.select(parts.device)
        self._gather = ops.embedding.select(parts.device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.gate, self.last

    def __call__(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """The residual stream x [T, hidden], in the dtype that linears read -> what the layer adds, float32, before its
        norm. x may be that of the batch's logit rows alone."""
        assert at is not None
        assert at.batch.per_layer is not None
        width = self.spec.width
        vectors = at.batch.per_layer[:, self.index * width :][:, :width]
        if len(x) < len(vectors):
            vectors = self._gather(vectors, at.batch.logit_rows)
        return self.last(self._multiply(vectors, self.gate(x), self.spec.activation).to(x.dtype)).float()

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """See Forward. Each rank has all of it."""
        return None
