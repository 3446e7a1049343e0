"""What computes a block (layers.blocks), and the residual stream around it: the only place that writes the stream.

    x, norm, stream = block.read(pair)        the block's input, and the norm that its first linear applies
    inner = block.inner(x, norm, at)          up to the input of the block's output linear
    pair = block.add(stream, inner)           the stream with the block's contribution

The stream travels as a pair (delta, residual), stream = residual + delta. The addition then happens inside the next
norm, and each norm inside the linear after it. If a linear's kernel adds its result to the stream itself, the pair is
(delta, None), stream = delta. The stream is float32. On a CPU all activations are float32 too. On a GPU the outputs of
norms, and the activations that linears and attention pass on, have `dtype`.

Serving adds in place. Calibration and gradients keep the stream before the block, and take `apart`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.blocks.base import Residual
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.ranks import Ranks

CosSin = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor | None]
NO_ANGLES: CosSin = (torch.empty(0, 0), torch.empty(0, 0))  # of a layer that turns no heads


class At(NamedTuple):
    """What blocks read of a step besides the residual stream."""

    batch: BatchInputs
    rope: CosSin
    kv: KVLayer


class Parts(NamedTuple):
    """What a block is made of. `weights` maps roles to tensors (`norm.attn`, `attn.q`, `attn.q.bias`, ...)."""

    weights: Weights
    device: str
    dtype: torch.dtype
    eps: float
    layer: int  # its place in the model

    def norm(self, role: str, residual: Tensor | None = None) -> Norm:
        """The norm of a role, `norm.attn` for example."""
        weight, bias = self.weights[role], self.weights.get(role + ".bias")
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return Norm(weight, self.eps, residual, self.dtype, bias)

    def vector(self, role: str) -> Tensor:
        """A weight that is no linear's."""
        weight = self.weights[role]
        assert isinstance(weight, Tensor)
        return weight


class Forward:
    """Computes a block. Before its linears are packed, they are computed from `weights` directly."""

    out: MergedLinear | None = None  # the last linear, whose results are added; None: there is no single one
    is_part = False  # whether other ranks have the rest of the inputs of `out`: sums over ranks are of float32 parts
    all_tokens = False  # whether observers of an expert also see tokens of other experts

    @property
    def members(self) -> tuple[Forward, ...]:
        """See Block.members."""
        return (self,)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        raise NotImplementedError

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the input of `out`. Changes the state in `at`."""
        raise NotImplementedError

    def remember(self, states: Tensor, slot: int, kv: KVLayer) -> None:
        """Write what the block sees of an encoder's states float32 [length, hidden] into the memory of a slot."""

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(`inner`, stream) of the batch's logit rows alone. A block that reads no other tokens is given those."""
        raise NotImplementedError

    def __call__(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the block's contribution [T, hidden]."""
        return self.project(self.inner(x, norm, at))

    def searched(self, x: Tensor, at: At) -> Tensor:
        """The input [T, in] of the first linears -> what scales of these are compared by: the contribution."""
        return self(x, None, at)

    def project(self, inner: Tensor) -> Tensor:
        """The output of `inner` -> the block's contribution [T, hidden], or this rank's part of it."""
        assert self.out is not None
        return part_of_sum(self.out, inner) if self.is_part else self.out(inner)

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """Compute together with other ranks; `split` are those among which linears are split. Returns the ranks that
        add up the block's outputs."""
        self.is_part = split is not None
        return split

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """The implementations of the ops that a step runs besides linears, each with the name of its use."""
        return iter(())


def part_of_sum(linear: MergedLinear, x: Tensor) -> Tensor:
    """The product of x as float32 [T, out], to be added up over the ranks. A CPU computes in float32 anyway."""
    return linear(x) if x.dtype == torch.float32 else linear.float32(x)


class ResidualBlock:
    """A block with its norms, as a Residual describes it."""

    def __init__(self, spec: Residual, block: Forward, parts: Parts) -> None:
        self.spec, self.block, self.parts, self.dtype = spec, block, parts, parts.dtype
        self.ranks: Ranks | None = None  # which add up what the block gives
        self.scale = float(parts.vector(spec.scale).item()) if spec.scale else 1.0
        self._norm, self._norm_out, self._norm_sum = spec.norm, spec.norm_out, spec.norm_sum
        self._rms_norm = ops.rms_norm.select(parts.device)
        self._keep = ops.keep.select(parts.device)
        self._gather = ops.embedding.select(parts.device)

    def __call__(self, pair: Pair, at: At, rows: bool = False) -> Pair:
        """The pair before the block -> the one after it. `rows`: of the batch's logit rows alone, which may be none."""
        x, norm, stream = self.read(*pair)
        block = self.block
        if rows:
            inner, stream = block.logit_rows(x, norm, at, stream)
            return self.add(stream, inner) if len(stream) else (stream, None)
        if block.out is None:
            return self.sum(stream, block(x, norm, at))
        return self.add(stream, block.inner(x, norm, at))

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """The implementations of the ops that a step runs besides linears, each with the name of its use."""
        yield from self.block.captured()
        if self._norm_out:
            yield "norms", self._rms_norm

    def read(self, delta: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Norm | None, Tensor]:
        """A pair -> (what the block reads, its norm, the stream). The norm writes the sum of a pair into the stream's
        memory. Without a norm, the block reads the stream itself, in `dtype`."""
        if self._norm:
            norm = self.parts.norm(self._norm, residual)
            return delta, norm, delta if residual is None else residual
        if residual is not None:
            self._keep(residual, delta, residual)
            delta = residual
        return delta.to(self.dtype), None, delta

    def add(self, stream: Tensor, inner: Tensor) -> Pair:
        """The stream, overwritten, with the block's contribution. `inner`: the input of its output linear."""
        out = self.block.out
        if self.ranks is None and not (self._norm_out or self._norm_sum or self.spec.scale) and out is not None:
            return out.add_to(stream, inner)
        return self.sum(stream, self.block.project(inner))

    def sum(self, stream: Tensor, y: Tensor) -> Pair:
        """The stream, overwritten, with what the block gives."""
        y = self.whole(y)
        if self._norm_sum:
            summed: Tensor = self._rms_norm(y, self.parts.norm(self._norm_sum, stream))
            return summed, None
        if self.spec.scale:
            self._keep(stream, y, stream, self.scale)
            return stream, None
        return y, stream

    def whole(self, y: Tensor) -> Tensor:
        """What the block gives, summed over the ranks, and normalized if the model does that: its contribution."""
        if self.ranks is not None:
            y = self.ranks.sum(y)
        if not self._norm_out:
            return y
        normed: Tensor = self._rms_norm(y, self.parts.norm(self._norm_out))
        return normed

    def contribution(self, x: Tensor, norm: Norm | None, at: At) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> what is added to the stream."""
        return self.whole(self.block(x, norm, at))

    def apart(self, stream: Tensor, y: Tensor) -> Tensor:
        """The stream with the block's contribution y, in memory of its own."""
        total = stream + y
        if self._norm_sum:
            total = self._rms_norm(total, self.parts.norm(self._norm_sum))
        return total * self.scale if self.spec.scale else total
