"""What a block of a layer says of itself. A layer is a list of blocks, each of which adds to the residual stream.

Loader, memory plan, ranks, calibration and reports read these answers, and know no block by name. No torch here: the
forward of each block is in `lmkit.layers`, and `layers.forward` has the table of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.state import Memory, State
from lmkit.layers.rope_spec import RopeSpec

Shape = tuple[int, int]  # (out_features, in_features)
Pairs = tuple[tuple[str, tuple[str, ...]], ...]


class Heads(NamedTuple):
    """The heads of attention, as the attention op sees them."""

    queries: int
    kv: int
    dim: int


class Borrowed(NamedTuple):
    """Weights that a checkpoint keeps with one of the layers that have them. Each use may add something to them."""

    layer: int
    use: int
    roles: tuple[str, ...]


class ValueHeads(NamedTuple):
    """Rows of a weight, or its inputs, that belong to value heads, several of which have the same key head."""

    groups: int  # key heads
    rows: int  # of a value head
    first: int = 0  # rows before them
    inputs: bool = False


class InnerMLP(Protocol):
    """What a block says of a gated MLP in it: blocks.mlp.MLPSpec."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Block:
    """The answers of a block without linears, state or heads. `hidden`: the width of the residual stream.

    Roles name weights: models.roles.
    """

    @property
    def members(self) -> tuple[Block, ...]:
        """The blocks that it is made of: itself, but for ParallelSpec."""
        return (self,)

    def having(self, **changes: Any) -> Self:
        """The block with other fields. Those of ParallelSpec are its mixer's."""
        return replace(self, **changes)

    # What is loaded.

    def linears(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the linears that may be quantized, by role."""
        return {}

    def routers(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the linears that choose the experts of a token, by role. They stay dense."""
        return {}

    def vectors(self, hidden: int) -> dict[str, int]:
        """Sizes of the weights of norms inside the block, and of other vectors, by role."""
        return {}

    @property
    def out(self) -> str:
        """The last linear, whose results are added to the stream. Empty if there is no single one."""
        return ""

    def ends(self, role: str) -> bool:
        """Whether a linear's results are what the block gives, or a part of it."""
        return role == self.out

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, by role. They stay dense, in float32."""
        return {}

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Linears that read the same input and become one product when their formats agree."""
        return ()

    def has_bias(self, role: str) -> bool:
        """Whether one of the linears or routers has a bias."""
        return False

    @property
    def rows_of_heads(self) -> dict[str, int]:
        """Rows of a head in the weights that have some for each head, by role."""
        return {}

    @property
    def row_groups(self) -> dict[str, int]:
        """Linears that a checkpoint may keep with another one, so many equal groups of rows in turns, by role."""
        return {}

    @property
    def value_heads(self) -> Mapping[str, ValueHeads]:
        """Weights of value heads that share key heads, by role. A file may have the heads in another order."""
        return {}

    @property
    def pair_order(self) -> tuple[int, ...]:
        """The elements of a stored head of q or k in the order of ops.rope_append, where the elements of a pair are
        half the rotary part apart. Empty if they are stored so."""
        return ()

    @property
    def gguf_names(self) -> Mapping[str, str]:
        """Names in GGUF files that are otherwise than those of other blocks, by role."""
        return {}

    # What calibration and quantization may do.

    @property
    def same_input(self) -> tuple[tuple[str, ...], ...]:
        """Linears and routers that read the same input."""
        return self.fused

    @property
    def unrounded(self) -> tuple[str, ...]:
        """Linears that are never rounded: they are small, and every later state depends on them."""
        return ()

    def smooth(self, norm: str) -> Pairs:
        """(role, roles) in the order in which scales are searched: the outputs of `role` are divided by s, and the
        input columns of `roles` are multiplied by s. This is exact in floating point. `norm`: the role of the norm
        before the block, or an empty text."""
        return ()

    # What it keeps and costs.

    @property
    def state(self) -> State:
        """What the block keeps of a sequence between steps."""
        return None

    @property
    def memory(self) -> Memory | None:
        """What the block sees of an encoder's states."""
        return None

    @property
    def heads(self) -> Heads | None:
        return None

    @property
    def rotary(self) -> RopeSpec | None:
        """How heads are turned."""
        return None

    @property
    def scores(self) -> AttentionSpec | None:
        """How queries see keys."""
        return None

    @property
    def mlps(self) -> Mapping[str, InnerMLP]:
        """The gated MLPs, by the prefix of their linears' names."""
        return {}

    @property
    def token_width(self) -> int:
        """Width of the vector of each token that the block reads (layers.per_layer)."""
        return 0

    @property
    def reads_embeddings(self) -> bool:
        """Whether the block reads a token's embedding beside the stream."""
        return False

    @property
    def borrowed(self) -> Borrowed | None:
        """Weights that a checkpoint keeps once for several layers (models.fused)."""
        return None

    @property
    def in_order(self) -> bool:
        """Whether each step computes the linears once and in the order of `linears`."""
        return False

    def active_weights(self, hidden: int) -> int:
        """The number of weights of linears that a token is multiplied with."""
        return sum(math.prod(shape) for shape in self.linears(hidden).values())

    def products(self, context: float) -> float:
        """Multiply-adds of a token besides those with weights, where it sees `context` tokens."""
        return 0.0

    @property
    def widest_product(self) -> int:
        """Outputs of the largest product: linears of the same input, side by side."""
        return 0

    def inner_bytes(self, *, half: bool = False) -> int:
        """Bytes of a token at the block's widest point beside the residual stream, all in float32. `half`: linears and
        attention pass on 16-bit values."""
        return 0

    def expert_bytes(self, hidden: int, *, half: bool = False) -> int:
        """Bytes of a token, with the stream, if all tokens go to one expert."""
        return 0

    def places_bytes(self, hidden: int, num_tokens: int, *, half: bool = False) -> int:
        """Bytes of a step while all experts are computed together."""
        return 0

    @property
    def chosen_keys(self) -> int:
        """Keys that its indexer chooses for a query. 0: a query sees all."""
        return 0

    @property
    def follows(self) -> bool:
        """Whether it reads which keys an earlier layer has chosen in the same step."""
        return False

    def whole(self) -> Self:
        """The block where it sees all keys, in contexts in which its indexer would choose all."""
        return self

    def choice_bytes(self, length: int) -> int:
        """Bytes that the choice of keys takes in contexts of up to `length` tokens beside activations."""
        return 0

    def prompt_bytes(self, length: int) -> int:
        """Bytes that chunks of prompts of up to `length` tokens take beside activations."""
        return 0

    # What it demands.

    def check(self) -> None:
        """Raise CheckpointError for impossible sizes: config.json is untrusted."""

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """The part of rank `rank`, where `tp` ranks share linears and `ep` ranks experts (models.shard). Raises
        UnsupportedError if the block cannot be shared out so."""
        if tp > 1:
            raise UnsupportedError(f"tp={tp}: this model's layers are not split over processes; use tp=1")
        return self


@dataclass(frozen=True)
class Residual:
    """x + block(norm(x)). Each norm is a role, or an empty text if there is none."""

    block: Block
    norm: str = ""
    norm_out: str = ""  # of what the block gives: x + norm_out(block(x))
    norm_sum: str = ""  # of the sum: norm_sum(x + block(x))
    scale: str = ""  # a stored number that the sum is multiplied with

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(role for role in (self.norm, self.norm_out, self.norm_sum) if role)


def two_blocks(
    mixer: Block, mlp: Block, *, pre_norms: bool = True, post_norms: bool = False, stream_norms: bool = False
) -> tuple[Residual, ...]:
    """A transformer's layer. Norms stand before both blocks, as in Llama: x + attn(norm(x)), then x + mlp(norm(x)).

    With `post_norms` they also stand after both, as in Gemma 2: x + norm(attn(norm(x))), then x + norm(mlp(norm(x))).
    Without `pre_norms` they stand only there, as in OLMo 2: x + norm(attn(x)), then x + norm(mlp(x)). With
    `stream_norms` the sum is normalized, as in OPT-350m: norm(x + attn(x)), then norm(x + mlp(x)).
    """

    def residual(block: Block, role: str) -> Residual:
        after = f"{role}_out" if post_norms else ""
        return Residual(block, role if pre_norms else "", after, role if stream_norms else "")

    return residual(mixer, "norm.attn"), residual(mlp, "norm.mlp")


def check_limits(spec: object, limits: Mapping[str, int], what: str = "") -> None:
    """Raise CheckpointError for a field that is not a whole number from 1 to its limit."""
    for name, limit in limits.items():
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise CheckpointError(f"config.json: {what}{name} = {value!r} is not in 1 .. {limit}")


def check_rope(rope: RopeSpec, head_dim: int) -> None:
    """Raise CheckpointError for heads that cannot be rotated so."""
    if head_dim % 2 or rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= head_dim:
        raise CheckpointError(f"config.json: head_dim {head_dim} with rotary part {rope.rotary_dim} cannot be rotated")
    if not (rope.theta > 1 and rope.factor > 0):
        raise CheckpointError(f"config.json: rope_theta {rope.theta!r}, factor {rope.factor!r} cannot be")
    for factors in (rope.short_factor, rope.long_factor):
        if rope.kind == "longrope" and (len(factors) != rope.rotary_dim // 2 or min(factors) <= 0):
            count = rope.rotary_dim // 2
            raise CheckpointError(f"config.json: LongRoPE needs {count} positive factors, short and long ones")


def check_split(tp: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise UnsupportedError if heads cannot be shared out evenly. If there are fewer KV heads than ranks, ranks share
    them."""
    if num_heads % tp:
        raise UnsupportedError(f"tp={tp}: {num_heads} attention heads cannot be shared out evenly")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise UnsupportedError(f"tp={tp}: {num_kv_heads} KV heads cannot be shared out evenly")
