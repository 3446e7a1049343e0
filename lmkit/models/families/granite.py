"""Granite: Llama with factors on embeddings, scores, logits, and on what a block adds to the residual stream. Granite
SWA has windows and learned sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import (
    activation,
    integer,
    layer_spec,
    model_spec,
    num_layers,
    number,
    typed_windows,
    windowed,
)
from lmkit.models.registry import family
from lmkit.models.roles import GRANITE_EXPERTS, LLAMA_NAMES
from lmkit.models.spec import ModelSpec


@family("GraniteForCausalLM", defaults=defaults.GRANITE)
def granite(hf: dict[str, Any]) -> ModelSpec:
    """The stream x gets x + m * block(norm(x)) in each layer. Here it is x / m, which gets x / m + block(norm(x / m)).

    A norm of x / m is that of x if its epsilon is divided by m squared. So no factor is left within the layers.
    """
    names = "embedding_multiplier", "attention_multiplier", "logits_scaling", "residual_multiplier"
    embedding, attention, logits, m = (number(hf, name, 1.0) for name in names)
    if min(attention, logits, m) <= 0:
        raise CheckpointError(f"config.json: {', '.join(names[1:])} must be positive")
    bias = bool(hf.get("attention_bias", False))
    layer = layer_spec(
        hf,
        attention=AttentionSpec(attention),
        norm_eps=number(hf, "rms_norm_eps", 1e-6) / m**2,
        attn_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )
    return model_spec(hf, [layer] * num_layers(hf), embedding_scale=embedding / m, logit_scale=1 / logits)


@family("GraniteMoeForCausalLM", defaults=defaults.GRANITE_MOE)
def granite_moe(hf: dict[str, Any]) -> ModelSpec:
    dense = granite(hf)
    moe = MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "intermediate_size"), activation(hf)),
    )
    names = LLAMA_NAMES | GRANITE_EXPERTS
    return replace(dense, layers=tuple(layer.having(mlp=moe, names=names) for layer in dense.layers))


@family("GraniteSWAForCausalLM", defaults=defaults.GRANITE_SWA)
def granite_swa(hf: dict[str, Any]) -> ModelSpec:
    """Each layer may have a base of RoPE of its own; 0: it turns no heads."""
    dense, count = granite(hf), num_layers(hf)
    kinds = hf.get("layer_types") or ["sliding_attention" if i % 4 else "full_attention" for i in range(count)]
    windows = typed_windows(hf | {"layer_types": kinds}, integer(hf, "sliding_window", 0))
    bases = hf.get("layer_rope_theta") or [dense.layers[0].rope.theta] * count
    if not isinstance(bases, list) or len(bases) != count:
        raise CheckpointError(f"config.json: layer_rope_theta must have {count} entries")
    layers = []
    for layer, base in zip(windowed(dense.layers[0].having(has_sinks=True), windows), bases, strict=True):
        theta = number({"layer_rope_theta": base}, "layer_rope_theta", 0.0)
        own = replace(layer.rope, theta=theta) if theta else replace(layer.rope, kind="none")
        layers.append(layer.having(rope=own))
    return replace(dense, layers=tuple(layers))
