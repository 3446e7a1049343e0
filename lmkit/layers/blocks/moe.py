"""A mixture of experts as a block. `layers.moe` computes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Block, Pairs, Shape, check_limits
from lmkit.layers.blocks.mlp import LIMITS as MLP_LIMITS
from lmkit.layers.blocks.mlp import MLPSpec, inner_pairs, inputs_of, of_parts

SCORE_BIAS = "mlp.score_bias"
GPU_ROWS = 256  # of an expert on average: with more, a GPU calls each expert by itself
EXPERT_SCALE = "mlp.expert_scale"
BESIDE_NORMS = ("mlp.router_norm", "mlp.experts_norm", "mlp.shared_out_norm", "mlp.experts_out_norm")
MAX_PLACES = 4096  # pairs (token, expert) that are computed together; more share no weights, and need memory
LIMITS = {"num_experts": 1 << 12, "experts_per_token": 1 << 8, "num_groups": 1 << 12}
SHARED = "mlp.shared"
LATENT = "mlp.latent_in", "mlp.latent_out"


@dataclass(frozen=True)
class MoESpec(Block):
    """The output is the sum of the chosen experts' outputs, each times its score. A shared expert's output is added.

    Scores are the softmax of the router's outputs, or with `sigmoid` their sigmoid. With `score_bias`, a bias for each
    expert, which training has balanced, is added for the choice alone. With several groups of neighbouring experts, a
    token has only experts of the `groups_per_token` groups whose `group_top` highest scores have the largest sums.
    """

    num_experts: int
    experts_per_token: int
    expert: MLPSpec
    normalize: bool = True  # divide the scores of the chosen experts by their sum
    sigmoid: bool = False
    score_bias: bool | None = None  # None = as `sigmoid` says
    num_groups: int = 1
    groups_per_token: int = 1
    group_top: int = 2  # how many scores of a group are added to compare it with other groups
    scale: float = 1.0  # a factor on the scores of the chosen experts
    scores_inputs: bool = False  # an expert's input has its score as a factor, not its output; of one expert a token
    shared: MLPSpec | None = None  # one more expert, which computes every token
    shared_router: bool = True  # the shared expert's output has a factor of its own, the sigmoid of one more output
    beside: bool = False  # router, experts and shared expert have norms of their own, as in Gemma 4 (layers.moe)
    router_bias: bool = False
    interleaved: bool = False  # a checkpoint has gate 0, up 0, gate 1, ... of all experts in one tensor: models.fused
    latent: int = 0  # > 0: experts read a linear's outputs of this width, and another one leads their sum back
    held: range | None = None  # the experts of a rank (models.shard); None = all

    @property
    def experts(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held

    @property
    def mlps(self) -> dict[str, MLPSpec]:
        experts = {f"mlp.experts.{i}": self.expert for i in self.experts}
        return experts if self.shared is None else experts | {SHARED: self.shared}

    @property
    def router_sizes(self) -> dict[str, int]:
        """The routers with their numbers of outputs."""
        router = {"mlp.router": self.num_experts}
        return router | {"mlp.shared_router": 1} if self.shared and self.shared_router else router

    def ends(self, role: str) -> bool:
        return role.endswith(".down") or role == LATENT[1]

    def linears(self, hidden: int) -> dict[str, Shape]:
        if not self.latent:
            return of_parts(self.mlps, hidden)
        shared = {SHARED: self.shared} if self.shared else {}
        experts = {name: mlp for name, mlp in self.mlps.items() if name != SHARED}
        around = dict(zip(LATENT, ((self.latent, hidden), (hidden, self.latent)), strict=True))
        return of_parts(experts, self.latent) | of_parts(shared, hidden) | around

    def routers(self, hidden: int) -> dict[str, Shape]:
        return {role: (size, hidden) for role, size in self.router_sizes.items()}

    def vectors(self, hidden: int) -> dict[str, int]:
        norms = dict.fromkeys(BESIDE_NORMS, hidden) | {EXPERT_SCALE: self.num_experts} if self.beside else {}
        has_bias = self.sigmoid if self.score_bias is None else self.score_bias
        return norms | ({SCORE_BIAS: self.num_experts} if has_bias else {})

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        around = tuple((role,) for role in LATENT) if self.latent else ()
        return (*(inputs_of(name, mlp) for name, mlp in self.mlps.items()), *around)

    def has_bias(self, role: str) -> bool:
        if role in self.router_sizes:
            return self.router_bias
        if role in LATENT:
            return False
        return self.mlps[role.rpartition(".")[0]].bias

    @property
    def gguf_names(self) -> Mapping[str, str]:
        """A dense MLP beside experts stands in the place of a shared expert."""
        return {f"{SHARED}.{part}": f"ffn_{part}" for part in ("gate", "up", "down")} if self.beside else {}

    @property
    def same_input(self) -> tuple[tuple[str, ...], ...]:
        """An expert reads the tokens that are sent to it. The router and the shared expert read all tokens."""
        if self.beside:
            return self.fused
        return (*self.fused, (*self.router_sizes, *self._reading_all))

    @property
    def _reading_all(self) -> tuple[str, ...]:
        """Linears, beside routers, that read all tokens."""
        shared = inputs_of(SHARED, self.shared) if self.shared else ()
        return (*shared, LATENT[0]) if self.latent else shared

    def smooth(self, norm: str) -> Pairs:
        """Routers read the norm's output. They are multiplied too, or tokens would go to other experts."""
        every = (role for name, mlp in self.mlps.items() for role in inputs_of(name, mlp))
        readers = (*self.router_sizes, *(self._reading_all if self.latent else every))
        before = ((norm, readers),) if norm and not self.beside else ()
        return (*before, *inner_pairs(self.mlps))

    def active_weights(self, hidden: int) -> int:
        experts = {name: mlp for name, mlp in self.mlps.items() if name != SHARED}
        of_experts = sum(math.prod(shape) for shape in of_parts(experts, self.latent or hidden).values())
        shared = 0 if self.shared is None else self.shared.active_weights(hidden)
        return shared + 2 * self.latent * hidden + of_experts * self.experts_per_token // self.num_experts

    @property
    def widest_inner(self) -> int:
        """The largest intermediate size of the experts."""
        return max(mlp.intermediate_size for mlp in self.mlps.values())

    @property
    def widest_product(self) -> int:
        return 2 * self.widest_inner

    def inner_bytes(self, *, half: bool = False) -> int:
        return (2 if half else 4) * 3 * self.widest_inner

    def expert_bytes(self, hidden: int, *, half: bool = False) -> int:
        """The tokens are gathered, and the expert's output is added."""
        per_stream, per_inner = (24, 6) if half else (32, 12)
        per_expert = 32 if self.sigmoid or self.score_bias else 16  # its scores, and those by which it is chosen
        return per_stream * hidden + per_inner * self.widest_inner + per_expert * self.num_experts

    def places_bytes(self, hidden: int, num_tokens: int, *, half: bool = False) -> int:
        """On a CPU, all in float32: the stream, and for each pair of a token and an expert inputs, activated gates
        before and after rounding, and outputs. `half`: on a GPU the gates have 16 bits. Steps with more than GPU_ROWS
        tokens of an expert call each expert by itself (`expert_bytes`)."""
        inner = self.expert.intermediate_size
        if half:
            num_tokens = min(num_tokens, GPU_ROWS * self.num_experts // self.experts_per_token)
        places = min(num_tokens * self.experts_per_token, MAX_PLACES)
        pair = 4 * hidden + 2 * inner if half else 8 * (hidden + inner)
        return 24 * num_tokens * hidden + places * pair

    def check(self) -> None:
        check_limits(self, LIMITS, "experts: ")
        for mlp in (self.expert, self.shared or self.expert):
            check_limits(mlp, MLP_LIMITS, "experts: ")
        if self.experts_per_token > self.num_experts:
            raise CheckpointError(
                f"config.json: a token cannot have {self.experts_per_token} of {self.num_experts} experts"
            )
        if self.num_groups > 1:
            size, rest = divmod(self.num_experts, self.num_groups)
            most = self.groups_per_token * size
            if rest or size < self.group_top or not self.experts_per_token <= most <= self.num_experts:
                raise CheckpointError(
                    f"config.json: {self.experts_per_token} experts a token cannot come from {self.groups_per_token} "
                    f"of {self.num_groups} groups of {self.num_experts} experts"
                )

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """With `ep` above 1 experts are whole, and no rank has more than rank 0, for which memory is planned."""
        part = self
        if self.latent and max(tp, ep) > 1:
            raise UnsupportedError(
                "experts with moe_latent_size are not shared out over processes; leave out tp and ep"
            )
        if ep > 1:
            if ep > self.num_experts:
                raise UnsupportedError(
                    f"ep={ep}: a layer has {self.num_experts} experts, and a rank needs one; use a smaller ep"
                )
            start, end = (-(-self.num_experts * number // ep) for number in (rank, rank + 1))
            part = replace(part, held=range(start, end))
        if tp > 1 and self.beside:
            raise UnsupportedError(f"tp={tp}: experts beside a dense MLP are not split over processes; use ep")
        expert = self.expert.share(rank, tp, ep) if ep == 1 else self.expert
        return replace(part, expert=expert, shared=self.shared and self.shared.share(rank, tp, ep))


def mixture_of(blocks: Iterable[Block]) -> MoESpec | None:
    """The mixture of experts among a layer's blocks."""
    return next((part for block in blocks for part in block.members if isinstance(part, MoESpec)), None)
