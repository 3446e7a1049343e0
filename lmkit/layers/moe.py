"""A mixture of experts: a router sends each token to a few of many gated MLPs.

    x --router--> scores --top k--> the tokens of expert 0 --expert 0--> * score --+
                                    the tokens of expert 1 --expert 1--> * score --+--> sum
    x --shared expert--> * sigmoid(shared router), or 1 ---------------------------+

A token's sum runs over its experts by ascending number, then the shared expert. It does not depend on the other tokens
of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.mlp import GatedMLP
from lmkit.layers.mlp_spec import SCORE_BIAS, MoESpec

TINY = 1e-20  # added to a sum of scores: sigmoids may all be 0


class MoE:
    """The experts of one layer. Roles are `mlp.experts.<number>.gate|up|down` and `mlp.router`, and with a shared
    expert `mlp.shared.gate|up|down` and `mlp.shared_router`. `weights` keeps `mlp.score_bias`.

    `all_tokens` is for calibration: every expert computes every token, so that the observers of its linears see all
    tokens. The output is still that of the chosen experts.
    """

    def __init__(self, spec: MoESpec, weights: Weights, device: str = "cpu") -> None:
        self.spec, self.weights = spec, weights
        self.all_tokens = False
        mlps = {role: GatedMLP(role, mlp, weights, device) for role, mlp in spec.parts.items()}
        self.router = MergedLinear(tuple(spec.routers), weights, device)
        self.shared = mlps.pop("mlp.shared", None)
        self.experts = list(mlps.values())
        self._rms_norm = ops.rms_norm.select(device)
        self._gather = ops.embedding.select(device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        mlps = self.experts if self.shared is None else [*self.experts, self.shared]
        return self.router, *(linear for mlp in mlps for linear in mlp.linears)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the block's contribution float32 [T, hidden]."""
        if norm is not None:
            x = self._rms_norm(x, norm)
        num_experts = self.spec.num_experts
        logits, bias = self.router(x).float(), self.weights.get(SCORE_BIAS)
        assert bias is None or isinstance(bias, Tensor)
        weights, experts = route(logits[:, :num_experts], self.spec, bias, shown=self._num_shown)
        factors, out = weights.flatten(), torch.zeros_like(x, dtype=torch.float32)
        for expert, places in by_expert(experts):
            tokens = places // self._num_shown
            y = self.experts[expert](self._gather(x, tokens).to(x.dtype))
            out.index_add_(0, tokens, y * factors[places, None])
        if self.shared is not None:
            y = self.shared(x)
            out += y * sigmoid(logits[:, num_experts:]) if self.spec.shared_router else y
        return out

    def add_to(self, stream: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None]:
        """As GatedMLP.add_to."""
        return self(x, norm), stream

    @property
    def _num_shown(self) -> int:
        """The number of experts that compute a token."""
        return self.spec.num_experts if self.all_tokens else self.spec.experts_per_token


def route(
    logits: Tensor, moe: MoESpec, bias: Tensor | None = None, *, shown: int | None = None
) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, shown], experts int64 [T, shown]) from logits float32 [T, num_experts].

    Experts are those with the highest scores, see MoESpec; of equal ones the lower numbers win. `shown` (default: all
    that a token has) - experts_per_token more experts follow with weight 0.
    """
    count = moe.experts_per_token
    scores = sigmoid(logits) if moe.sigmoid else logits.softmax(-1)
    wanted = scores if bias is None else scores + bias
    if moe.num_groups > 1:
        wanted = _in_best_groups(wanted, moe)
    experts = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : count if shown is None else shown]
    weights = scores.gather(1, experts)
    weights[:, count:] = 0
    if moe.normalize:
        weights /= weights.sum(-1, keepdim=True) + TINY
    return weights * moe.scale, experts


def _in_best_groups(scores: Tensor, moe: MoESpec) -> Tensor:
    """Scores, those of experts outside a token's groups -inf."""
    groups = scores.unflatten(1, (moe.num_groups, -1))
    best = groups.topk(moe.group_top, -1).values
    ordered = (
        (best[..., 0] + best[..., 1] if moe.group_top == 2 else best[..., 0])
        .sort(dim=-1, descending=True, stable=True)
        .indices
    )
    others = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
    others.scatter_(1, ordered[:, : moe.groups_per_token], False)
    wanted: Tensor = groups.masked_fill(others[..., None], -torch.inf)
    return wanted.flatten(1)


def by_expert(experts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(expert, its places in experts.flatten(), ascending) for each expert that has any, by ascending expert."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    return zip(numbers.tolist(), order.split(counts.tolist()), strict=True)


def sigmoid(x: Tensor) -> Tensor:
    """sigmoid of x, computed as the softmax of x and 0. torch's softmax computes each row alone, while the rounding of
    its sigmoid depends on an element's place among the others."""
    both = torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)
    return both[..., 0].contiguous()
