"""ERNIE 4.5: Llama with RoPE in pairs of neighbours, and with experts that are chosen by softmax and a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import activation, integer, layer_spec, model_spec, num_layers
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES, SIGMOID_EXPERTS
from lmkit.models.spec import ModelSpec

NAMES = LLAMA_NAMES | SIGMOID_EXPERTS | {"mlp.score_bias": "mlp.moe_statics.e_score_correction_bias"}
PREDICTING = ("model.mtp_",)  # layers for multi-token prediction, which are not read


@family("Ernie4_5ForCausalLM", defaults=defaults.ERNIE4_5)
def ernie4_5(hf: dict[str, Any]) -> ModelSpec:
    return model_spec(hf, [_layer(hf, bool(hf["use_bias"]))] * num_layers(hf))


@family("Ernie4_5_MoeForCausalLM", defaults=defaults.ERNIE4_5_MOE)
def ernie4_5_moe(hf: dict[str, Any]) -> ModelSpec:
    """Experts in every so many layers from the first to the last one that config.json names. -1: to the end."""
    if hf["use_bias"]:
        raise UnsupportedError("config.json: use_bias of ERNIE 4.5 with experts is not supported; lmkit runs false")
    size, shared, count = (
        integer(hf, name) for name in ("moe_intermediate_size", "moe_num_shared_experts", "num_hidden_layers")
    )
    moe = MoESpec(
        num_experts=integer(hf, "moe_num_experts"),
        experts_per_token=integer(hf, "moe_k"),
        expert=MLPSpec(size, activation(hf)),
        score_bias=True,
        shared=MLPSpec(size * shared, activation(hf)) if shared else None,
        shared_router=False,
    )
    dense, every = _layer(hf, False), max(integer(hf, "moe_layer_interval"), 1)
    last = count - 1 if hf["moe_layer_end_index"] == -1 else integer(hf, "moe_layer_end_index")
    sparse = range(integer(hf, "moe_layer_start_index"), last + 1)
    with_experts = dense.having(mlp=moe, names=NAMES)
    layers = [with_experts if i in sparse and (i + 1) % every == 0 else dense for i in range(num_layers(hf))]
    return model_spec(hf, layers, unread=PREDICTING)


def _layer(hf: dict[str, Any], bias: bool) -> LayerSpec:
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, mlp_bias=bias)
    return layer.having(rope=replace(layer.rope, interleaved=True))
