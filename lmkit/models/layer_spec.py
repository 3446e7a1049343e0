"""One decoder layer as data: its blocks, and what follows from them: linears, vectors, bytes and flops.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.kv_dtype import KVDtype
from lmkit.layers.blocks.attention import SelfAttentionSpec, fitted_kv
from lmkit.layers.blocks.base import Block, Heads, InnerMLP, Residual, Shape, ValueHeads
from lmkit.layers.blocks.moe import MoESpec, mixture_of
from lmkit.layers.blocks.state import Memory, PagedKV, Recurrent, State
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models import roles

UNTURNED = RopeSpec(kind="none")


@dataclass(frozen=True)
class LayerSpec:
    """Blocks, each of which adds to the residual stream what it makes of it (layers.blocks.base). One of them at most
    keeps something of a sequence."""

    hidden_size: int
    blocks: tuple[Residual, ...]
    norm_eps: float
    norm_bias: bool = False  # norms are LayerNorms
    norms_lack_bias: bool = False  # LayerNorms whose biases a checkpoint does not have: they are 0
    prefix: str = "model.layers"  # of the names in a checkpoint
    number: int | None = None  # in these names, if it is not the layer's place in the model
    names: Mapping[str, str] = field(default_factory=lambda: roles.LLAMA_NAMES, hash=False)  # see models.roles
    # What a linear's input is multiplied with, by role. Linears that read the same input have that of the first.
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)

    def having(self, *, mixer: Block | None = None, mlp: Block | None = None, **changes: Any) -> LayerSpec:
        """The layer with other fields. A name that is no field of the layer is one of its first block's. `mixer` takes
        the first block's place, `mlp` the second one's."""
        own = {name: changes.pop(name) for name in [f.name for f in fields(self)] if name in changes}
        blocks = list(own.pop("blocks", self.blocks))
        for place, block in ((0, mixer), (1, mlp)):
            if block is not None:
                blocks[place] = replace(blocks[place], block=block)
        if changes:
            blocks[0] = replace(blocks[0], block=blocks[0].block.having(**changes))
        return replace(self, blocks=tuple(blocks), **own)

    def __iter__(self) -> Iterator[Block]:
        return (each.block for each in self.blocks)

    @cached_property
    def mixer(self) -> Block:
        """The block that keeps something of a sequence, or the first one."""
        return next((block for block in self if block.state is not None), self.blocks[0].block)

    @cached_property
    def mixture(self) -> MoESpec | None:
        """The mixture of experts, if the layer has one."""
        return mixture_of(self)

    @cached_property
    def fitted_kv(self) -> SelfAttentionSpec | None:
        """The attention to whose keys and values a transform can be fitted."""
        return fitted_kv(self)

    @property
    def heads(self) -> Heads:
        """The heads of attention. A layer without attention has none."""
        return self.mixer.heads or Heads(0, 0, 0)

    @property
    def num_heads(self) -> int:
        return self.heads.queries

    @property
    def num_kv_heads(self) -> int:
        return self.heads.kv

    @property
    def head_dim(self) -> int:
        return self.heads.dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope(self) -> RopeSpec:
        """How attention turns heads. A layer without attention turns none."""
        return self.mixer.rotary or UNTURNED

    @property
    def attention(self) -> AttentionSpec:
        """How queries see keys. A layer without attention sees none."""
        return self.mixer.scores or AttentionSpec(1.0)

    @property
    def kv_from(self) -> int | None:
        """The layer whose keys and values this one reads; it has none of its own."""
        return None if self.kv is None else self.kv.source

    @property
    def pre_norms(self) -> bool:
        """Whether blocks read a norm of the stream, not the stream itself."""
        return bool(self.blocks[0].norm)

    @cached_property
    def post_norms(self) -> bool:
        """Whether what a block gives is normalized before it is added."""
        return any(each.norm_out for each in self.blocks)

    @cached_property
    def per_layer(self) -> int:
        """Width of each token's vector for this layer (layers.per_layer). 0: there are none."""
        return sum(block.token_width for block in self)

    @property
    def pair_order(self) -> tuple[int, ...]:
        """See Block.pair_order."""
        return self.mixer.pair_order

    @cached_property
    def unrounded(self) -> tuple[str, ...]:
        """Linears that lmkit never rounds."""
        return tuple(role for block in self for role in block.unrounded)

    @property
    def is_sparse(self) -> bool:
        return bool(self.routers)

    @cached_property
    def linears(self) -> dict[str, Shape]:
        """Shapes of the linears that may be quantized, by role."""
        return {role: shape for block in self for role, shape in block.linears(self.hidden_size).items()}

    @cached_property
    def rows_of_heads(self) -> dict[str, int]:
        """Rows of a head in the weights that have some for each head, by role."""
        return self.mixer.rows_of_heads

    @cached_property
    def row_groups(self) -> dict[str, int]:
        """See Block.row_groups."""
        return {role: count for block in self for role, count in block.row_groups.items()}

    @cached_property
    def value_heads(self) -> dict[str, ValueHeads]:
        """See Block.value_heads."""
        return {role: heads for block in self for role, heads in block.value_heads.items()}

    @cached_property
    def gguf_names(self) -> dict[str, str]:
        """See Block.gguf_names."""
        return {role: name for block in self for role, name in block.gguf_names.items()}

    @cached_property
    def routers(self) -> dict[str, Shape]:
        """Shapes of the linears that choose the experts of a token, by role. They stay dense."""
        return {role: shape for block in self for role, shape in block.routers(self.hidden_size).items()}

    @cached_property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are no linears, routers or norms, by role. They stay dense, in float32."""
        return {role: shape for block in self for role, shape in block.matrices.items()}

    @cached_property
    def vectors(self) -> dict[str, int]:
        """Sizes of the norms' weights and of other vectors, by role."""
        sizes = {role: self.hidden_size for each in self.blocks for role in each.norms}
        if self.norm_bias:
            sizes |= {f"{role}.bias": self.hidden_size for role in sizes}
        sizes |= {each.scale: 1 for each in self.blocks if each.scale}
        return sizes | {role: size for block in self for role, size in block.vectors(self.hidden_size).items()}

    @cached_property
    def mlps(self) -> dict[str, InnerMLP]:
        """The gated MLPs, one or one per expert, by the prefix of their linears' names."""
        return {name: mlp for block in self for name, mlp in block.mlps.items()}

    def linear_shape(self, role: str) -> Shape:
        """The shape of a linear or router."""
        return self.linears[role] if role in self.linears else self.routers[role]

    @cached_property
    def _owners(self) -> dict[str, Block]:
        """The block of each linear and router."""
        hidden = self.hidden_size
        return {role: block for block in self for role in (*block.linears(hidden), *block.routers(hidden))}

    def has_bias(self, role: str) -> bool:
        """Whether a linear or router has a bias."""
        return role in self._owners and self._owners[role].has_bias(role)

    def module_name(self, index: int, role: str) -> str:
        """`attn.q` of layer 3 -> `model.layers.3.self_attn.q_proj`."""
        if role in self.names:
            return self.path(index) + self.names[role]
        expert = roles.expert_of(role)
        return self.path(index) + self.names[role.replace(f".{expert}.", ".{}.")].format(expert)

    def path(self, index: int) -> str:
        """What the names of all tensors of layer `index` begin with: `model.layers.3.`"""
        return f"{self.prefix}.{index if self.number is None else self.number}."

    @cached_property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Linears that read the same input and become one product when their formats agree."""
        return tuple(group for block in self for group in block.fused)

    @cached_property
    def smooth(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(role, roles) in the order in which scales are searched: the outputs of `role` are divided by s, and the
        input columns of `roles` are multiplied by s. This is exact in floating point."""
        return tuple(pair for each in self.blocks for pair in each.block.smooth(each.norm))

    @cached_property
    def input_of(self) -> dict[str, str]:
        """role -> the first of the roles that read the same input, for every linear and router."""
        first = {role: group[0] for block in self for group in block.same_input for role in group}
        return {role: first.get(role, role) for role in (*self.linears, *self.routers)}

    @cached_property
    def num_weights(self) -> int:
        """Weights of all linears that may be quantized."""
        return sum(math.prod(shape) for shape in self.linears.values())

    @cached_property
    def active_weights(self) -> int:
        """The number of these weights that a token is multiplied with."""
        return sum(block.active_weights(self.hidden_size) for block in self)

    def weight_bytes(self, bits: float) -> float:
        """Bytes of the linears at `bits` bits a weight."""
        return self.num_weights * bits / 8

    def flops(self, num_tokens: int, context: float) -> float:
        """Floating-point operations of a forward pass in which each token sees `context` tokens: 2 for every weight and
        token, and those of attention or of the recurrent state."""
        return 2.0 * num_tokens * (self.active_weights + sum(block.products(context) for block in self))

    def activation_bytes(self, *, half: bool = False) -> int:
        """Bytes of a token at the widest point of the layer, all in float32. `half`: linears and attention pass on
        16-bit values, beside a float32 stream. In the worst case all tokens go to one expert."""
        inner = [block.inner_bytes(half=half) for block in self]
        widest = 14 * self.hidden_size + sum(inner) if half else 16 * self.hidden_size + max(inner)
        return max(widest, *(block.expert_bytes(self.hidden_size, half=half) for block in self))

    def places_bytes(self, num_tokens: int, *, half: bool = False) -> int:
        """Bytes of a step while all experts are computed together."""
        return max(block.places_bytes(self.hidden_size, num_tokens, half=half) for block in self)

    @cached_property
    def follows(self) -> bool:
        """See Block.follows."""
        return any(block.follows for block in self)

    def whole(self) -> LayerSpec:
        """See Block.whole."""
        return replace(self, blocks=tuple(replace(each, block=each.block.whole()) for each in self.blocks))

    def choice_bytes(self, length: int) -> int:
        """See Block.choice_bytes."""
        return max(block.choice_bytes(length) for block in self)

    def prompt_bytes(self, length: int) -> int:
        """Bytes that chunks of prompts of up to `length` tokens take beside activations."""
        return max(block.prompt_bytes(length) for block in self)

    @cached_property
    def state(self) -> State:
        """What the layer keeps of a sequence."""
        return self.mixer.state

    @cached_property
    def memory(self) -> Memory | None:
        """What the layer sees of an encoder's states."""
        return next((block.memory for block in self if block.memory is not None), None)

    @property
    def kv(self) -> PagedKV | None:
        """The keys and values that attention reads, if the layer has attention."""
        return self.state if isinstance(self.state, PagedKV) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent state, if the layer has one."""
        return self.state.beside if isinstance(self.state, PagedKV) else self.state

    def kv_token_bytes(self, k: KVDtype, v: KVDtype) -> int:
        """Bytes of one token's keys and values in these storage types, including their parameters."""
        return 0 if self.kv is None else self.kv.token_bytes(k, v)

    @cached_property
    def widest_mlp(self) -> int:
        """The largest intermediate size of the layer's gated MLPs."""
        return max((mlp.intermediate_size for mlp in self.mlps.values()), default=0)

    def part_of(self, role: str) -> int:
        """The part of the layer that the linear `role` begins: 2 i for what block i reads, 2 i + 1 for its last linear.
        Experts are computed as a whole."""
        place = next(i for i, block in enumerate(self) if block is self._owners[role])
        return 2 * place + self.blocks[place].block.ends(role)

    def inner_width(self, place: int) -> int:
        """Width of what the last linear of block `place` reads. 0: there is no single one."""
        out = self.blocks[place].block.out
        return self.linears[out][1] if out else 0

    @property
    def widest_product(self) -> int:
        """Outputs of the largest product: q, k and v, or gate and up, side by side."""
        return max(block.widest_product for block in self)
