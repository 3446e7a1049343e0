"""Reference of what a mixture of experts needs beside its linears. Formulas and shapes: lmkit.kernels.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import TINY, Places, Routing
from lmkit.kernels.registry import implements


@implements(ops.route, "reference", device="any")
def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = sigmoid(logits) if routing.sigmoid else logits.softmax(-1)
    wanted = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        wanted = _in_best_groups(wanted, routing)
    best = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : routing.experts_per_token]
    experts = best.sort(dim=-1).values
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights /= weights.sum(-1, keepdim=True) + TINY
    return weights * routing.scale, experts


def _in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Scores, those of experts outside a token's groups -inf."""
    groups = scores.unflatten(1, (routing.num_groups, -1))
    best = groups.topk(routing.group_top, -1).values
    sums = best[..., 0] + best[..., 1] if routing.group_top == 2 else best[..., 0]
    ordered = sums.sort(dim=-1, descending=True, stable=True).indices
    others = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
    others.scatter_(1, ordered[:, : routing.groups_per_token], False)
    wanted: Tensor = groups.masked_fill(others[..., None], -torch.inf)
    return wanted.flatten(1)


@implements(ops.expert_places, "reference", device="any")
def expert_places(experts: Tensor, num_experts: int, held: range) -> Places:
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    entries = torch.stack([numbers - held.start, ends - counts, ends], 1)
    entries = entries[(numbers >= held.start) & (numbers < held.stop)]
    active = torch.zeros(1 + 3 * min(len(held), len(flat)), dtype=torch.int64, device=experts.device)
    active[0] = len(entries)
    active[1 : 1 + entries.numel()] = entries.flatten()
    return Places(order // experts.shape[1], order.argsort().view_as(experts), active)


@implements(ops.sum_places, "reference", device="any")
def sum_places(y: Tensor, weights: Tensor, places: Places, out: Tensor) -> None:
    out.zero_()
    for factors, of_token in zip(weights.unbind(1), places.of_token.unbind(1), strict=True):
        out += y[of_token].float() * factors[:, None]


@implements(ops.add_rows, "reference", device="any")
def add_rows(out: Tensor, tokens: Tensor, y: Tensor, factors: Tensor) -> None:
    out.index_add_(0, tokens, y.float() * factors[:, None])


@implements(ops.add_shared, "reference", device="any")
def add_shared(out: Tensor, y: Tensor, logits: Tensor | None) -> None:
    out += y.float() if logits is None else y.float() * sigmoid(logits)


def sigmoid(x: Tensor) -> Tensor:
    """sigmoid of x, computed as the softmax of x and 0. torch's softmax computes each row alone, while the rounding of
    its sigmoid depends on an element's place among the others."""
    both = torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)
    return both[..., 0].contiguous()
