"""The one decoder: embedding, layers of attention and gated MLP (or experts), head. It calibrates and it serves.

    hidden --norm.attn--> q k v --qk norm, RoPE, append--> attention over blocked KV --attn.o--> + hidden
           --norm.mlp--> gate up --activation(gate) * up--> mlp.down --> + hidden

A model with post norms normalizes the output of attention and of the MLP before each `+`. It may lack the other norms.

The residual stream travels between layers as a pair (delta, residual), stream = residual + delta. The addition then
happens inside the next norm, and each norm inside the linear behind it. If a linear's kernel adds its result to the
stream itself, the pair is (delta, None), stream = delta. The stream is float32. On a CPU all activations are float32
too. On a GPU the outputs of norms, and the activations that linears and attention pass on, have `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.adapters import RowNumbers
from lmkit.layers.batch import BatchInputs, KVLayer, Projected
from lmkit.layers.delta import GatedDelta
from lmkit.layers.latent import LatentAttention
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.mlp import GatedMLP
from lmkit.layers.mlp_spec import MoESpec
from lmkit.layers.moe import MoE
from lmkit.layers.ranks import Ranks
from lmkit.layers.rope import Rope, halves_first
from lmkit.models.beside import Kept, Line
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

CosSin = tuple[Tensor, Tensor]


def joined(delta: Tensor, residual: Tensor | None) -> Tensor:
    """The residual stream of a pair (delta, residual)."""
    return delta if residual is None else delta + residual


class DecoderLayer:
    """One layer. `weights` maps roles to tensors (`norm.attn`, `attn.q`, `attn.q.bias`, ...; see models.roles).

    Before `pack`, linears are computed from `weights` directly, and each reports its input to an observer.
    """

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        weights: Weights,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec, self.index, self.weights, self.device, self.dtype = spec, index, weights, device, dtype
        pairs = {"interleaved": spec.rope.interleaved}
        self.latent = LatentAttention(spec.latent, spec.num_heads, weights, device, **pairs) if spec.latent else None
        self.delta = GatedDelta(spec.delta, spec.norm_eps, weights, device) if spec.delta else None
        self.inner = self.latent or self.delta  # the block, unless it is plain attention
        self.qkv = MergedLinear(spec.qkv, weights, device) if self.inner is None else self.inner.inputs
        self.o = MergedLinear(("attn.o",), weights, device)
        self.ranks: Ranks | None = None  # with the other parts of attention, whose outputs are added up
        self.mlp_ranks: Ranks | None = None  # the same of the MLP
        self.shows_all_tokens = False  # whether observers of an expert also see tokens of other experts
        mlp = spec.mlp
        self.mlp = MoE(mlp, weights, device) if isinstance(mlp, MoESpec) else GatedMLP("mlp", mlp, weights, device)
        heads = {"head_dim": spec.head_dim, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        self.rms_norm = ops.rms_norm.select(device)
        self.attention_op = ops.rope_paged_attention.select(device, rotary_dim=spec.rope.rotary_dim, **heads)
        self.append_op = ops.rope_append.select(device, rotary_dim=spec.rope.rotary_dim, **heads)
        self.paged_attention = ops.paged_attention.select(device, **heads)
        self.gather = ops.embedding.select(device)
        self.multiply_sigmoid = ops.multiply_sigmoid.select(device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        inputs = (self.qkv,) if self.inner is None else self.inner.linears
        return *inputs, self.o, *self.mlp.linears

    @property
    def product_dtype(self) -> torch.dtype:
        """The numbers that plain linears multiply. Their results are float32."""
        return self.o.product_dtype

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

    def observe(self, observer: Callable[[str, Tensor], None] | None) -> None:
        """Call `observer(role, x [T, in])` before each linear, until called with None. Works only while unpacked."""
        if isinstance(self.mlp, MoE):
            self.mlp.all_tokens = self.shows_all_tokens and observer is not None
        for linear in self.linears:
            linear.observe = observer

    def pack(self, activations: str) -> None:
        """Move the linears into kernel layouts. Norms stay in `weights`, in float32."""
        if self.spec.pair_order:
            for role in ("attn.q", "attn.k", "attn.q.bias", "attn.k.bias"):
                if role in self.weights:
                    self.weights[role] = halves_first(self.weights[role], self.spec.pair_order)
        for linear in self.linears:
            linear.pack(activations)
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
    ) -> tuple[Tensor, Tensor | None]:
        """(delta, residual) [T, hidden] -> the next layer's pair. residual None: the stream is delta alone.

        With `logits_only` the result has the batch's logit rows alone. Of the other tokens only keys and values are
        computed.
        """
        if not self.spec.pre_norms:
            delta, residual = self.added(delta, residual), None
        stream = delta if residual is None else residual
        projected = self.queries_keys_values(self.taken(delta), self.before("norm.attn", residual))
        if logits_only and not batch.wants_all:
            attended, stream = self.attend_logit_rows(projected, stream, batch, rope, kv)
            if not len(stream):
                return stream, None
        else:
            attended = self.attend(projected, batch, rope, kv)
        if self.spec.stream_norms:
            stream = self.rms_norm(self.project(attended), self.norm("norm.attn", stream))
            return self.rms_norm(self.feed_forward(self.taken(stream)), self.norm("norm.mlp", stream)), None
        if self.spec.post_norms:
            delta = self.project(attended)
            if not self.spec.pre_norms:
                delta = stream = self.added(delta, stream)
            return self.feed_forward(self.taken(delta), self.before("norm.mlp", stream)), stream
        if self.ranks is not None:
            return self.feed_forward(self.project(attended), self.norm("norm.mlp", stream)), stream
        delta, rest = self.o.add_to(stream, attended)
        return self.mlp.add_to(stream, delta, self.norm("norm.mlp", rest))

    def attention(self, x: Tensor, batch: BatchInputs, rope: CosSin, kv: KVLayer, norm: Norm | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the block's contribution [T, hidden]. Appends to `kv`."""
        return self.project(self.attend(self.queries_keys_values(x, norm), batch, rope, kv))

    def project(self, attended: Tensor) -> Tensor:
        """The output of `attend` -> the attention block's contribution [T, hidden]."""
        return self._after("norm.attn_out", self.o(attended), self.ranks)

    def feed_forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, hidden] -> the contribution of the MLP or mixture of experts. `norm` as in `attention`."""
        return self._after("norm.mlp_out", self.mlp(x, norm), self.mlp_ranks)

    def reduce(self, inner: Tensor) -> Tensor:
        """activation(gate) * up of a dense layer -> the MLP's contribution [T, hidden]."""
        assert isinstance(self.mlp, GatedMLP)
        return self._after("norm.mlp_out", self.mlp.down(inner), self.mlp_ranks)

    def queries_keys_values(self, x: Tensor, norm: Norm | None = None) -> Projected:
        """What attention reads. A row of latent attention is both k and v, in the same memory: it is stored after RoPE
        has turned it in place."""
        if self.latent is not None:
            q, row = self.latent.queries_and_rows(x, norm)
            return Projected(q, row, row)
        spec, num_tokens = self.spec, x.shape[0]
        if self.delta is not None:
            y, gates = self.delta.projected(x, norm)
            return Projected(y, y, y, gates)
        y = self.qkv(x, norm)
        *parts, gates = y.split(
            (spec.q_size, spec.kv_size, spec.kv_size, y.shape[1] - spec.q_size - 2 * spec.kv_size), -1
        )
        q, k, v = (part.view(num_tokens, -1, spec.head_dim) for part in parts)
        if self.qkv.packed is None and spec.pair_order:
            q, k = (x[..., list(spec.pair_order)] for x in (q, k))
        if spec.qk_norm:
            q, k = self.normed_heads("attn.q_norm", q), self.normed_heads("attn.k_norm", k)
        return Projected(q, k, v, gates if spec.gated else None)

    def normed_heads(self, role: str, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], normalized in each head, or all heads together."""
        joint = self.spec.joint_qk_norm
        y: Tensor = self.rms_norm(x.reshape(len(x), -1) if joint else x, self.norm(role))
        return y.view(x.shape)

    def attend(self, projected: Projected, batch: BatchInputs, rope: CosSin, kv: KVLayer) -> Tensor:
        """The input of attn.o, [T, num_heads * head_dim]. Overwrites q and k, and appends to `kv`."""
        q, k, v, gates = projected
        if self.delta is not None:
            assert gates is not None
            return self.delta(q, gates, batch, kv)
        geometry = batch.geometries[kv.group]
        sinks = self.weights.get("attn.sinks")
        out: Tensor = self.attention_op(q, k, v, *rope, kv.k, kv.v, geometry, self.spec.attention, sinks)
        return self.outputs(out, gates)

    def outputs(self, out: Tensor, gates: Tensor | None) -> Tensor:
        """The output of the attention op [T, num_heads, head_dim] -> the input of attn.o."""
        if gates is not None:
            gated: Tensor = self.multiply_sigmoid(out.view(len(out), -1), gates)
            return gated
        return out.view(len(out), -1) if self.latent is None else self.latent.values(out)

    def attend_logit_rows(
        self, projected: Projected, stream: Tensor, batch: BatchInputs, rope: CosSin, kv: KVLayer
    ) -> tuple[Tensor, Tensor]:
        """(output of `attend`, stream) of the batch's logit rows. Overwrites q and k, and appends to `kv`."""
        (q, k, v, gates), rows = projected, batch.logit_rows
        if self.delta is not None:
            return self.gather(self.attend(projected, batch, rope, kv), rows), self.gather(stream, rows)
        self.append_op(q, k, v, *rope, kv.k, kv.v, batch.geometries[kv.group].slots)
        if not len(rows):  # a chunk that ends before its prompt does
            return stream[:0], stream[:0]
        if gates is not None:
            gates = self.gather(gates, rows)
        wanted = self.gather(q.flatten(1), rows).to(q.dtype).view(len(rows), *q.shape[1:])
        geometry, sinks = batch.logit_geometry(kv.group), self.weights.get("attn.sinks")
        out: Tensor = self.paged_attention(wanted, kv.k, kv.v, geometry, self.spec.attention, sinks)
        return self.outputs(out, gates), self.gather(stream, rows)

    def _after(self, role: str, y: Tensor, ranks: Ranks | None) -> Tensor:
        """A block's output y, summed over the ranks, and normalized if the model has post norms."""
        if ranks is not None:
            y = ranks.sum(y)
        if not self.spec.post_norms:
            return y
        normed: Tensor = self.rms_norm(y, self.norm(role))
        return normed

    def before(self, role: str, residual: Tensor | None = None) -> Norm | None:
        """The norm in front of a block. None: the block reads the stream itself."""
        return self.norm(role, residual) if self.spec.pre_norms else None

    def added(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """`joined`, in place of `residual`. A norm's kernel adds on its way, and such a step can be captured."""
        if residual is None:
            return delta
        self.rms_norm(delta, self.norm("norm.attn_out", residual))
        return residual

    def taken(self, x: Tensor) -> Tensor:
        """The input of a block whose norm may be missing: a norm would give it `dtype`."""
        return x if self.spec.pre_norms else x.to(self.dtype)

    def norm(self, role: str, residual: Tensor | None = None) -> Norm:
        """The norm of a role, `norm.attn` for example."""
        weight, bias = self.weights[role], self.weights.get(role + ".bias")
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return Norm(weight, self.spec.norm_eps, residual, self.dtype, bias)


class Decoder:
    """A whole model, or a stage of it (models.stage). `embed_tokens` [vocab, hidden] and `final_norm` [hidden] are
    plain; `lm_head` is a linear. A final LayerNorm has a `final_bias`. `positions` [max_position, hidden], if there are
    any, are added to embeddings.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embed_tokens: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: MergedLinear,
        dtype: torch.dtype = torch.float32,
        *,
        final_bias: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.embed_tokens = embed_tokens
        self.final_bias, self.positions = final_bias, positions
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.dtype = dtype
        self.ranks: Ranks | None = None
        self.line: Line | None = None
        self.kept: Kept = {}
        device = lm_head.device
        self.ropes = {rope: Rope(rope, device) for rope in dict.fromkeys(layer.rope for layer in spec.layers)}
        self.embedding = ops.embedding.select(device)
        self.add_positions = ops.add_positions.select(device)
        self.rms_norm = ops.rms_norm.select(device)
        self.keep = ops.keep.select(device)
        self.softcap = ops.softcap.select(device) if spec.final_softcap else None
        self.row_adapters = RowNumbers()  # see models.adapters

    def join(self, ranks: Ranks, *, split: bool) -> None:
        """Compute together with other ranks from now on. `split`: each has a part of attention and dense MLPs."""
        self.ranks = ranks
        for layer in self.layers:
            layer.ranks = ranks if split else None
            layer.mlp_ranks = layer.mlp.join(ranks, layer.ranks)

    @torch.inference_mode()
    def __call__(self, batch: BatchInputs, kv: list[KVLayer]) -> Tensor:
        """Logits float32 [R, vocab] of `batch.logit_rows`; appends the batch's keys and values to `kv`.

        A stage gives none: the first one computes them from what it receives (`logits`).
        """
        delta, residual = self.hidden(batch, kv, logits_only=True)
        if self.line is not None:
            return torch.empty(0, self.spec.vocab_size)
        return self.logits(delta, residual, batch.logit_rows)

    def logits(self, delta: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """Logits float32 [R, vocab] of `rows` of the residual stream's pair. If `rows` are all, it is overwritten."""
        if not len(rows):  # a chunk that ends before its prompt does
            return torch.empty(0, self.spec.vocab_size, device=delta.device)
        if len(rows) < len(delta):
            delta = self.embedding(delta, rows)
            residual = None if residual is None else self.embedding(residual, rows)
        return self.head(delta, residual)

    def final_states(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """The residual stream's pair [R, hidden] -> the final norm's result float32 [R, hidden]. Keeps the pair."""
        states = joined(delta, residual)
        if self.final_norm is not None:
            norm = Norm(self.final_norm, self.spec.norm_eps, None, torch.float32, self.final_bias)
            states = self.rms_norm(states, norm)
        return states if self.spec.logit_scale == 1 else states / self.spec.logit_scale

    def hidden(
        self, batch: BatchInputs, kv: list[KVLayer], *, logits_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream's pair [T, hidden] after the last layer; appends the batch's keys and values to `kv`.

        With `logits_only` it is the pair [R, hidden] of the batch's logit rows (see DecoderLayer). A stage begins with
        the stream that it receives, and sends its own.
        """
        self.row_adapters.set(batch.adapters, batch.logit_adapters)
        angles = {spec: rope(batch) for spec, rope in self.ropes.items()}
        delta, last, kept = self._stream_in(batch), self.spec.num_layers, self.kept
        residual: Tensor | None = None
        for layer, kv_layer in zip(self.layers, kv, strict=True):
            of_rows = logits_only and layer.index == last - 1 and last not in kept
            if layer.index in kept:
                self.keep(delta, residual, kept[layer.index][: len(delta)])
            delta, residual = layer(delta, residual, batch, angles[layer.spec.rope], kv_layer, logits_only=of_rows)
        if last in kept:
            self.keep(delta, residual, kept[last][: len(delta)])
        if self.line is not None:
            if len(delta):
                self.keep(delta, residual, self.line.place(len(delta)))
            self.line.send(len(delta))
        return delta, residual

    def _stream_in(self, batch: BatchInputs) -> Tensor:
        """The residual stream float32 [T, hidden] in front of the first layer."""
        if self.line is not None and not self.line.is_first:
            return self.line.receive(len(batch.token_ids))
        delta = self.embed(batch.token_ids)
        if batch.image_rows is not None and batch.image_values is not None:
            delta[batch.image_rows] = batch.image_values
        if self.positions is not None:
            self.add_positions(delta, self.positions, batch.positions)
        return delta

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> float32 [T, hidden]."""
        x: Tensor = self.embedding(self.embed_tokens, token_ids, self.spec.embedding_scale)
        return x

    def head_part(self, delta: Tensor, residual: Tensor | None, rows: slice) -> Tensor:
        """`head` of some rows. Those rows are overwritten."""
        return self.head(delta[rows], None if residual is None else residual[rows])

    def head(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """The residual stream's pair [R, hidden] -> logits float32 [R, vocab]; `residual` is overwritten."""
        if self.final_norm is None:
            logits = self.lm_head(joined(delta, residual))
        else:
            norm = Norm(self.final_norm, self.spec.norm_eps, residual, self.dtype, self.final_bias)
            logits = self.lm_head.float32(delta, norm)
        if self.ranks is not None:
            logits = self.ranks.side_by_side(logits)
        return logits if self.softcap is None else self.softcap(logits, self.spec.final_softcap)
