"""A decoder layer whose output has gradients. It is the decoder's own, on the reference operations: these are torch's.

Nothing that has gradients is written to in place, so the sums of the residual stream stand apart from the norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lmkit.kernels.cuda.module import TORCH
from lmkit.layers.attention import Attending, Attention
from lmkit.layers.batch import Projected
from lmkit.layers.block import At, CosSin
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.blocks.latent import LatentSpec
from lmkit.layers.forward import BLOCKS, with_parallel
from lmkit.layers.latent import LatentAttention
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.quant.layer.layer import Geometry


class _WithGradients(Attending):
    def attend(self, projected: Projected, at: At) -> Tensor:
        """The decoder's attention on copies: it rotates queries and keys in place. Plain attention is torch's, which
        keeps no scores."""
        (q, k, v, gates), scores = projected, self.scores
        if scores.window or scores.softcap or "attn.sinks" in self.weights:
            return super().attend(projected._replace(q=q.clone(), k=k.clone()), at)
        num_rows, rope, q = len(at.batch.rope_lens), at.rope, self.grown(q, at.batch.positions)
        q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (turned(q, rope), turned(k, rope), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale, enable_gqa=True)
        return self.outputs(out.transpose(1, 2).flatten(0, 1).contiguous(), gates)


class _Attention(_WithGradients, Attention):
    pass


class _LatentAttention(_WithGradients, LatentAttention):
    pass


class LayerWithGradients(DecoderLayer):
    """A layer on the reference operations, for whole sequences of one length."""

    forwards = with_parallel(BLOCKS | {SelfAttentionSpec: _Attention, LatentSpec: _LatentAttention})

    def observe_gradients(self, observer: Callable[[tuple[str, ...], Tensor], None]) -> None:
        """Call `observer(roles, g [T, out])` on the way back, with the gradients at the outputs of linears that are
        computed together, side by side. An expert sees the tokens that are sent to it."""

        def watch(names: tuple[str, ...], y: Tensor) -> None:
            y.register_hook(lambda gradient: observer(names, gradient))

        for linear in self.linears:
            linear.observe_output = watch

    def output(self, hidden: Tensor, seq_len: int) -> Tensor:
        """hidden float32 [tokens, hidden], whole sequences of `seq_len` tokens -> the next layer's. Each call has keys
        and values of its own: they are part of what has gradients."""
        at = Geometry.of(self.spec, len(hidden) // seq_len, seq_len, self.device).at
        for block in self.blocks:
            x, norm, _ = block.read(hidden)
            hidden = block.apart(hidden, block.contribution(x, norm, at))
        return hidden


def turned(x: Tensor, rope: CosSin) -> Tensor:
    """x [T, heads, head_dim] by the angles of its tokens (ops.rope_append)."""
    cos, sin = (part[:, None, :] for part in rope)
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def with_gradients(layer: DecoderLayer, weights: Mapping[str, Tensor]) -> LayerWithGradients:
    """The layer with other weights, which may have gradients, where these lie."""
    made = LayerWithGradients(layer.spec, layer.index, dict(weights), f"{TORCH}{next(iter(weights.values())).device}")
    made.multiply_in(layer.product_dtype)
    return made


def layer_output(layer: DecoderLayer, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """The layer's output with other weights on whole sequences. hidden and output float32 [rows, seq_len, hidden]."""
    return with_gradients(layer, weights).output(hidden.flatten(0, 1), hidden.shape[1]).view(hidden.shape)
