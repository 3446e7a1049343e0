"""GLM-4: RoPE on half of each head, in pairs of neighbours; GLM-4-0414 has norms before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.models.families import defaults
from lmkit.models.families.llama import layer_spec, model_spec, num_layers
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES
from lmkit.models.spec import ModelSpec

NAMES = LLAMA_NAMES | {"norm.attn_out": "post_self_attn_layernorm", "norm.mlp_out": "post_mlp_layernorm"}


@family("GlmForCausalLM", defaults=defaults.GLM)
def glm(hf: dict[str, Any]) -> ModelSpec:
    return _model(hf)


@family("Glm4ForCausalLM", defaults=defaults.GLM4)
def glm4(hf: dict[str, Any]) -> ModelSpec:
    return _model(hf, post_norms=True, names=NAMES)


def _model(hf: dict[str, Any], **flags: Any) -> ModelSpec:
    layer = layer_spec(hf, attn_bias=bool(hf["attention_bias"]), **flags)
    layer = layer.having(rope=replace(layer.rope, interleaved=True))
    return model_spec(hf, [layer] * num_layers(hf))
