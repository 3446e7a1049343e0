"""MLPs as data: one, or a mixture of experts. No torch: a layer's specification holds one of the two."""

from __future__ import annotations

from dataclasses import dataclass

SCORE_BIAS = "mlp.score_bias"
UNGATED = ("relu", "gelu")  # activations, see ops.ungated_activation
GPU_ROWS = 256  # of an expert on average: with more, a GPU calls each expert by itself
EXPERT_SCALE = "mlp.expert_scale"
BESIDE_NORMS = ("mlp.router_norm", "mlp.experts_norm", "mlp.shared_out_norm", "mlp.experts_out_norm")
MAX_PLACES = 4096  # pairs (token, expert) that are computed together; more share no weights, and need memory


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(activation(gate(x)) * up(x)). `activation`: silu or gelu_tanh, or clamped_swish, which changes
    up(x) too (ops.gated_activation). With relu or gelu there is no gate: down(relu(up(x)))."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False  # on gate, up and down

    @property
    def inputs(self) -> tuple[str, ...]:
        """The last parts of the roles that read x."""
        return ("up",) if self.activation in UNGATED else ("gate", "up")

    @property
    def parts(self) -> dict[str, MLPSpec]:
        """The gated MLPs by the prefix of their roles."""
        return {"mlp": self}

    @property
    def routers(self) -> dict[str, int]:
        """The linears that choose the experts of a token, with their numbers of outputs."""
        return {}

    def vectors(self, hidden: int) -> dict[str, int]:
        """Sizes of other vectors of a stream of this width, by role."""
        return {}


@dataclass(frozen=True)
class MoESpec:
    """Experts. A router gives each token a score for each expert; the `experts_per_token` with the highest ones run.

    The output is the sum of the chosen experts' outputs, each times its score. A shared expert's output is added.

    Scores are the softmax of the router's outputs, or with `sigmoid` their sigmoid. A bias for each expert, which
    training has balanced, is then added for the choice alone. With several groups of neighbouring experts, a token has
    only experts of the `groups_per_token` groups whose `group_top` highest scores have the largest sums.
    """

    num_experts: int
    experts_per_token: int
    expert: MLPSpec
    normalize: bool = True  # divide the scores of the chosen experts by their sum
    sigmoid: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_top: int = 2  # how many scores of a group are added to compare it with other groups
    scale: float = 1.0  # a factor on the scores of the chosen experts
    shared: MLPSpec | None = None  # one more expert, which computes every token
    shared_router: bool = True  # the shared expert's output has a factor of its own, the sigmoid of one more output
    beside: bool = False  # router, experts and shared expert have norms of their own, as in Gemma 4 (layers.moe)
    router_bias: bool = False
    interleaved: bool = False  # a checkpoint has gate 0, up 0, gate 1, ... of all experts in one tensor: models.fused
    held: range | None = None  # the experts of a rank (models.shard); None = all

    @property
    def experts(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held

    @property
    def parts(self) -> dict[str, MLPSpec]:
        experts = {f"mlp.experts.{i}": self.expert for i in self.experts}
        return experts if self.shared is None else experts | {"mlp.shared": self.shared}

    @property
    def routers(self) -> dict[str, int]:
        router = {"mlp.router": self.num_experts}
        return router | {"mlp.shared_router": 1} if self.shared and self.shared_router else router

    def vectors(self, hidden: int) -> dict[str, int]:
        norms = dict.fromkeys(BESIDE_NORMS, hidden) | {EXPERT_SCALE: self.num_experts} if self.beside else {}
        return norms | ({SCORE_BIAS: self.num_experts} if self.sigmoid else {})
