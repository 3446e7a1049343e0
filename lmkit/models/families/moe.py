"""Mixtures of experts: Mixtral, Qwen2-MoE (a shared expert beside the others), Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError
from lmkit.layers.moe_spec import MoESpec
from lmkit.models.families.llama import integer, layer_windows, llama_spec, mistral, num_layers
from lmkit.models.registry import family
from lmkit.models.roles import MIXTRAL_EXPERTS, QWEN_EXPERTS
from lmkit.models.spec import ModelSpec


@family("MixtralForCausalLM")
def mixtral(hf: dict[str, Any]) -> ModelSpec:
    """Mistral's attention; every layer is sparse."""
    moe = MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        intermediate_size=integer(hf, "intermediate_size"),
        layers=(True,) * num_layers(hf),
        names=MIXTRAL_EXPERTS,
    )
    return replace(mistral(hf), moe=moe)


@family("Qwen2MoeForCausalLM")
def qwen2_moe(hf: dict[str, Any]) -> ModelSpec:
    if hf.get("layer_types") is None:  # without them windows alternate, where Qwen2 has them from a layer on
        last = integer(hf, "max_window_layers", 28)
        kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers(hf))]
        hf = hf | {"layer_types": kinds}
    moe = _qwen_experts(hf, shared_intermediate_size=integer(hf, "shared_expert_intermediate_size"))
    return llama_spec(hf, attn_bias=bool(hf.get("qkv_bias", True)), windows=layer_windows(hf), moe=moe)


@family("Qwen3MoeForCausalLM")
def qwen3_moe(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    window = integer(hf, "sliding_window", 0) if hf.get("use_sliding_window", False) else 0
    windows = (window,) * num_layers(hf) if window else ()
    return llama_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True, windows=windows, moe=_qwen_experts(hf))


def _qwen_experts(hf: dict[str, Any], shared_intermediate_size: int = 0) -> MoESpec | None:
    """None if no layer has experts. transformers 5 writes Qwen3's `num_experts` as `num_local_experts`."""
    num_experts = integer(hf, "num_local_experts" if "num_local_experts" in hf else "num_experts")
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not step or not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError("config.json: decoder_sparse_step must be positive, mlp_only_layers a list of layers")
    layers = tuple(num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(num_layers(hf)))
    if not any(layers):
        return None
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=integer(hf, "num_experts_per_tok"),
        intermediate_size=integer(hf, "moe_intermediate_size"),
        layers=layers,
        names=QWEN_EXPERTS,
        normalize=bool(hf.get("norm_topk_prob", False)),
        shared_intermediate_size=shared_intermediate_size,
    )
