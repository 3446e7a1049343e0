"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta rule) before each layer of full attention,
whose output is gated. Qwen3.5 sees images with the tower of Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers
from lmkit.models.families.moe import with_experts
from lmkit.models.families.qwen_vl import TOWER_3, seeing, tower_3, vision_config
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.mtp_spec import mtp_apart
from lmkit.models.registry import family
from lmkit.models.roles import DELTA_NAMES, GATED_NAMES
from lmkit.models.spec import ModelSpec

LINEAR, FULL = "linear_attention", "full_attention"


@family("Qwen3NextForCausalLM", defaults=defaults.QWEN3_NEXT)
def qwen3_next(hf: dict[str, Any]) -> ModelSpec:
    return _hybrid(hf)


@family("Qwen3_5ForCausalLM", defaults=defaults.QWEN3_5)
def qwen3_5(hf: dict[str, Any]) -> ModelSpec:
    """Dense. A token of text has the same position in all three rows of M-RoPE, so this is RoPE."""
    return _hybrid(hf | {"num_experts": 0}, flat=True)


@family("Qwen3_5MoeForCausalLM", defaults=defaults.QWEN3_5_MOE)
def qwen3_5_moe(hf: dict[str, Any]) -> ModelSpec:
    # Every layer has experts, and config.json no width of a dense MLP: no layer has the one that is put in.
    width = hf.get("intermediate_size", hf["moe_intermediate_size"])
    return _hybrid(hf | {"intermediate_size": width, "norm_topk_prob": True}, flat=True)


@family("Qwen3_5ForConditionalGeneration")
def qwen3_5_vision(hf: dict[str, Any]) -> ModelSpec:
    return _inside(hf, qwen3_5)


@family("Qwen3_5MoeForConditionalGeneration")
def qwen3_5_moe_vision(hf: dict[str, Any]) -> ModelSpec:
    return _inside(hf, qwen3_5_moe)


def _inside(hf: dict[str, Any], of_text: Callable[[dict[str, Any]], ModelSpec]) -> ModelSpec:
    """The language model of a checkpoint that also has a vision tower."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is not an object")
    spec = of_text(hf | text | {"architectures": hf["architectures"]})
    if hf.get("vision_config") is not None:
        tower = tower_3(hf | {"vision_config": defaults.QWEN3_5_TOWER | vision_config(hf)})
        spec = seeing(spec, text, tower, mixed_sections=True)
    layers = tuple(replace(layer, prefix="model.language_model.layers") for layer in spec.layers)
    return replace(spec, layers=layers, unread=(*spec.unread, TOWER_3))


def _hybrid(hf: dict[str, Any], *, flat: bool = False) -> ModelSpec:
    """Norms have the factor 1 + w, but for that inside linear attention. `flat`: see DeltaSpec."""
    bias = bool(hf.get("attention_bias", False))
    full = layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True, gated=True)
    linear = layer_spec(hf, mixer=_delta(hf, flat))
    layers = [linear if kind == LINEAR else full for kind in kinds_of_layers(hf)]
    shared = MLPSpec(integer(hf, "shared_expert_intermediate_size", 0))
    *layers, last = with_experts(hf, [*layers, full], shared if shared.intermediate_size else None)
    mtp = mtp_apart(_named(last))
    return model_spec(hf, [_named(layer) for layer in layers], norm_offset=1.0, unread=(mtp.prefix,), mtp=mtp)


def _named(layer: LayerSpec) -> LayerSpec:
    return replace(layer, names={**layer.names, **(DELTA_NAMES if layer.recurrent else GATED_NAMES)})


def kinds_of_layers(hf: dict[str, Any]) -> list[str]:
    """LINEAR or FULL for each layer."""
    every = integer(hf, "full_attention_interval", 4) or 4
    kinds = hf.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(num_layers(hf))]
    if not isinstance(kinds, list) or len(kinds) != num_layers(hf) or not set(kinds) <= {LINEAR, FULL}:
        raise CheckpointError(f"config.json: layer_types must name {LINEAR} or {FULL} for each layer")
    return kinds


def _delta(hf: dict[str, Any], flat: bool) -> DeltaSpec:
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    sizes = [integer(hf, f"linear_{name}") for name in names]
    key_heads, value_heads, key_dim, value_dim, kernel = sizes
    if min(sizes) < 1 or value_heads % key_heads or max(sizes) > 4096:
        raise CheckpointError("config.json: the sizes of linear attention (linear_num_key_heads, ...) cannot be")
    return DeltaSpec(key_heads, value_heads, key_dim, value_dim, kernel, flat)
