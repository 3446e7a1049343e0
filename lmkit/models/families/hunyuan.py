"""Hunyuan, dense and with experts: q and k are normalized after RoPE, whose base is stretched once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import activation, integer, layer_spec, model_spec, num_layers, number
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import HUNYUAN_EXPERTS, LLAMA_NAMES, QWEN_EXPERTS
from lmkit.models.spec import ModelSpec

NAMES = LLAMA_NAMES | {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
EXPERTS = QWEN_EXPERTS | HUNYUAN_EXPERTS | {"mlp.router": "mlp.gate.wg"}


@family("HunYuanDenseV1ForCausalLM", defaults=defaults.HUNYUAN)
def hunyuan(hf: dict[str, Any]) -> ModelSpec:
    return model_spec(hf, [_layer(hf)] * num_layers(hf))


@family("HunYuanMoEV1ForCausalLM", defaults=defaults.HUNYUAN_MOE)
def hunyuan_moe(hf: dict[str, Any]) -> ModelSpec:
    """A dense MLP stands beside the experts, which are as wide. Their scores add up to 1."""
    mlp = MLPSpec(integer(hf, "intermediate_size"), activation(hf))
    moe = MoESpec(
        num_experts=_same(hf, "num_experts"),
        experts_per_token=_same(hf, "moe_topk"),
        expert=mlp,
        normalize=True,
        shared=mlp,
        shared_router=False,
    )
    return model_spec(hf, [_layer(hf).having(mlp=moe, names=NAMES | EXPERTS)] * num_layers(hf))


def _layer(hf: dict[str, Any]) -> LayerSpec:
    bias = bool(hf["attention_bias"])
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True, late_qk_norm=True, names=NAMES)
    return layer.having(rope=_stretched(hf, layer.rope))


def _stretched(hf: dict[str, Any], rope: RopeSpec) -> RopeSpec:
    """`alpha` stretches the base once. Such files call it dynamic, which it is not."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    alpha, size = number(given, "alpha", 0.0), rope.rotary_dim
    if rope.kind != "dynamic" or not alpha:
        return rope
    if not (alpha > 0 and size > 2):
        raise CheckpointError(f"config.json: alpha = {alpha!r} cannot stretch RoPE over {size} dimensions")
    return replace(rope, kind="default", factor=1.0, theta=rope.theta * alpha ** (size / (size - 2)))


def _same(hf: dict[str, Any], key: str) -> int:
    """A number, or a list with the same one for each layer."""
    value = hf[key]
    if isinstance(value, list) and value:
        if any(x != value[0] for x in value):
            raise UnsupportedError(f"config.json: {key} differs between layers; lmkit runs one number")
        value = value[0]
    return integer({key: value}, key)
