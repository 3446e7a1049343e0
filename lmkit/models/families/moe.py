"""Mixtures of experts: Mixtral, Qwen2-MoE (a shared expert beside the others), Qwen3-MoE, OLMoE; GLM-4.5, dots.llm1 and
MiniMax-M2, whose experts are chosen by sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import (
    activation,
    integer,
    layer_spec,
    layer_windows,
    mistral,
    model_spec,
    num_layers,
    number,
    typed_windows,
    windowed,
)
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.mtp_spec import mtp_after_layers
from lmkit.models.registry import family
from lmkit.models.roles import HUNYUAN_EXPERTS, LLAMA_NAMES, MIXTRAL_EXPERTS, QWEN_EXPERTS, SIGMOID_EXPERTS
from lmkit.models.spec import ModelSpec

PREDICTING = "num_nextn_predict_layers"


@family("MixtralForCausalLM", defaults=defaults.MIXTRAL)
def mixtral(hf: dict[str, Any]) -> ModelSpec:
    """Mistral's attention; every layer is sparse."""
    dense = mistral(hf)
    moe = MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "intermediate_size")),
    )
    names = LLAMA_NAMES | MIXTRAL_EXPERTS
    return replace(dense, layers=tuple(layer.having(mlp=moe, names=names) for layer in dense.layers))


@family("Qwen2MoeForCausalLM", defaults=defaults.QWEN2_MOE)
def qwen2_moe(hf: dict[str, Any]) -> ModelSpec:
    if hf.get("layer_types") is None:  # by default windows alternate; Qwen2 has them from a layer on
        last = integer(hf, "max_window_layers", 28)
        kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers(hf))]
        hf = hf | {"layer_types": kinds}
    layers = windowed(layer_spec(hf, attn_bias=bool(hf.get("qkv_bias", True))), layer_windows(hf))
    shared = MLPSpec(integer(hf, "shared_expert_intermediate_size"))
    return model_spec(hf, with_experts(hf, layers, shared if shared.intermediate_size else None))


@family("Qwen3MoeForCausalLM", defaults=defaults.QWEN3_MOE)
def qwen3_moe(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    window = integer(hf, "sliding_window", 0) if hf.get("use_sliding_window", False) else 0
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True)
    return model_spec(hf, with_experts(hf, windowed(layer, [window] * num_layers(hf))))


@family("Glm4MoeForCausalLM", defaults=defaults.GLM4_MOE)
def glm4_moe(hf: dict[str, Any]) -> ModelSpec:
    layer = layer_spec(hf, attn_bias=bool(hf.get("attention_bias", False)), qk_norm=bool(hf.get("use_qk_norm", False)))
    return with_mtp(hf, [layer] * num_layers(hf))


@family("MiniMaxM2ForCausalLM", defaults=defaults.MINIMAX_M2)
def minimax_m2(hf: dict[str, Any]) -> ModelSpec:
    """Norms of q and k are over all heads. `rotary_dim` is the part of a head that is turned."""
    if integer(hf, "rotary_dim", 0):
        hf = {"partial_rotary_factor": integer(hf, "rotary_dim") / max(integer(hf, "head_dim"), 1)} | hf
    moe = MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "intermediate_size"), activation(hf)),
        sigmoid=True,
    )
    names = LLAMA_NAMES | MIXTRAL_EXPERTS
    return model_spec(hf, [layer_spec(hf, qk_norm=True, joint_qk_norm=True, mlp=moe, names=names)] * num_layers(hf))


@family("OlmoeForCausalLM", defaults=defaults.OLMOE)
def olmoe(hf: dict[str, Any]) -> ModelSpec:
    if hf.get("clip_qkv") is not None:
        raise UnsupportedError(f"config.json: clip_qkv = {hf['clip_qkv']!r} is not supported; lmkit runs null")
    bias, size = bool(hf["attention_bias"]), integer(hf, "intermediate_size")
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True, joint_qk_norm=True)
    return model_spec(hf, with_experts(hf | {"moe_intermediate_size": size}, [layer] * num_layers(hf)))


@family("SolarOpenForCausalLM", defaults=defaults.SOLAR_OPEN)
def solar_open(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf["attention_bias"])
    layer = layer_spec(hf, attn_bias=bias, mlp=MLPSpec(integer(hf, "moe_intermediate_size")))
    return model_spec(hf, deepseek_experts(hf | {"first_k_dense_replace": 0}, [layer] * num_layers(hf)))


