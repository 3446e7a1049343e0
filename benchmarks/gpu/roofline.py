"""What a GPU cannot do better than: bytes over bandwidth, operations over peak. No torch here.

A step of decoding reads every weight and every sequence's keys and values once, and does two operations for each
weight and token. Nothing is said of launches, latency or waves: that is what is lost between a bound and a figure.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}  # of an element
KV_PARAMS = 4  # bytes of scale and minimum of a coded vector


@dataclass(frozen=True)
class Peak:
    """What a machine does at best, as measured on it or as it is said to."""

    bytes_per_s: float
    flops: float  # bfloat16 matmul, a multiply-add is two

    def seconds(self, num_bytes: float, flops: float = 0) -> float:
        """At least so long for a kernel that moves and computes at the same time."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops)


H200 = Peak(4.3e12, 790e12)  # a copy and a bfloat16 matmul, as measured on one


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linear_weights(self) -> int:
        """Of the decoder layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def products(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's merged linears."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate+up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }

    def kv_bytes(self, storage: str) -> float:
        """A token's keys and values of all layers."""
        params = 0 if KV_BYTES[storage] == 2 else KV_PARAMS
        return 2 * self.layers * self.kv_heads * (self.head_dim * KV_BYTES[storage] + params)

    def attention_flops(self, context: float) -> float:
        """Of one token that sees so many keys, all layers."""
        return 4 * context * self.heads * self.head_dim * self.layers


LLAMA_3_8B = Shape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256)
QWEN_2_5_7B = Shape("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064)
LLAMA_3_2_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256)


def bytes_per_weight(bits: int, group_size: int, zero_bits: int = 4) -> float:
    """Of a weight with a float16 scale and a zero for each group."""
    return bits / 8 + (2 + zero_bits / 8) / group_size


W4_G128 = bytes_per_weight(4, 128)


@dataclass(frozen=True)
class Decode:
    """A step in which each of `batch` sequences of `context` tokens computes one more. Dense heads take 2 bytes."""

    shape: Shape
    batch: int
    context: int
    storage: str = "float16"
    weight_bytes: float = W4_G128  # of each weight of the layers

    @property
    def read_weights(self) -> float:
        return self.shape.linear_weights * self.weight_bytes + 2.0 * self.shape.head_weights

    @property
    def read_kv(self) -> float:
        return self.batch * self.context * self.shape.kv_bytes(self.storage)

    @property
    def matmul_flops(self) -> float:
        return 2.0 * (self.shape.linear_weights + self.shape.head_weights) * self.batch

    @property
    def attention_flops(self) -> float:
        return self.batch * self.shape.attention_flops(self.context)

    def seconds(self, peak: Peak) -> float:
        """If reading and computing of the whole step overlap."""
        return peak.seconds(self.read_weights + self.read_kv, self.matmul_flops + self.attention_flops)

    def phase_seconds(self, peak: Peak) -> float:
        """If they overlap within linears and within attention, but these come one after the other."""
        return peak.seconds(self.read_weights, self.matmul_flops) + peak.seconds(self.read_kv, self.attention_flops)

    def tokens_per_s(self, peak: Peak) -> float:
        """By the phases: what kernels of a layer that run in turn cannot exceed."""
        return self.batch / self.phase_seconds(peak)


def prefill_seconds(shape: Shape, tokens: int, peak: Peak) -> float:
    """Of one prompt: only its last token's logits are computed."""
    return prefill_flops(shape, tokens) / peak.flops


def prefill_flops(shape: Shape, tokens: int) -> float:
    return 2.0 * (shape.linear_weights * tokens + shape.head_weights) + shape.attention_flops(tokens / 2) * tokens
