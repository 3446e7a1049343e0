"""A mixture of experts: a router sends each token to a few of many gated MLPs.

    x --router--> scores --top k--> the tokens of expert 0 --expert 0--> * score --+
                                    the tokens of expert 1 --expert 1--> * score --+--> sum
    x --shared expert--> * sigmoid(shared router), or 1 ---------------------------+

With `beside`, x is the residual stream. The shared expert reads it through the layer's norm, the router and the other
experts through norms of their own. The outputs of the shared expert and of the others are normalized before they are
added, and an expert's score has a stored factor.

A token's sum runs over its experts by ascending number, then the shared expert. It does not depend on the other tokens
of the step. If a kernel can multiply with the linears of many experts, all experts are a few jobs, whichever they are.
Otherwise each expert is called by itself.

A rank may hold a part of the experts. All ranks agree on the experts of each token, compute those that they hold,
exchange the outputs, and add them up in the order above. The result has the bits of one process with all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lmkit.devices import named
from lmkit.kernels import ops
from lmkit.kernels.cpu import workspace
from lmkit.kernels.ops import Norm, Routing
from lmkit.kernels.registry import Implementation
from lmkit.layers.block import At, Forward
from lmkit.layers.blocks.moe import EXPERT_SCALE, LATENT, MAX_PLACES, SCORE_BIAS, MoESpec
from lmkit.layers.linear import LinearsOfExperts, MergedLinear, Weights
from lmkit.layers.mlp import GatedMLP
from lmkit.layers.ranks import Ranks

Together = tuple[LinearsOfExperts, LinearsOfExperts]  # gate and up, and down


class MoE(Forward):
    """The experts of one layer. Roles are `mlp.experts.<number>.gate|up|down` and `mlp.router`, and with a shared
    expert `mlp.shared.gate|up|down` and `mlp.shared_router`. `weights` keeps `mlp.score_bias`.

    `all_tokens` is for calibration: every expert computes every token, so that the observers of its linears see all
    tokens. The output is still that of the chosen experts.
    """

    def __init__(self, spec: MoESpec, weights: Weights, device: str = "cpu") -> None:
        self.spec, self.weights = spec, weights
        self.ranks: Ranks | None = None  # which hold the other experts
        self.shared_ranks: Ranks | None = None  # which hold the other parts of the shared expert
        mlps = {role: GatedMLP(role, mlp, weights, device) for role, mlp in spec.mlps.items()}
        self.router = MergedLinear(tuple(spec.router_sizes), weights, device)
        self.shared = mlps.pop("mlp.shared", None)
        self.experts = list(mlps.values())
        self.latent = [MergedLinear((role,), weights, device) for role in LATENT if spec.latent]
        self.routing = Routing(
            spec.experts_per_token, spec.normalize, spec.sigmoid, spec.num_groups, spec.groups_per_token,
            spec.group_top, spec.scale,
        )  # fmt: skip
        self._in_workspace = not named(device).own_memory
        self._rms_norm = ops.rms_norm.select(device)
        self._gather = ops.embedding.select(device)
        self._route = ops.route.select(device)
        self._places = ops.expert_places.select(device)
        self._sum_places = ops.sum_places.select(device)
        self._add_rows = ops.add_rows.select(device)
        self._add_shared = ops.add_shared.select(device)

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """See Forward. Whole experts are added up here."""
        if self.spec.held is None:
            return split
        self.ranks, self.shared_ranks = ranks, split
        if self.shared is not None:
            self.shared.join(ranks, split)
        return None

    @property
    def activated(self) -> Callable[[Tensor], Tensor]:
        """GatedMLP.activated of any expert."""
        return self.experts[0].activated

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        mlps = self.experts if self.shared is None else [*self.experts, self.shared]
        return self.router, *self.latent, *(linear for mlp in mlps for linear in mlp.linears)

    @cached_property
    def _together(self) -> Together | None:
        """Gate and up, and down, of all experts, once they are packed."""
        return together_of([expert.gate_up for expert in self.experts], [expert.down for expert in self.experts])

    def together(self, num_tokens: int, dtype: torch.dtype) -> Together | None:
        """Gate and up, and down, of all experts, if a step of so many tokens has one product with all of each."""
        linears = self._together if self.router.packed is not None else None
        return suiting(linears, num_tokens * self.spec.experts_per_token / self.spec.num_experts, dtype)

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward. The experts are computed together."""
        used = self._route, self._places, self._sum_places, self._add_shared
        return (("experts", implementation) for implementation in used)

    def __call__(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the block's contribution float32 [T, hidden]."""
        if self.spec.beside:
            assert norm is not None
            return self._beside(x, norm)
        if norm is not None:
            x = self._rms_norm(x, norm)
        weights, experts, shared = self.chosen(x)
        if self.latent:
            into, back = self.latent
            out = back.float32(self._routed(into(x), weights, experts).to(x.dtype))
        else:
            out = self._routed(x, weights, experts)
        if self.shared is not None:
            self._add_shared(out, self._of_shared(x), shared if self.spec.shared_router else None)
        return out

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden], normalized -> (weights float32 [T, k], experts [T, k], the shared router's outputs [T, 1], or
        [T, 0] without one)."""
        num_experts, bias = self.spec.num_experts, self.weights.get(SCORE_BIAS)
        logits = self.router(x).float()
        assert bias is None or isinstance(bias, Tensor)
        weights, experts = self._route(logits[:, :num_experts], self.routing, bias)
        return weights, experts, logits[:, num_experts:]

    def _beside(self, x: Tensor, norm: Norm) -> Tensor:
        """As a call. x and `norm` are those of the shared expert. The others read the stream that it normalizes."""
        read = self._rms_norm(x, norm)
        stream = x if norm.residual is None else norm.residual
        logits = self.router(self._normed("mlp.router_norm", stream, norm, stream.shape[1] ** -0.5)).float()
        weights, experts = self._route(logits, self.routing, None)
        scale = self.weights[EXPERT_SCALE]
        assert isinstance(scale, Tensor)
        out = self._routed(self._normed("mlp.experts_norm", stream, norm), weights * scale.float()[experts], experts)
        out = self._normed("mlp.experts_out_norm", out, replace(norm, dtype=torch.float32))
        shared = self._normed("mlp.shared_out_norm", self._of_shared(read), replace(norm, dtype=torch.float32))
        self._add_shared(out, shared, None)
        return out

    def _normed(self, role: str, x: Tensor, like: Norm, factor: float = 1.0) -> Tensor:
        """x [T, hidden] normalized as `like` says, with the weight of `role`."""
        weight = self.weights[role]
        assert isinstance(weight, Tensor)
        normed: Tensor = self._rms_norm(x, replace(like, weight=weight * factor, residual=None))
        return normed

    def _of_shared(self, x: Tensor) -> Tensor:
        """The shared expert's output."""
        assert self.shared is not None
        shared = self.shared(x)
        return shared if self.shared_ranks is None else self.shared_ranks.sum(shared)

    def _routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The sum of the chosen experts' outputs, times their weights [T, k]."""
        if self.spec.scores_inputs:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        if self.ranks is not None:
            self.ranks.agree(experts)
        together = self.together(len(x), x.dtype)
        if together is not None or self.ranks is not None:
            return self._computed_by_place(x, weights, experts, together)
        return self._computed_apart(x, weights, experts)

    def _computed_by_place(self, x: Tensor, weights: Tensor, experts: Tensor, together: Together | None) -> Tensor:
        out = workspace.empty(*x.shape) if self._in_workspace else torch.empty(x.shape, device=x.device)
        for part in parts_of(experts, self.spec.num_experts, together or ()):
            places = self._places(experts[part], self.spec.num_experts, self.spec.experts)
            if together is not None:
                gate_up, down = together
                y = down(self.activated(gate_up(x[part], places, by_token=True)), places)
            else:
                y = self._each_alone(x[part], experts[part])
            if self.ranks is not None:
                self.ranks.exchange(y, places)
            self._sum_places(y, weights[part], places, out[part])
        return out

    def _each_alone(self, x: Tensor, experts: Tensor) -> Tensor:
        """The outputs of the held experts [T * k, hidden], in the order of places. Other rows mean nothing."""
        y, end = torch.empty(experts.numel(), x.shape[1], device=x.device), 0
        for expert, places in by_expert(experts):
            start, end = end, end + len(places)
            if expert in self.spec.experts:
                mlp = self.experts[expert - self.spec.experts.start]
                y[start:end] = mlp(self._gather(x, places // experts.shape[1]).to(x.dtype))
        return y

    def _computed_apart(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if self.all_tokens:
            everyone = torch.zeros(len(x), self.spec.num_experts, device=x.device)
            weights = everyone.scatter_(1, experts, weights)
            experts = torch.arange(self.spec.num_experts, device=x.device).expand_as(weights)
        factors, out = weights.flatten(), torch.zeros_like(x, dtype=torch.float32)
        for expert, places in by_expert(experts):
            tokens = places // experts.shape[1]
            y = self.experts[expert](self._gather(x, tokens).to(x.dtype))
            self._add_rows(out, tokens, y, factors[places])
        return out


def together_of(first: list[MergedLinear], last: list[MergedLinear]) -> Together | None:
    """The first and the last linears of all experts as two products, if a kernel can multiply with all of each."""
    up, down = LinearsOfExperts.of(first), LinearsOfExperts.of(last)
    return None if up is None or down is None else (up, down)


def suiting(linears: Together | None, tokens: float, dtype: torch.dtype) -> Together | None:
    """The products, if they are the fast way for so many tokens of an expert on average."""
    return linears if linears is not None and all(x.suits(tokens, dtype) for x in linears) else None


def parts_of(experts: Tensor, num_experts: int, together: Iterable[LinearsOfExperts]) -> Iterator[slice]:
    """The tokens of `experts` [T, k], as many at a time as the experts' products take."""
    limits = [linears.max_rows * num_experts for linears in together if linears.max_rows is not None]
    step = max(1, min([MAX_PLACES, *limits]) // experts.shape[1])
    return (slice(start, start + step) for start in range(0, len(experts), step))


def mixtures_of(blocks: Iterable[Forward]) -> list[MoE]:
    """The mixtures of experts among blocks."""
    return [part for block in blocks for part in block.members if isinstance(part, MoE)]


def by_expert(experts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(expert, its places in experts.flatten(), ascending) for each expert that has any, by ascending expert."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    return zip(numbers.tolist(), order.split(counts.tolist()), strict=True)
