"""The MLP as a block, and the vector of each token for each layer as another. `layers.mlp` and `layers.per_layer`
compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.base import Block, Pairs, Shape, check_limits

UNGATED = ("relu", "gelu", "relu2")  # activations, as in kernels.ops
APART = ("gelu_exact",)  # activations of gates that are computed after the product
CURVED = ("clamped_swish", "gelu", "relu2")  # activations that are not linear in up(x)
LIMITS = {"intermediate_size": 1 << 19}


@dataclass(frozen=True)
class MLPSpec(Block):
    """A gated MLP: down(activation(gate(x)) * up(x)). `activation`: silu or gelu_tanh, or clamped_swish, which changes
    up(x) too (ops.gated_activation), or one of APART (ops.multiply_gates). With one of UNGATED there is no gate:
    down(relu(up(x)))."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False  # on gate, up and down
    role: str = "mlp"  # before the roles of its linears: an expert that is a block by itself has its own

    @property
    def inputs(self) -> tuple[str, ...]:
        """The last parts of the roles that read x."""
        return ("up",) if self.activation in UNGATED else ("gate", "up")

    @property
    def mlps(self) -> dict[str, MLPSpec]:
        return {self.role: self}

    @property
    def out(self) -> str:
        return f"{self.role}.down"

    def linears(self, hidden: int) -> dict[str, Shape]:
        return of_parts(self.mlps, hidden)

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return tuple(inputs_of(name, mlp) for name, mlp in self.mlps.items())

    def has_bias(self, role: str) -> bool:
        return self.bias

    def smooth(self, norm: str) -> Pairs:
        before = ((norm, inputs_of(self.role, self)),) if norm else ()
        return (*before, *inner_pairs(self.mlps))

    @property
    def in_order(self) -> bool:
        return True

    @property
    def widest_product(self) -> int:
        return 2 * self.intermediate_size

    def inner_bytes(self, *, half: bool = False) -> int:
        return (2 if half else 4) * 3 * self.intermediate_size

    def check(self) -> None:
        check_limits(self, LIMITS)

    def share(self, rank: int, tp: int, ep: int) -> Self:
        if self.intermediate_size % tp:
            raise UnsupportedError(f"tp={tp}: an MLP of {self.intermediate_size} cannot be shared out evenly")
        return replace(self, intermediate_size=self.intermediate_size // tp)


def of_parts(mlps: dict[str, MLPSpec], hidden: int) -> dict[str, Shape]:
    """Shapes of the linears of MLPs by role."""
    shapes: dict[str, Shape] = {}
    for name, mlp in mlps.items():
        inner = mlp.intermediate_size
        shapes |= {f"{name}.{part}": (inner, hidden) for part in mlp.inputs} | {f"{name}.down": (hidden, inner)}
    return shapes


def inputs_of(name: str, mlp: MLPSpec) -> tuple[str, ...]:
    """The roles of an MLP's linears that read its input."""
    return tuple(f"{name}.{part}" for part in mlp.inputs)


def inner_pairs(mlps: dict[str, MLPSpec]) -> Pairs:
    """The scales that may pass from up to down: not through two activations that are not linear in up(x)."""
    return tuple((f"{name}.up", (f"{name}.down",)) for name, mlp in mlps.items() if mlp.activation not in CURVED)


@dataclass(frozen=True)
class PerLayerSpec(Block):
    """A vector of each token for each layer, which it adds as far as the residual stream opens a gate (Gemma 3n, 4)."""

    width: int
    activation: str

    def linears(self, hidden: int) -> dict[str, Shape]:
        return {"per_layer.gate": (self.width, hidden), "per_layer.out": (hidden, self.width)}

    @property
    def unrounded(self) -> tuple[str, ...]:
        return "per_layer.gate", "per_layer.out"

    @property
    def token_width(self) -> int:
        return self.width

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank has all of it."""
        return self
