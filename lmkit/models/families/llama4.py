"""Llama 4: experts whose inputs are multiplied with their scores, and some layers without RoPE, whose queries grow.

Its other layers see the keys of their chunk of `attention_chunk_size` tokens alone. lmkit serves contexts of one chunk,
in which they see all keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import Growth
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import activation, integer, layer_spec, model_spec, num_layers, number
from lmkit.models.families.nested import beside_towers
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES
from lmkit.models.spec import ModelSpec

NAMES = LLAMA_NAMES | {"mlp.router": "feed_forward.router"}
for _role, _name in (("mlp", ""), ("mlp.experts.{}", "experts.{}."), ("mlp.shared", "shared_expert.")):
    NAMES |= {f"{_role}.{x}": f"feed_forward.{_name}{x}_proj" for x in ("gate", "up", "down")}
TOWERS = "vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."
CHUNKED = "chunked_attention"


@family("Llama4ForCausalLM", defaults=defaults.LLAMA4)
def llama4(hf: dict[str, Any]) -> ModelSpec:
    count, bias = num_layers(hf), bool(hf["attention_bias"])
    every = max(integer(hf, "no_rope_layer_interval", 4), 1)
    turned = _listed(hf, "no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1: with RoPE
    step = max(integer(hf, "interleave_moe_layer_step", 1), 1)
    sparse = range(step - 1, count, step) if hf.get("moe_layers") is None else _listed(hf, "moe_layers")
    growth = Growth(number(hf, "attn_scale", 0.0), integer(hf, "floor_scale"), 1)
    dense = MLPSpec(integer(hf, "intermediate_size_mlp"), activation(hf))
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, mlp=dense, names=NAMES)
    plain = layer.having(
        rope=replace(layer.rope, kind="none"), growth=growth if hf["attn_temperature_tuning"] else None
    )
    layer = layer.having(rope=replace(layer.rope, interleaved=True), unit_qk_norm=bool(hf["use_qk_norm"]))
    layers = [layer if turns else plain for turns in turned[:count]]
    if len(layers) < count:
        raise CheckpointError(f"config.json: no_rope_layers must have {count} entries")
    layers = [one.having(mlp=_experts(hf)) if i in sparse else one for i, one in enumerate(layers)]
    kinds = _listed(hf, "layer_types") or [CHUNKED] * any(turned)
    chunk = integer(hf, "attention_chunk_size", 0) if CHUNKED in kinds else 0
    spec = model_spec(hf, layers)
    return replace(spec, max_position=min(spec.max_position, chunk)) if chunk else spec


@family("Llama4ForConditionalGeneration")
def llama4_beside_tower(hf: dict[str, Any]) -> ModelSpec:
    return beside_towers(hf, llama4, TOWERS)


def _listed(hf: dict[str, Any], key: str) -> list[Any]:
    found = hf.get(key) or []
    if not isinstance(found, list):
        raise CheckpointError(f"config.json: {key} is not a list")
    return found


def _experts(hf: dict[str, Any]) -> MoESpec:
    if (per_token := integer(hf, "num_experts_per_tok")) != 1:
        raise UnsupportedError(
            f"config.json: num_experts_per_tok = {per_token} of Llama 4 is not supported; lmkit runs 1"
        )
    mlp = MLPSpec(integer(hf, "intermediate_size"), activation(hf))
    return MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=per_token,
        expert=mlp,
        normalize=False,
        sigmoid=True,
        score_bias=False,
        scores_inputs=True,
        shared=mlp,
        shared_router=False,
    )
