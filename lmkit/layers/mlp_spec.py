"""MLPs as data: one, or a mixture of experts. No torch: a layer's specification holds one of the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(activation(gate(x)) * up(x)). `activation`: silu or gelu_tanh, or clamped_swish, which changes
    up(x) too (ops.gated_activation)."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False  # on gate, up and down

    @property
    def parts(self) -> dict[str, MLPSpec]:
        """The gated MLPs by the prefix of their roles."""
        return {"mlp": self}

    @property
    def routers(self) -> dict[str, int]:
        """The linears that choose the experts of a token, with their numbers of outputs."""
        return {}


@dataclass(frozen=True)
class MoESpec:
    """Experts. A router gives each token a probability for each expert; the `experts_per_token` most probable run.

    The output is the sum of the chosen experts' outputs, each times its probability. A shared expert's output is
    added, times a factor of its own.
    """

    num_experts: int
    experts_per_token: int
    expert: MLPSpec
    normalize: bool = True  # divide the probabilities of the chosen experts by their sum
    shared: MLPSpec | None = None  # one more expert, which computes every token
    router_bias: bool = False
    interleaved: bool = False  # a checkpoint has gate 0, up 0, gate 1, ... of all experts in one tensor: models.fused

    @property
    def parts(self) -> dict[str, MLPSpec]:
        experts = {f"mlp.experts.{i}": self.expert for i in range(self.num_experts)}
        return experts if self.shared is None else experts | {"mlp.shared": self.shared}

    @property
    def routers(self) -> dict[str, int]:
        router = {"mlp.router": self.num_experts}
        return router if self.shared is None else router | {"mlp.shared_router": 1}
