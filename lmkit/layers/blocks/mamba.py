"""Mamba-2 as a block. `layers.mamba` computes it, `kernels.selective_scan` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lmkit.errors import CheckpointError
from lmkit.layers.blocks.base import Block, Pairs, Shape, check_limits
from lmkit.layers.blocks.state import Recurrent

LIMITS = {"num_heads": 1 << 12, "head_dim": 1 << 12, "state_size": 1 << 12, "num_groups": 1 << 12, "kernel": 1 << 6}


@dataclass(frozen=True)
class MambaSpec(Block):
    """A matrix for each head decays by a factor of each token and takes an outer product (arXiv 2405.21060).

    One linear gives what the output is gated with, the inputs, what a state takes and gives, and the steps of all
    heads. `num_heads / num_groups` neighbouring heads share what a state takes and gives.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int  # tokens that the causal convolution sees
    norm_eps: float  # of the norm inside
    bias: bool = False  # on both linears
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))  # of a step
    normed: bool = True  # the gated output is normalized
    factors: tuple[float, ...] = ()  # of the parts that the first linear gives: gate, inputs, taken, given, steps

    @property
    def width(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def parts(self) -> tuple[int, ...]:
        """Widths of the parts that the first linear gives."""
        taken = self.num_groups * self.state_size
        return self.width, self.width, taken, taken, self.num_heads

    @property
    def projected(self) -> int:
        """Outputs of the first linear."""
        return sum(self.parts)

    @property
    def out(self) -> str:
        return "ssm.out"

    def linears(self, hidden: int) -> dict[str, Shape]:
        return {"ssm.in": (self.projected, hidden), "ssm.out": (hidden, self.width)}

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        heads = dict.fromkeys(("ssm.a_log", "ssm.d", "ssm.dt_bias"), (self.num_heads,))
        return {"ssm.taps": (self.channels, 1, self.kernel), **heads}

    def vectors(self, hidden: int) -> dict[str, int]:
        norm = {"norm.ssm": self.width} if self.normed else {}
        return norm | ({"ssm.taps.bias": self.channels} if self.conv_bias else {})

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (("ssm.in",),)

    def has_bias(self, role: str) -> bool:
        return self.bias

    def smooth(self, norm: str) -> Pairs:
        before = ((norm, ("ssm.in",)),) if norm else ()
        return (*before, ("norm.ssm", ("ssm.out",))) if self.normed else before

    @property
    def state(self) -> Recurrent:
        """The last inputs of the convolution, and a matrix for each head. A draft token keeps its inputs and steps."""
        matrix = self.num_heads, self.state_size, self.head_dim
        return Recurrent((self.channels, self.kernel - 1), matrix, self.channels + self.num_heads)

    def products(self, context: float) -> float:
        """Three products with each matrix, whatever the context is."""
        return 3 * self.width * self.state_size

    @property
    def widest_product(self) -> int:
        return self.projected

    def inner_bytes(self, *, half: bool = False) -> int:
        """What the first linear gives, channels after the convolution, factors of steps, and results."""
        inner = 4 * (self.channels + self.width + 2 * self.num_heads)
        return inner + (2 * (self.projected + self.width) if half else 4 * self.projected)

    def check(self) -> None:
        check_limits(self, LIMITS)
        if self.num_heads % self.num_groups:
            raise CheckpointError(f"config.json: {self.num_heads} heads cannot form {self.num_groups} groups")
        if not (self.norm_eps > 0 and 0 <= self.limits[0] <= self.limits[1]):
            raise CheckpointError(f"config.json: epsilon {self.norm_eps!r}, time_step_limit {self.limits!r} cannot be")

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank computes all of it."""
        return self
