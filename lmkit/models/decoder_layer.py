"""One layer of the decoder: attention and gated MLP (or experts). It calibrates and it serves.

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
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.layers.batch import BatchInputs, KVLayer, Projected
from lmkit.layers.delta import GatedDelta
from lmkit.layers.latent import LatentAttention
from lmkit.layers.latent_prompts import PlainHeads
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.mlp import GatedMLP, part_of_sum
from lmkit.layers.mlp_spec import MoESpec
from lmkit.layers.moe import MoE
from lmkit.layers.per_layer import PerLayerGate
from lmkit.layers.ranks import Ranks
from lmkit.layers.rope import halves_first
from lmkit.models import roles
from lmkit.models.layer_spec import LayerSpec

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
        given = weights, device, dtype
        self.latent = LatentAttention(spec.latent, spec.num_heads, *given, spec.rope) if spec.latent else None
        self.plain_heads = (
            PlainHeads(self.latent, spec.attention, spec.rope.rotary_dim, device)
            if self.latent and device == "cuda"
            else None
        )
        self.delta = GatedDelta(spec.delta, spec.norm_eps, weights, device) if spec.delta else None
        self.inner = self.latent or self.delta  # the block, unless it is plain attention
        self.qkv = MergedLinear(spec.qkv, weights, device) if self.inner is None else self.inner.inputs
        self.o = MergedLinear(("attn.o",), weights, device)
        self.ranks: Ranks | None = None  # with the other parts of attention, whose outputs are added up
        self.mlp_ranks: Ranks | None = None  # the same of the MLP
        self.observe_queries: Callable[[Tensor], None] | None = None  # sees q [T, num_heads, head_dim] before RoPE
        self.shows_all_tokens = False  # whether observers of an expert also see tokens of other experts
        self.per_layer = (
            PerLayerGate(weights, next(iter(spec.mlps.values())).activation, device) if spec.per_layer else None
        )
        self.stream_scale = float(weights["stream_scale"].item()) if spec.stream_scale else 1.0  # type: ignore
        self.unit = torch.ones(spec.head_dim, device=tensor_device(device)) if spec.value_norm else None
        mlp = spec.mlp
        self.mlp = MoE(mlp, weights, device) if isinstance(mlp, MoESpec) else GatedMLP("mlp", mlp, weights, device)
        heads = {"head_dim": spec.head_dim, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        heads["latent"] = spec.latent is not None
        self.rms_norm = ops.rms_norm.select(device)
        self.attention_op = ops.rope_paged_attention.select(device, rotary_dim=spec.rope.rotary_dim, **heads)
        self.append_op = ops.rope_append.select(device, rotary_dim=spec.rope.rotary_dim, **heads)
        self.paged_attention = ops.paged_attention.select(device, **heads)
        self.gather = ops.embedding.select(device)
        self.multiply_gates = ops.multiply_gates.select(device)
        self.keep = ops.keep.select(device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        inputs = (self.qkv,) if self.inner is None else self.inner.linears
        own = () if self.per_layer is None else (self.per_layer.gate, self.per_layer.out)
        return *inputs, self.o, *self.mlp.linears, *own

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

    def pack(self, activations: str, packed: Callable[[MergedLinear], None] = lambda linear: None) -> None:
        """Move the linears into kernel layouts. Norms stay in `weights`, in float32. `packed` gets each linear behind
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
    ) -> tuple[Tensor, Tensor | None]:
        """(delta, residual) [T, hidden] -> the next layer's pair. residual None: the stream is delta alone.

        With `logits_only` the result has the batch's logit rows alone. Of the other tokens only keys and values are
        computed.
        """
        if not self.spec.pre_norms:
            delta, residual = self.added(delta, residual), None
        stream = delta if residual is None else residual
        x, norm = self.taken(delta), self.before("norm.attn", residual)
        if logits_only and not batch.wants_all:
            projected = self.queries_keys_values(x, norm)
            attended, stream = self.attend_logit_rows(projected, stream, batch, rope, kv)
            if not len(stream):
                return stream, None
        elif batch.prompts is not None and self.plain_heads is not None:
            attended = self.plain_heads(x, norm, batch, rope, kv)
        else:
            attended = self.attend(self.queries_keys_values(x, norm), batch, rope, kv)
        if self.spec.stream_norms:
            stream = self.rms_norm(self.project(attended), self.norm("norm.attn", stream))
            return self.rms_norm(self.feed_forward(self.taken(stream)), self.norm("norm.mlp", stream)), None
        if self.spec.post_norms:
            delta = self.project(attended)
            if not self.spec.pre_norms:
                delta = stream = self.added(delta, stream)
            pair = self.feed_forward(self.taken(delta), self.before("norm.mlp", stream)), stream
            return self.scaled(*pair, batch, logits_only) if self.spec.stream_scale else pair
        if self.ranks is not None:
            return self.feed_forward(self.project(attended), self.norm("norm.mlp", stream)), stream
        delta, rest = self.o.add_to(stream, attended)
        return self.mlp.add_to(stream, delta, self.norm("norm.mlp", rest))

    def attention(self, x: Tensor, batch: BatchInputs, rope: CosSin, kv: KVLayer, norm: Norm | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the block's contribution [T, hidden]. Appends to `kv`."""
        return self.project(self.attend(self.queries_keys_values(x, norm), batch, rope, kv))

    def project(self, attended: Tensor) -> Tensor:
        """The output of `attend` -> the attention block's contribution [T, hidden]."""
        y = self.o(attended) if self.ranks is None else part_of_sum(self.o, attended)
        return self._after("norm.attn_out", y, self.ranks)

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
        if len(spec.qkv) < len(roles.QKV):
            return self._few(y)
        *parts, gates = y.split(
            (spec.q_size, spec.kv_size, spec.kv_size, y.shape[1] - spec.q_size - 2 * spec.kv_size), -1
        )
        q, k, v = (part.view(num_tokens, -1, spec.head_dim) for part in parts)
        if self.qkv.packed is None and spec.pair_order:
            q, k = (x[..., list(spec.pair_order)] for x in (q, k))
        if spec.qk_norm:
            q, k = self.normed_heads("attn.q_norm", q), self.normed_heads("attn.k_norm", k)
        return Projected(q, k, self.normed_values(v), gates if spec.gated else None)

    def _few(self, y: Tensor) -> Projected:
        """As `queries_keys_values`, without attn.v, or without keys and values. y: what the linears give."""
        spec = self.spec
        parts = y.split((spec.q_size, y.shape[1] - spec.q_size), -1)
        q, k = (part.view(len(y), part.shape[1] // spec.head_dim, spec.head_dim) for part in parts)
        q = self.normed_heads("attn.q_norm", q)
        if spec.kv_from is not None:
            return Projected(q, k, k)
        return Projected(q, self.normed_heads("attn.k_norm", k), self.normed_values(k))

    def normed_values(self, v: Tensor) -> Tensor:
        """v [T, heads, head_dim], normalized in each head if the model does that."""
        if self.unit is None:
            return v
        normed: Tensor = self.rms_norm(v, Norm(self.unit, self.spec.norm_eps, None, self.dtype))
        return normed

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
        if self.observe_queries is not None:
            self.observe_queries(q)
        sinks = self.weights.get("attn.sinks")
        attention, positions = self.spec.attention, batch.positions
        out: Tensor = self.attention_op(q, k, v, *rope, kv.k, kv.v, geometry, attention, sinks, positions)
        return self.outputs(out, gates)

    def outputs(self, out: Tensor, gates: Tensor | None) -> Tensor:
        """The output of the attention op [T, num_heads, head_dim] -> the input of attn.o."""
        if gates is not None:
            gated: Tensor = self.multiply_gates(out.view(len(out), -1), gates, "sigmoid")
            return gated
        return out.view(len(out), -1) if self.latent is None else self.latent.values(out)

    def attend_logit_rows(
        self, projected: Projected, stream: Tensor, batch: BatchInputs, rope: CosSin, kv: KVLayer
    ) -> tuple[Tensor, Tensor]:
        """(output of `attend`, stream) of the batch's logit rows. Overwrites q and k, and appends to `kv`."""
        (q, k, v, gates), rows = projected, batch.logit_rows
        if self.delta is not None:
            attended = self.attend(projected, batch, rope, kv)
            return self.gather(attended, rows).to(attended.dtype), self.gather(stream, rows)
        self.append_op(q, k, v, *rope, kv.k, kv.v, batch.geometries[kv.group].slots, batch.positions)
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

    def scaled(
        self, delta: Tensor, residual: Tensor, batch: BatchInputs, logits_only: bool = False
    ) -> tuple[Tensor, None]:
        """The pair behind the MLP -> the one behind the layer, with the layer's part of the tokens' own vectors."""
        if self.per_layer is not None:
            vectors = self._own_vectors(batch)
            if logits_only and not batch.wants_all:
                vectors = self.gather(vectors, batch.logit_rows)
            self.keep(residual, delta, residual)
            delta = self._of_vectors(residual, vectors)
        self.keep(residual, delta, residual, self.stream_scale)
        return residual, None

    def finished(self, stream: Tensor, batch: BatchInputs) -> Tensor:
        """The residual stream behind the MLP -> the one behind the layer (as `scaled`), in memory of its own."""
        if self.per_layer is not None:
            stream = stream + self._of_vectors(stream, self._own_vectors(batch))
        return stream * self.stream_scale

    def _own_vectors(self, batch: BatchInputs) -> Tensor:
        """The tokens' vectors for this layer, float32 [T, width]."""
        assert batch.per_layer is not None
        return batch.per_layer[:, self.index * self.spec.per_layer :][:, : self.spec.per_layer]

    def _of_vectors(self, stream: Tensor, vectors: Tensor) -> Tensor:
        """What the tokens' vectors add to the residual stream behind the MLP."""
        assert self.per_layer is not None
        delta = self.per_layer(stream.to(self.dtype), vectors).float()
        normed: Tensor = self.rms_norm(delta, self.norm("norm.per_layer_out"))
        return normed

    def before(self, role: str, residual: Tensor | None = None) -> Norm | None:
        """The norm in front of a block. None: the block reads the stream itself."""
        return self.norm(role, residual) if self.spec.pre_norms else None

    def behind(self, role: str, stream: Tensor, delta: Tensor) -> Tensor:
        """The residual stream behind a block, whose contribution is `delta`, in memory of its own. `role`: its norm."""
        total = stream + delta
        if not self.spec.stream_norms:
            return total
        normalized: Tensor = self.rms_norm(total, self.norm(role))
        return normalized

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
