"""One layer of the decoder: blocks, each of which adds to the residual stream. It calibrates and it serves.

    hidden --norm.attn--> attention or a recurrent block --attn.o--> + hidden
           --norm.mlp--> gate up --activation(gate) * up--> mlp.down --> + hidden

A model with post norms normalizes what a block gives before each `+`. It may lack the other norms. layers.block has the
residual stream, and what computes a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from lmkit.kernels.ops import Norm
from lmkit.layers.attention import Attending, attending
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.block import At, CosSin, Forward, Pair, Parts, ResidualBlock
from lmkit.layers.forward import FORWARDS, Forwards
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.ranks import Ranks
from lmkit.layers.rope import halves_first
from lmkit.models.layer_spec import LayerSpec


def joined(delta: Tensor, residual: Tensor | None) -> Tensor:
    """The residual stream of a pair (delta, residual)."""
    return delta if residual is None else delta + residual


class DecoderLayer:
    """One layer. `weights` maps roles to tensors (`norm.attn`, `attn.q`, `attn.q.bias`, ...; see models.roles).

    Before `pack`, linears are computed from `weights` directly, and each reports its input to an observer.
    """

    forwards: ClassVar[Forwards] = FORWARDS

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        weights: Weights,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec, self.index, self.weights, self.device, self.dtype = spec, index, weights, device, dtype
        self.parts = Parts(weights, device, dtype, spec.norm_eps, index)
        self.blocks = [
            ResidualBlock(each, self.forwards[type(each.block)](each.block, self.parts), self.parts)
            for each in spec.blocks
        ]
        for linear in self.linears if spec.factors else ():  # a draft head's are complete later, and have none
            linear.factor = spec.factors.get(linear.roles[0], 1.0)
        self.mixing = next(each for each in self.blocks if each.spec.block is spec.mixer)
        self.mixer: Forward = self.mixing.block
        self.shows_all_tokens = False  # whether observers of an expert also see tokens of other experts

    @property
    def attention(self) -> Attending:
        """The layer's attention, which it must have."""
        return attending(self.mixer)

    @property
    def mlp(self) -> Forward:
        """The MLP or mixture of experts, which the layer must have."""
        return next(each.block for each in self.blocks if each.spec.block.mlps)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return tuple(linear for each in self.blocks for linear in each.block.linears)

    @property
    def product_dtype(self) -> torch.dtype:
        """The numbers that plain linears multiply. Their results are float32."""
        return next(x.product_dtype for x in self.linears if not self.spec.routers.keys() & set(x.roles))

    def multiply_in(self, dtype: torch.dtype) -> Self:
        """Set `product_dtype`, and return the layer. Routers stay in float32: their results are compared."""
        for linear in self.linears:
            if not self.spec.routers.keys() & set(linear.roles):
                linear.product_dtype = dtype
        return self

    def with_weights(self, weights: Weights) -> DecoderLayer:
        """The same layer with other plain weights."""
        layer = DecoderLayer(self.spec, self.index, weights, self.device, self.dtype)
        return layer.multiply_in(self.product_dtype)

    def linear_of(self, role: str) -> MergedLinear:
        """The linear that contains `role`."""
        return next(linear for linear in self.linears if role in linear.roles)

    def norm(self, role: str, residual: Tensor | None = None) -> Norm:
        """The norm of a role, `norm.attn` for example."""
        return self.parts.norm(role, residual)

    def join(self, ranks: Ranks, split: Ranks | None) -> None:
        """Compute together with other ranks; `split` are those among which linears are split."""
        for each in self.blocks:
            each.ranks = each.block.join(ranks, split)

    def observe(self, observer: Callable[[str, Tensor], None] | None) -> None:
        """Call `observer(role, x [T, in])` before each linear, until called with None. Works only while unpacked."""
        for each in self.blocks:
            each.block.all_tokens = self.shows_all_tokens and observer is not None
        for linear in self.linears:
            linear.observe = observer

    def pack(self, activations: str, packed: Callable[[MergedLinear], None] = lambda linear: None) -> None:
        """Move the linears into kernel layouts. Norms stay in `weights`, in float32. `packed` gets each linear after
        its packing, and may empty it."""
        if self.spec.pair_order:
            for role in ("attn.q", "attn.k", "attn.q.bias", "attn.k.bias"):
                if role in self.weights:
                    self.weights[role] = halves_first(self.weights[role], self.spec.pair_order)
        for linear in self.linears:
            linear.pack(activations)
            packed(linear)
        for role, weight in self.weights.items():
            assert isinstance(weight, Tensor)
            self.weights[role] = weight.float().clone()

    def __call__(
        self,
        delta: Tensor,
        residual: Tensor | None,
        batch: BatchInputs,
        rope: CosSin,
        kv: KVLayer,
        *,
        logits_only: bool = False,
    ) -> Pair:
        """(delta, residual) [T, hidden] -> the next layer's pair. residual None: the stream is delta alone.

        With `logits_only` the result has the batch's logit rows alone. Of the other tokens only keys and values are
        computed.
        """
        pair, at = (delta, residual), At(batch, rope, kv)
        if logits_only and not batch.wants_all and self.spec.state is not None:
            return self._logit_rows(pair, at)
        for block in self.blocks:
            pair = block(pair, at)
        return pair

    def _logit_rows(self, pair: Pair, at: At) -> Pair:
        """As a call with `logits_only`. There may be no rows: a chunk that ends before its prompt does."""
        for block in self.blocks:
            pair = block(pair, at, block is self.mixing)
            if not len(pair[0]):
                break
        return pair
