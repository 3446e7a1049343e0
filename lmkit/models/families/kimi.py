"""Kimi Linear and Ling 3.0: Kimi Delta Attention in most layers, latent attention in the others, and DeepSeek's
experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.models.families import hybrid_defaults as defaults
from lmkit.models.families.deepseek import latent_layers
from lmkit.models.families.llama import integer, model_spec, num_layers, number
from lmkit.models.families.moe import PREDICTING, deepseek_experts
from lmkit.models.families.qwen3_next import FULL, LINEAR, kinds_of_layers
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import LATENT_NAMES, SIGMOID_EXPERTS
from lmkit.models.spec import ModelSpec

# A key as this family's config.json has it, beside the one that DeepSeek's has.
KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
ONLY = {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "hidden_act": "silu"}
NAMES = LATENT_NAMES | {f"attn.{x}": f"self_attn.{x}_proj" for x in ("q", "k", "v", "b")}
NAMES |= {f"attn.{x}_conv": f"self_attn.{x}_conv1d" for x in ("q", "k", "v")}
NAMES |= {"attn.a_log": "self_attn.A_log", "attn.dt_bias": "self_attn.dt_bias", "attn.delta_norm": "self_attn.o_norm"}
LING_NAMES = NAMES | {"attn.a": "self_attn.f_proj", "attn.o": "self_attn.dense"}
LING_NAMES |= dict.fromkeys(("attn.z", "attn.gate"), "self_attn.g_proj")
LING_NAMES = {role: name.replace("self_attn.", "attention.") for role, name in LING_NAMES.items()}
LING_EXPERTS = {"mlp.score_bias": "mlp.gate.expert_bias"}
NAMES |= {"attn.a_low": "self_attn.f_a_proj", "attn.a": "self_attn.f_b_proj"}
NAMES |= {"attn.z_low": "self_attn.g_a_proj", "attn.z": "self_attn.g_b_proj"}
KIMI_EXPERTS = {role: name.replace("mlp.", "block_sparse_moe.", 1) for role, name in SIGMOID_EXPERTS.items()}
KIMI_EXPERTS |= {
    f"mlp.experts.{{}}.{part}": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in {"gate": "w1", "up": "w3", "down": "w2"}.items()
}


@family("KimiLinearForCausalLM", defaults=defaults.KIMI_LINEAR)
def kimi_linear(hf: dict[str, Any]) -> ModelSpec:
    """Latent attention turns no heads."""
    for key, value in ONLY.items():
        if hf.get(key, value) != value:
            raise UnsupportedError(f"config.json: {key} = {hf[key]!r} is not supported; lmkit runs {value!r}")
    own = hf.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        raise CheckpointError("config.json: linear_attn_config is not an object")
    hf = _deepseek(hf) | {"rope_scaling": None, "rope_parameters": None}
    keys = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    keys |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    heads, dim, kernel = (integer(own, name, integer(hf, key)) for key, name in keys.items())
    delta = _delta(heads, dim, kernel, rank=dim)
    count = num_layers(hf)
    kinds = hf.get("layer_types") or _numbered(own, count)
    kinds = kinds or [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    layers = _layers(hf | {"layer_types": kinds}, delta, names=NAMES, interleaved=False)
    unturned = [x if x.recurrent else x.having(rope=replace(x.rope, kind="none")) for x in layers]
    return _model(hf, unturned, KIMI_EXPERTS)


@family("BailingHybridForCausalLM", defaults=defaults.BAILING_HYBRID)
def bailing_hybrid(hf: dict[str, Any]) -> ModelSpec:
    """Ling 3.0. Latent attention has a gate for each head, and the logarithm of a decay a lower bound."""
    if hf.get("q_lora_rank"):
        raise UnsupportedError(f"config.json: q_lora_rank = {hf['q_lora_rank']!r} is not supported; lmkit runs null")
    hf, count = _deepseek(hf), num_layers(hf)
    floor = number(hf, "kda_lower_bound", -5.0) if hf["kda_safe_gate"] else 0.0
    if hf["kda_safe_gate"] and not floor < 0:
        raise CheckpointError(f"config.json: kda_lower_bound = {floor!r} is not below 0")
    keys = {"num_heads": "num_attention_heads", "head_dim": "head_dim", "conv_kernel_dim": "short_conv_kernel_size"}
    heads, dim, kernel = (integer(hf, f"linear_{new}", integer(hf, old)) for new, old in keys.items())
    size = max(integer(hf, "layer_group_size"), 1)
    kinds = hf.get("layer_types") or [LINEAR if (i + 1) % size else FULL for i in range(count)]
    delta = _delta(heads, dim, kernel, floor=floor)
    layers = _layers(hf | {"layer_types": kinds}, delta, names=LING_NAMES, interleaved=True)
    gated = [x if x.recurrent else x.having(gated=True) for x in layers]
    return _model(hf, gated, LING_EXPERTS)


def _deepseek(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with DeepSeek's keys."""
    counts = {"n_routed_experts": hf["num_local_experts"]} if "num_local_experts" in hf else {}
    return hf | counts | {new: hf[old] for new, old in KEYS.items() if old in hf}


def _numbered(own: dict[str, Any], count: int) -> list[str | None]:
    """The kinds of layers, which linear_attn_config numbers from 1 on; none if it does not."""
    lists = own.get("full_attn_layers"), own.get("kda_layers")
    if None in lists:
        return []
    kinds: list[str | None] = [None] * count
    for numbers, kind in zip(lists, (FULL, LINEAR), strict=True):
        if not isinstance(numbers, list) or not all(type(i) is int and 1 <= i <= count for i in numbers):
            raise CheckpointError(f"config.json: linear_attn_config must number layers from 1 to {count}")
        for i in numbers:
            kinds[i - 1] = kind
    return kinds


def _delta(heads: int, dim: int, kernel: int, **own: Any) -> DeltaSpec:
    return DeltaSpec(heads, heads, dim, dim, kernel, flat=True, apart=True, by_row=True, **own)


def _layers(hf: dict[str, Any], delta: DeltaSpec, *, names: dict[str, str], interleaved: bool) -> list[LayerSpec]:
    """The layers as dense ones."""
    full = replace(latent_layers(hf, interleaved=interleaved)[0], names=names)
    linear = full.having(mixer=delta)
    return [linear if kind == LINEAR else full for kind in kinds_of_layers(hf)]


def _model(hf: dict[str, Any], layers: list[LayerSpec], names: dict[str, str]) -> ModelSpec:
    """Layers that predict tokens, which may follow the last one, are not read."""
    sparse = deepseek_experts(hf, layers)
    named = [replace(one, names={**one.names, **names}) if one.mixture else one for one in sparse]
    count = len(named)
    last = range(count, count + integer(hf, PREDICTING, 0))
    return model_spec(hf, named, unread=tuple(f"{layers[0].prefix}.{number}." for number in last))
