"""What a decoder is, as data. A family turns a checkpoint's config.json into one of these; nothing else differs.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.layers.rope_spec import RopeSpec


@dataclass(frozen=True)
class ModelSpec:
    """One dense decoder-only transformer of the Llama kind."""

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

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def linear_shape(self, role: str) -> tuple[int, int]:
        """(out_features, in_features) of a linear's role."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        h, i = self.hidden_size, self.intermediate_size
        return {
            "attn.q": (q, h), "attn.k": (kv, h), "attn.v": (kv, h), "attn.o": (h, q),
            "mlp.gate": (i, h), "mlp.up": (i, h), "mlp.down": (h, i),
        }[role]  # fmt: skip

    def has_bias(self, role: str) -> bool:
        if role == "attn.o":
            return self.o_bias
        return self.attn_bias if role.startswith("attn.") else self.mlp_bias
