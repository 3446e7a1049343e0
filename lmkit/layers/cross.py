"""Attention to a sequence's memory: the keys and values of an encoder's states, which no token changes.

Each slot of the batch has blocks of its own for them (KVLayer.memory). They are written when a sequence enters the
slot, again after a preemption. Every token of a step is the last query of a sequence of its own, so it sees all keys,
and its bits do not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.batch import KVLayer
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.blocks.cross import HEARS, KV, CrossAttentionSpec
from lmkit.layers.linear import MergedLinear


class CrossAttention(Forward):
    """Queries of the stream, and keys and values of the memory."""

    out: MergedLinear

    def __init__(self, spec: CrossAttentionSpec, parts: Parts) -> None:
        self.spec, self.scores = spec, AttentionSpec(spec.head_dim**-0.5)
        device, weights = parts.device, parts.weights
        self.q, self.kv, self.out = (MergedLinear(roles, weights, device) for roles in (("cross.q",), KV, ("cross.o",)))
        shape = {"head_dim": spec.head_dim, "num_heads": spec.num_heads, "num_kv_heads": spec.num_heads}
        self.paged_attention = ops.paged_attention.select(device, **shape)
        self.append = ops.kv_append.select(device, **shape)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.q, self.kv, self.out

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward."""
        assert at is not None
        if at.batch.memory is None or at.kv.memory is None:
            raise UnsupportedError(HEARS)
        q = self.q(x, norm).view(len(x), self.spec.num_heads, self.spec.head_dim)
        out: Tensor = self.paged_attention(q, at.kv.memory.k, at.kv.memory.v, at.batch.memory, self.scores)
        return out.view(len(x), -1)

    def remember(self, states: Tensor, slot: int, kv: KVLayer) -> None:
        """See Forward."""
        assert kv.memory is not None
        length, block_size = len(states), kv.memory.k.block_size
        first = slot * self.spec.memory.blocks(block_size) * block_size
        slots = torch.arange(first, first + length, dtype=torch.int32)
        k, v = self.kv(states).view(length, 2, self.spec.num_heads, self.spec.head_dim).unbind(1)
        self.append(k, v, kv.memory.k, kv.memory.v, slots)

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield "attention", self.paged_attention