@family("HYV3ForCausalLM", defaults=defaults.HY_V3)
def hy_v3(hf: dict[str, Any]) -> ModelSpec:
    """The first layer is dense, unless `mlp_layer_types` says otherwise. A layer that predicts tokens is not read."""
    bias, count = bool(hf["attention_bias"]), num_layers(hf)
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, mlp_bias=bool(hf["mlp_bias"]), qk_norm=True)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    own = {new: hf[old] for new, old in (names | {"routed_scaling_factor": "router_scaling_factor"}).items()}
    layers = deepseek_experts(hf | own | {"first_k_dense_replace": 1, "norm_topk_prob": True}, [layer] * count)
    named = [replace(one, names={**one.names, **HUNYUAN_EXPERTS}) if one.mixture else one for one in layers]
    return model_spec(hf, named, unread=(f"{layer.prefix}.{count}.",))


@family("Dots1ForCausalLM", defaults=defaults.DOTS1)
def dots1(hf: dict[str, Any]) -> ModelSpec:
    bias, window = bool(hf.get("attention_bias", False)), integer(hf, "sliding_window", 0)
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True)
    first = integer(hf, "max_window_layers", 62)
    windows = [window if i >= first else 0 for i in range(num_layers(hf))]
    if hf.get("layer_types") is not None:
        windows = typed_windows(hf, window)
    return model_spec(hf, deepseek_experts(hf, windowed(layer, windows)))


def deepseek_experts(hf: dict[str, Any], layers: list[LayerSpec], **flags: Any) -> list[LayerSpec]:
    """DeepSeek's rule: the first layers are dense, and the shared experts are one wide MLP. `flags` override fields of
    MoESpec."""
    size, act = integer(hf, "moe_intermediate_size"), activation(hf)
    shared = MLPSpec(size * integer(hf, "n_shared_experts", 0), act)
    scale = number(hf, "routed_scaling_factor", 1.0)
    if not scale > 0:
        raise CheckpointError(f"config.json: routed_scaling_factor = {scale!r} is not positive")
    fields: dict[str, Any] = {
        "num_experts": integer(hf, "n_routed_experts"),
        "experts_per_token": integer(hf, "num_experts_per_tok"),
        "expert": MLPSpec(size, act),
        "normalize": bool(hf.get("norm_topk_prob", False)),
        "sigmoid": True,
        "num_groups": integer(hf, "n_group", 1),
        "groups_per_token": integer(hf, "topk_group", 1),
        "scale": scale,
        "shared": shared if shared.intermediate_size else None,
        "shared_router": False,
    }
    moe = MoESpec(**(fields | flags))
    kinds = hf.get("mlp_layer_types") or ["dense"] * integer(hf, "first_k_dense_replace", 0)
    if not isinstance(kinds, list):
        raise CheckpointError("config.json: mlp_layer_types must name dense or sparse for each layer")
    return [
        layer if kinds[i : i + 1] == ["dense"] else layer.having(mlp=moe, names={**layer.names, **SIGMOID_EXPERTS})
        for i, layer in enumerate(layers)
    ]


def with_mtp(hf: dict[str, Any], layers: list[LayerSpec]) -> ModelSpec:
    """A model with DeepSeek's experts in these layers. Of the layers for multi-token prediction after the last one,
    the first draft tokens."""
    *layers, last = deepseek_experts(hf, [*layers, layers[-1]])
    count = len(layers)
    unread = tuple(f"{last.prefix}.{number}." for number in range(count, count + integer(hf, PREDICTING, 0)))
    return model_spec(hf, layers, unread=unread, mtp=mtp_after_layers(last, count) if unread else None)


def with_experts(hf: dict[str, Any], layers: list[LayerSpec], shared: MLPSpec | None = None) -> list[LayerSpec]:
    """Qwen's rule for sparse layers. transformers 5 writes Qwen3's `num_experts` as `num_local_experts`."""
    num_experts = integer(hf, "num_local_experts" if "num_local_experts" in hf else "num_experts")
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not step or not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError("config.json: decoder_sparse_step must be positive, mlp_only_layers a list of layers")
    sparse = [num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(len(layers))]
    if not any(sparse):
        return layers
    moe = MoESpec(
        num_experts=num_experts,
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "moe_intermediate_size")),
        normalize=bool(hf.get("norm_topk_prob", False)),
        shared=shared,
    )
    names = LLAMA_NAMES | QWEN_EXPERTS
    return [
        layer.having(mlp=moe, names=names) if has_experts else layer
        for layer, has_experts in zip(layers, sparse, strict=True)
    ]
