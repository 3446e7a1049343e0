"""Ministral, Ministral 3, Mistral 3: Mistral with windows on some layers, with queries that grow, beside a tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import Growth
from lmkit.errors import UnsupportedError
from lmkit.models.families import defaults
from lmkit.models.families.llama import (
    ORIGINAL,
    integer,
    layer_spec,
    mistral,
    model_spec,
    num_layers,
    number,
    typed_windows,
    windowed,
)
from lmkit.models.families.nested import TIED, beside_towers, text_config
from lmkit.models.families.towers import pixtral
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

YARN = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@family("MinistralForCausalLM", defaults=defaults.MISTRAL)
def ministral(hf: dict[str, Any]) -> ModelSpec:
    window = integer(hf, "sliding_window", 0)
    kinds = hf.get("layer_types") or ["sliding_attention" if window else "full_attention"] * num_layers(hf)
    return model_spec(hf, windowed(layer_spec(hf), typed_windows(hf | {"layer_types": kinds}, window)))


@family("Ministral3ForCausalLM", defaults=defaults.MINISTRAL3)
def ministral3(hf: dict[str, Any]) -> ModelSpec:
    """Queries grow behind the context before the scaling of RoPE, by a rate that stands among its numbers."""
    hf = hf | {"rope_parameters": hf.get("rope_parameters") or YARN}
    rope = layer_spec(hf).rope
    given = hf.get("rope_scaling") or hf["rope_parameters"]
    rate = number(given, "llama_4_scaling_beta", 0.0)
    length = integer(given, ORIGINAL, rope.original_max_position)
    layer = layer_spec(hf, growth=Growth(rate, length) if rate else None)
    return model_spec(hf, windowed(layer, [integer(hf, "sliding_window", 0)] * num_layers(hf)))


@family("Mistral3ForConditionalGeneration")
def mistral3(hf: dict[str, Any]) -> ModelSpec:
    kind = text_config(hf).get("model_type", "mistral")
    if kind not in TEXTS:
        raise UnsupportedError(f"text_config: model_type {kind!r} is not supported; lmkit runs {', '.join(TEXTS)}")
    spec = beside_towers({TIED: True} | hf, TEXTS[kind])
    return replace(spec, vision=pixtral(hf, spec.norm_eps))


TEXTS = {"mistral": mistral, "ministral": ministral, "ministral3": ministral3}
