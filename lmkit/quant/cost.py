"""Sizes of a layer under a recipe, of which the estimate of time and the budget of memory are made."""

from __future__ import annotations

import math

from lmkit.models import roles
from lmkit.models.spec import ModelSpec
from lmkit.quant.data.hidden_states import BATCH_TOKENS
from lmkit.quant.recipe import Recipe
from lmkit.quant.steps.base import LayerCost


def layer_cost(spec: ModelSpec, recipe: Recipe, layer: int, batch_tokens: int = BATCH_TOKENS) -> LayerCost:
    """Of a layer's linears and a recipe's calibration in batches of `batch_tokens`."""
    calibration, linears = recipe.calibration, roles.linears(spec, layer)
    num_tokens = calibration.num_samples * calibration.seq_len
    sizes = {role: math.prod(spec.linear_shape(role)) for role in linears}
    inputs = sorted({reads for role, reads in roles.input_of(spec, layer).items() if role in sizes})
    return LayerCost(
        num_tokens=num_tokens,
        seq_len=calibration.seq_len,
        batch_tokens=batch_tokens,
        sample_tokens=min(recipe.sample_tokens, num_tokens),
        group_size=recipe.scheme.scheme().group_size,
        num_streams=2 if recipe.needs_exact else 1,
        weights=sum(sizes.values()),
        weights_of_a_token=_weights_of_a_token(spec, layer, sizes),
        searched_weights=sum(size * (2 if role.endswith((".o", ".down")) else 1) for role, size in sizes.items()),
        largest=max(sizes.values()),
        input_widths=tuple(spec.linear_shape(reads)[1] for reads in inputs),
        attention=2 * spec.num_heads * spec.head_dim * calibration.seq_len,
        num_heads=spec.num_heads,
        # Gate and up, apart and side by side, and their product.
        token_width=5 * max(spec.mlp_size(mlp + ".") for mlp in roles.gated_mlps(spec, layer)) + 6 * spec.hidden_size,
    )


def _weights_of_a_token(spec: ModelSpec, layer: int, sizes: dict[str, int]) -> int:
    """Of a layer's weights, how many a token is multiplied with."""
    every, moe = sum(sizes.values()), spec.sparse(layer)
    if moe is None:
        return every
    experts = sum(size for role, size in sizes.items() if roles.expert_of(role) is not None)
    return every - experts + experts * moe.experts_per_token // moe.num_experts
