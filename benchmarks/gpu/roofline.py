"""The bounds of a GPU: bytes over bandwidth, operations over peak. This module does not import torch.

A decode step reads every weight and every sequence's keys and values once, and does two operations for each weight and
token. Launches, latency and waves are not modelled: they are the loss between a bound and a figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.kv_dtype import kv_dtype


@dataclass(frozen=True)
class Peak:
    """The peak rates of a machine, measured or specified."""

    bytes_per_s: float
    flops: float  # of a bfloat16 matmul; a multiply-add counts as two

    def seconds(self, num_bytes: float, flops: float = 0) -> float:
        """The least time of a kernel that moves bytes and computes at the same time."""
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
        """The number of weights in the linears of the decoder layers."""
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
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * kv_dtype(storage).row_bytes(self.head_dim)

    def attention_flops(self, context: float) -> float:
        """Operations of one token that sees `context` keys, in all layers."""
        return 4 * context * self.heads * self.head_dim * self.layers


LLAMA_3_8B = Shape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256)
QWEN_2_5_7B = Shape("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064)
LLAMA_3_2_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256)


def bytes_per_weight(bits: int, group_size: int, zero_bits: int = 4) -> float:
    """Bytes of a weight, with a float16 scale and a zero for each group."""
    return bits / 8 + (2 + zero_bits / 8) / group_size


W4_G128 = bytes_per_weight(4, 128)


@dataclass(frozen=True)
class Decode:
    """A step in which each of `batch` sequences of `context` tokens computes one more token. A weight of a dense head
    takes 2 bytes."""

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
        """The time if reading and computing overlap over the whole step."""
        return peak.seconds(self.read_weights + self.read_kv, self.matmul_flops + self.attention_flops)

    def phase_seconds(self, peak: Peak) -> float:
        """The time if they overlap within linears and within attention, but linears and attention do not overlap."""
        return peak.seconds(self.read_weights, self.matmul_flops) + peak.seconds(self.read_kv, self.attention_flops)

    def tokens_per_s(self, peak: Peak) -> float:
        """The rate by the phases. Kernels of a layer that run one after the other cannot exceed it."""
        return self.batch / self.phase_seconds(peak)


def prefill_seconds(shape: Shape, tokens: int, peak: Peak) -> float:
    """The time of one prompt. Only the logits of its last token are computed."""
    return prefill_flops(shape, tokens) / peak.flops


def prefill_flops(shape: Shape, tokens: int) -> float:
    return 2.0 * (shape.linear_weights * tokens + shape.head_weights) + shape.attention_flops(tokens / 2) * tokens
