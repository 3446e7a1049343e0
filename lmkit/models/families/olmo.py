"""OLMo 2 and 3, and EXAONE 4: norms only after attention and MLP, and norms on q and k. OLMo Hybrid has linear
attention (gated delta rule) in three of four layers, with norms before both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.models.families import defaults, hybrid_defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number, typed_layers
from lmkit.models.families.qwen3_next import FULL, LINEAR, kinds_of_layers
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import AFTER_NORM_NAMES, LLAMA_NAMES
from lmkit.models.spec import ModelSpec

HYBRID_NAMES = LLAMA_NAMES | {"norm.attn": "attention_layer_norm", "norm.mlp": "feedforward_layer_norm"}
HYBRID_NAMES |= {f"attn.{x}": f"linear_attn.{x}_proj" for x in ("q", "k", "v", "b", "a", "o")}
HYBRID_NAMES |= {f"attn.{x}_conv": f"linear_attn.{x}_conv1d" for x in ("q", "k", "v")}
HYBRID_NAMES |= {"attn.z": "linear_attn.g_proj", "attn.delta_norm": "linear_attn.o_norm"}
HYBRID_NAMES |= {"attn.a_log": "linear_attn.A_log", "attn.dt_bias": "linear_attn.dt_bias"}


@family("Olmo2ForCausalLM", defaults=defaults.OLMO2)
def olmo2(hf: dict[str, Any]) -> ModelSpec:
    return model_spec(hf, [_layer(hf, joint_qk_norm=True)] * num_layers(hf))


@family("Olmo3ForCausalLM", defaults=defaults.OLMO3)
def olmo3(hf: dict[str, Any]) -> ModelSpec:
    """Three layers of four have a window, and RoPE that is not stretched."""
    hf = _with_pattern(hf, 4)
    layer, window = _layer(hf, joint_qk_norm=True), integer(hf, "sliding_window", 0)
    bases = number(hf, "rope_theta", 0.0), float(defaults.OLMO3["rope_theta"])  # as transformers has it
    return model_spec(hf, typed_layers(hf, layer, window, bases=bases))


@family("Exaone4ForCausalLM", defaults=defaults.EXAONE4)
def exaone4(hf: dict[str, Any]) -> ModelSpec:
    """If some layers have a window, the others turn no heads."""
    window = integer(hf, "sliding_window", 0)
    layer = _layer(hf)
    if not window:
        return model_spec(hf, [layer] * num_layers(hf))
    pattern = hf.get("sliding_window_pattern")  # a number of layers, or a letter for each: "LLLG"
    period = len(pattern) if isinstance(pattern, str) else integer(hf, "sliding_window_pattern", 4)
    layers = typed_layers(_with_pattern(hf, period), layer, window)
    unturned = replace(layer.rope, kind="none")
    return model_spec(hf, [one if one.attention.window else one.having(rope=unturned) for one in layers])


@family("OlmoHybridForCausalLM", defaults=hybrid_defaults.OLMO_HYBRID)
def olmo_hybrid(hf: dict[str, Any]) -> ModelSpec:
    """With null for the base of RoPE, attention turns no heads."""
    full, heads = _layer(hf, joint_qk_norm=True), integer(hf, "num_attention_heads")
    keys, values = (integer(hf, f"linear_num_{name}_heads", heads) for name in ("key", "value"))
    if {"rope_theta": 0.0, **hf, **(hf.get("rope_parameters") or {})}["rope_theta"] is None:
        full = full.having(rope=replace(full.rope, kind="none"))
    key_dim = integer(hf, "linear_key_head_dim", 3 * full.hidden_size // (4 * max(keys, 1)))
    delta = DeltaSpec(
        keys,
        values,
        key_dim,
        integer(hf, "linear_value_head_dim", 2 * key_dim),
        integer(hf, "linear_conv_kernel_dim"),
        flat=True,
        apart=True,
        rate=2.0 if hf["linear_allow_neg_eigval"] else 1.0,
        norm_eps=1e-5,
    )
    linear = layer_spec(hf, mixer=delta, names=HYBRID_NAMES)
    if hf.get("layer_types") is None:
        kinds = [LINEAR if i % 4 < 3 else FULL for i in range(num_layers(hf))]
        hf = hf | {"layer_types": kinds if FULL in kinds else [*kinds[1:], FULL]}
    return model_spec(hf, [linear if kind == LINEAR else full for kind in kinds_of_layers(hf)])


def _with_pattern(hf: dict[str, Any], period: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if (i + 1) % max(period, 1) else "full_attention" for i in range(num_layers(hf))]
    return hf | ({} if hf.get("layer_types") else {"layer_types": kinds})


def _layer(hf: dict[str, Any], **flags: Any) -> LayerSpec:
    bias = bool(hf.get("attention_bias", False))
    flags |= {"pre_norms": False, "post_norms": True, "qk_norm": True, "names": LLAMA_NAMES | AFTER_NORM_NAMES}
    return layer_spec(hf, attn_bias=bias, o_bias=bias, **flags)
