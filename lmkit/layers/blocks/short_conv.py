"""A gated short convolution as a block. `layers.short_conv` computes it, `kernels.short_conv` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lmkit.layers.blocks.base import Block, Pairs, Shape, check_limits
from lmkit.layers.blocks.state import Recurrent

LIMITS = {"channels": 1 << 17, "kernel": 1 << 6}


@dataclass(frozen=True)
class ShortConvSpec(Block):
    """Each channel sees its last `kernel` inputs (LFM2, arXiv 2511.23404)."""

    channels: int
    kernel: int
    bias: bool = False  # on both linears and on the convolution

    @property
    def out(self) -> str:
        return "conv.out"

    def linears(self, hidden: int) -> dict[str, Shape]:
        return {"conv.in": (3 * self.channels, hidden), "conv.out": (hidden, self.channels)}

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        return {"conv.taps": (self.channels, 1, self.kernel)}

    def vectors(self, hidden: int) -> dict[str, int]:
        return {"conv.taps.bias": self.channels} if self.bias else {}

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (("conv.in",),)

    def has_bias(self, role: str) -> bool:
        return self.bias

    def smooth(self, norm: str) -> Pairs:
        return ((norm, ("conv.in",)),) if norm else ()

    @property
    def state(self) -> Recurrent:
        """The last inputs of the convolution. A draft token keeps its own."""
        return Recurrent((self.channels, self.kernel - 1), (0, 0, 0), self.channels)

    def products(self, context: float) -> float:
        return (self.kernel + 2) * self.channels

    @property
    def widest_product(self) -> int:
        return 3 * self.channels

    def inner_bytes(self, *, half: bool = False) -> int:
        """What the first linear gives, and the results."""
        return (2 if half else 4) * 4 * self.channels

    def check(self) -> None:
        check_limits(self, LIMITS)

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank computes all of it."""
        return self
