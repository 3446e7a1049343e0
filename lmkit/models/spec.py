"""What a decoder is, as data. A family turns a checkpoint's config.json into one of these; nothing else differs.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmkit.errors import ConfigError
from lmkit.layers.moe_spec import MoESpec
from lmkit.layers.rope_spec import RopeSpec


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer of the Llama kind, its MLPs dense or, in some layers, mixtures of experts."""

    architecture: str  # as in config.json, for messages
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    dtype: str  # of the checkpoint's dense weights: float32, bfloat16 or float16
    tie_embeddings: bool = False
    attn_bias: bool = False  # on q, k and v
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    windows: tuple[int, ...] = ()  # sliding window per layer, 0 = full; empty = full everywhere
    attention_sinks: int = 0  # first tokens that sliding windows still see
    moe: MoESpec | None = None

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def with_sinks(self, count: int) -> ModelSpec:
        """The same with so many attention sinks. Raises ConfigError if no layer has a sliding window to add them to."""
        if count and not any(self.windows):
            raise ConfigError(f"attention_sinks={count}: no layer of this {self.architecture} has a sliding window")
        return replace(self, attention_sinks=count)

    def sparse(self, layer: int) -> MoESpec | None:
        """The experts of a layer, if it has any."""
        return self.moe if self.moe is not None and self.moe.layers[layer] else None

    def linear_shape(self, role: str) -> tuple[int, int]:
        """(out_features, in_features) of a linear's role."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        h, i = self.hidden_size, self.mlp_size(role)
        shapes = {
            "attn.q": (q, h), "attn.k": (kv, h), "attn.v": (kv, h), "attn.o": (h, q),
            "gate": (i, h), "up": (i, h), "down": (h, i),
        }  # fmt: skip
        if self.moe is not None:
            shapes |= {"mlp.router": (self.moe.num_experts, h), "mlp.shared_router": (1, h)}
        return shapes[role] if role in shapes else shapes[role.rpartition(".")[2]]

    def mlp_size(self, role: str) -> int:
        """The width of the gated MLP of which `role` is a linear."""
        if self.moe is not None and role.startswith("mlp.experts."):
            return self.moe.intermediate_size
        if self.moe is not None and role.startswith("mlp.shared."):
            return self.moe.shared_intermediate_size
        return self.intermediate_size

    def has_bias(self, role: str) -> bool:
        if role == "attn.o":
            return self.o_bias
        return self.attn_bias if role.startswith("attn.") else self.mlp_bias
