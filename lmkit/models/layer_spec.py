"""One decoder layer as data: attention, MLP, the places of norms, and its linears, bytes and flops derived from them.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lmkit.attention_spec import AttentionSpec
from lmkit.kv_dtype import KVDtype
from lmkit.layers.blocks.state import PagedKV, Recurrent, State
from lmkit.layers.delta_spec import DeltaSpec
from lmkit.layers.latent_spec import LatentSpec
from lmkit.layers.mlp_spec import GPU_ROWS, MAX_PLACES, MLPSpec, MoESpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models import roles

Shape = tuple[int, int]  # (out_features, in_features)


@dataclass(frozen=True)
class LayerSpec:
    """Attention and an MLP, dense or a mixture of experts, each added to the residual stream x.

    Norms stand before both, as in Llama: x + attn(norm(x)), then x + mlp(norm(x)). With `post_norms` they also stand
    behind both, as in Gemma 2: x + norm(attn(norm(x))), then x + norm(mlp(norm(x))). Without `pre_norms` they stand
    only there, as in OLMo 2: x + norm(attn(x)), then x + norm(mlp(x)). With `stream_norms` the sum is normalized, as in
    OPT-350m: norm(x + attn(x)), then norm(x + mlp(x)).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: AttentionSpec
    rope: RopeSpec
    mlp: MLPSpec | MoESpec
    norm_eps: float
    attn_bias: bool = False  # on q, k and v
    o_bias: bool = False
    has_sinks: bool = False  # a learned score for each head of a key whose value is 0: ops.paged_attention
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    joint_qk_norm: bool = False  # the norm of q is over all heads together, and so is that of k
    latent: LatentSpec | None = None  # latent attention: one KV head, whose row is both key and value
    delta: DeltaSpec | None = None  # linear attention: a recurrent state in place of keys and values
    gated: bool = False  # the output of attention is multiplied with the sigmoid of one more linear, attn.gate
    value_norm: bool = False  # RMSNorm over head_dim on v, without a factor
    key_is_value: bool = False  # v is k before its norm and RoPE: there is no attn.v
    kv_from: int | None = None  # the layer whose keys and values this one reads; it has none of its own
    per_layer: int = 0  # > 0: each token has a vector of this width for each layer (layers.per_layer)
    stream_scale: bool = False  # the residual stream behind the layer is multiplied with a stored number
    pre_norms: bool = True
    post_norms: bool = False
    stream_norms: bool = False  # and no other ones
    norm_bias: bool = False  # norms are LayerNorms
    prefix: str = "model.layers"  # of the names in a checkpoint
    number: int | None = None  # in these names, if it is not the layer's place in the model
    names: Mapping[str, str] = field(default_factory=lambda: roles.LLAMA_NAMES, hash=False)  # see models.roles

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of what attn.o reads."""
        return self.linears["attn.o"][1]

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def pair_order(self) -> tuple[int, ...]:
        """The elements of a stored head of q or k in the order of ops.rope_append, where the elements of a pair are
        half the rotary part apart. Empty if they are stored so."""
        if not self.rope.interleaved or self.latent:
            return ()
        size = self.rope.rotary_dim
        return (*range(0, size, 2), *range(1, size, 2), *range(size, self.head_dim))

    @property
    def qkv(self) -> tuple[str, ...]:
        """The roles of the linears that read the input of full attention."""
        if self.kv_from is not None:
            return roles.QKV[:1]
        if self.key_is_value:
            return roles.QKV[:2]
        return (*roles.QKV, "attn.gate") if self.gated else roles.QKV

    @property
    def unrounded(self) -> tuple[str, ...]:
        """Linears that lmkit never rounds: they are small, and every later state depends on them."""
        own = ("per_layer.gate", "per_layer.out") if self.per_layer else ()
        return own + (self.delta.gates if self.delta else ())

    @property
    def is_sparse(self) -> bool:
        return bool(self.routers)

    @cached_property
    def linears(self) -> dict[str, Shape]:
        """Shapes of the linears that may be quantized, by role."""
        hidden, q, kv = self.hidden_size, self.q_size, self.kv_size
        every = {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.gate": (q, hidden)}
        shapes = {role: every[role] for role in self.qkv} | {"attn.o": (hidden, q)}
        if self.latent:
            shapes = self.latent.linears(hidden, self.num_heads)
        if self.delta:
            shapes = self.delta.linears(hidden)
        for name, mlp in self.mlps.items():
            inner = mlp.intermediate_size
            shapes |= {f"{name}.{part}": (inner, hidden) for part in mlp.inputs} | {f"{name}.down": (hidden, inner)}
        if self.per_layer:
            shapes |= {"per_layer.gate": (self.per_layer, hidden), "per_layer.out": (hidden, self.per_layer)}
        return shapes

    @cached_property
    def rows_of_heads(self) -> dict[str, int]:
        """Rows of a head in the weights that have some for each head, by role."""
        if self.latent:
            return self.latent.rows_of_heads
        return dict.fromkeys(("attn.q", "attn.k", "attn.v"), self.head_dim)

    @cached_property
    def routers(self) -> dict[str, Shape]:
        """Shapes of the linears that choose the experts of a token, by role. They stay dense."""
        return {role: (size, self.hidden_size) for role, size in self.mlp.routers.items()}

    @cached_property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are no linears, routers or norms, by role. They stay dense, in float32."""
        if self.delta:
            return self.delta.matrices
        return dict(self.latent.matrices(self.num_heads)) if self.latent else {}

    @cached_property
    def vectors(self) -> dict[str, int]:
        """Sizes of the norms' weights and of other vectors, by role."""
        before = ("norm.attn", "norm.mlp") if self.pre_norms or self.stream_norms else ()
        behind = ("norm.attn_out", "norm.mlp_out") if self.post_norms else ()
        sizes = dict.fromkeys((*before, *behind), self.hidden_size)
        if self.norm_bias:
            sizes |= {f"{role}.bias": self.hidden_size for role in sizes}
        if self.qk_norm:
            q, k = (self.q_size, self.kv_size) if self.joint_qk_norm else (self.head_dim, self.head_dim)
            sizes |= {"attn.q_norm": q} | ({"attn.k_norm": k} if self.kv_from is None else {})
        sizes |= {"norm.per_layer_out": self.hidden_size} if self.per_layer else {}
        sizes |= {"stream_scale": 1} if self.stream_scale else {}
        if self.latent:
            sizes |= self.latent.vectors
        return sizes | ({"attn.sinks": self.num_heads} if self.has_sinks else {}) | self.mlp.vectors(self.hidden_size)

    @cached_property
    def mlps(self) -> dict[str, MLPSpec]:
        """The gated MLPs, one or one per expert, by the prefix of their linears' names."""
        return self.mlp.parts

    def linear_shape(self, role: str) -> Shape:
        """The shape of a linear or router."""
        return self.linears[role] if role in self.linears else self.routers[role]

    def has_bias(self, role: str) -> bool:
        if role in self.routers:
            return isinstance(self.mlp, MoESpec) and self.mlp.router_bias
        if role.startswith("attn."):
            if self.latent and role in ("attn.q", "attn.q_b", "attn.kv_b"):
                return False
            return self.o_bias if role == "attn.o" else self.attn_bias
        if role.startswith("per_layer."):
            return False
        return self.mlps[role.rpartition(".")[0]].bias

    def module_name(self, index: int, role: str) -> str:
        """`attn.q` of layer 3 -> `model.layers.3.self_attn.q_proj`."""
        expert = roles.expert_of(role)
        pattern = role if expert is None else role.replace(f".{expert}.", ".{}.")
        return self.path(index) + self.names[pattern].format(expert)

    def path(self, index: int) -> str:
        """What the names of all tensors of layer `index` begin with: `model.layers.3.`"""
        return f"{self.prefix}.{index if self.number is None else self.number}."

    @cached_property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Linears that read the same input and become one product when their formats agree."""
        if self.delta:
            inputs = self.delta.inputs + self.delta.gates
        else:
            inputs = self.latent.inputs if self.latent else self.qkv
        return (inputs, *(tuple(f"{name}.{part}" for part in mlp.inputs) for name, mlp in self.mlps.items()))

    @cached_property
    def smooth(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(role, roles) in the order in which scales are searched: the outputs of `role` are divided by s, and the
        input columns of `roles` are multiplied by s. This is exact in floating point. Two activations are not linear in
        up(x).

        Routers read the norm's output. They are multiplied too, or tokens would go to other experts.
        """
        behind_norm = (*self.routers, *(f"{name}.{part}" for name, mlp in self.mlps.items() for part in mlp.inputs))
        inner = (name for name, mlp in self.mlps.items() if mlp.activation not in ("clamped_swish", "gelu"))
        has_values = not (self.delta or self.latent or self.value_norm)  # a norm in between would undo a scale
        values = roles.SMOOTH[1:2] if has_values else ()
        block = ("norm.attn", self.fused[0])
        mlp = () if isinstance(self.mlp, MoESpec) and self.mlp.beside else (("norm.mlp", behind_norm),)
        pairs = (block, *values, *mlp, *((f"{mlp}.up", (f"{mlp}.down",)) for mlp in inner))
        return pairs if self.pre_norms else tuple(pair for pair in pairs if not pair[0].startswith("norm."))

    @cached_property
    def input_of(self) -> dict[str, str]:
        """role -> the first of the roles that read the same input, for every linear and router. An expert reads the
        tokens that are sent to it. The router and the shared expert read all tokens."""
        first = {role: group[0] for group in self.fused for role in group}
        if (routers := tuple(self.routers)) and not (isinstance(self.mlp, MoESpec) and self.mlp.beside):
            first |= dict.fromkeys((*routers, "mlp.shared.gate", "mlp.shared.up"), routers[0])
        return {role: first.get(role, role) for role in (*self.linears, *self.routers)}

    @cached_property
    def num_weights(self) -> int:
        """Weights of all linears that may be quantized."""
        return sum(math.prod(shape) for shape in self.linears.values())

    @cached_property
    def active_weights(self) -> int:
        """The number of these weights that a token is multiplied with."""
        if isinstance(self.mlp, MLPSpec):
            return self.num_weights
        experts = sum(math.prod(s) for role, s in self.linears.items() if roles.expert_of(role) is not None)
        return self.num_weights - experts + experts * self.mlp.experts_per_token // self.mlp.num_experts

    def weight_bytes(self, bits: float) -> float:
        """Bytes of the linears at `bits` bits a weight."""
        return self.num_weights * bits / 8

    def flops(self, num_tokens: int, context: float) -> float:
        """Floating-point operations of a forward pass. Each token sees `context` keys, or fewer with a window. They
        are 2 for every weight and token, 4 for every key, query head and element."""
        seen = min(context, self.attention.window + self.attention.sinks) if self.attention.window else context
        return 2.0 * num_tokens * (self.active_weights + 2 * self.q_size * seen)

    def activation_bytes(self, *, half: bool = False) -> int:
        """Bytes of a token at the widest point of the layer, all in float32. `half`: linears and attention pass on
        16-bit values, beside a float32 stream. In the worst case all tokens go to one expert: they are gathered, and
        its output is added."""
        hidden, q, kv, inner = self.hidden_size, self.q_size, self.kv_size, self.widest_mlp
        if half:
            widest = 12 * hidden + 2 * (hidden + 3 * q + 2 * kv + 3 * inner)
            widest = max(widest, 14 * hidden + self.delta.gpu_bytes if self.delta else 0)
        else:
            widest = 4 * (4 * hidden + max(3 * q + 4 * kv, 2 * self._inputs_size, 3 * inner))
        if isinstance(self.mlp, MoESpec):
            per_stream, per_inner = (24, 6) if half else (32, 12)
            per_expert = 32 if self.mlp.sigmoid else 16  # its scores, and those by which it is chosen
            widest = max(widest, per_stream * hidden + per_inner * inner + per_expert * self.mlp.num_experts)
        return widest

    def places_bytes(self, num_tokens: int, *, half: bool = False) -> int:
        """Bytes of a step while all experts are computed together. On a CPU, all in float32: the stream, and for each
        pair of a token and an expert inputs, activated gates before and after rounding, and outputs. `half`: on a GPU
        the gates have 16 bits. Steps with more than GPU_ROWS tokens of an expert call each expert by itself
        (activation_bytes)."""
        if not isinstance(self.mlp, MoESpec):
            return 0
        hidden, inner = self.hidden_size, self.mlp.expert.intermediate_size
        if half:
            num_tokens = min(num_tokens, GPU_ROWS * self.mlp.num_experts // self.mlp.experts_per_token)
        places = min(num_tokens * self.mlp.experts_per_token, MAX_PLACES)
        pair = 4 * hidden + 2 * inner if half else 8 * (hidden + inner)
        return 24 * num_tokens * hidden + places * pair

    @cached_property
    def state(self) -> State:
        """What the layer keeps of a sequence."""
        if self.delta:
            return self.delta.state
        of_window = self.attention.window, self.attention.sinks
        return PagedKV(self.num_kv_heads, self.head_dim, self.latent is not None, self.kv_from, *of_window)

    @property
    def kv(self) -> PagedKV | None:
        """The keys and values that attention reads, if the layer has attention."""
        return self.state if isinstance(self.state, PagedKV) else None

    @property
    def plain_kv(self) -> PagedKV | None:
        """Those that are the layer's own, and apart: a transform of them can be fitted."""
        return self.kv if self.kv is not None and self.kv.is_plain else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent state, if the layer has one."""
        return self.state if isinstance(self.state, Recurrent) else None

    def kv_token_bytes(self, k: KVDtype, v: KVDtype) -> int:
        """Bytes of one token's keys and values in these storage types, including their parameters."""
        return 0 if self.kv is None else self.kv.token_bytes(k, v)

    @cached_property
    def widest_mlp(self) -> int:
        """The largest intermediate size of the layer's gated MLPs."""
        return max(mlp.intermediate_size for mlp in self.mlps.values())

    @property
    def widest_product(self) -> int:
        """Outputs of the largest product: q, k and v, or gate and up, side by side."""
        return max(self._inputs_size, 2 * self.widest_mlp)

    @property
    def _inputs_size(self) -> int:
        if self.delta:
            return sum(self.delta.linears(1)[role][0] for role in self.delta.inputs)
        return self.q_size * (2 if self.gated else 1) + 2 * self.kv_size
