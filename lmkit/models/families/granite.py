"""Granite: Llama with factors on embeddings, scores, logits, and on what a block adds to the residual stream."""

from __future__ import annotations

from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError
from lmkit.models.families import defaults
from lmkit.models.families.llama import layer_spec, model_spec, num_layers, number
from lmkit.models.registry import family
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
