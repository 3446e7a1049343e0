"""Architectures of GGUF files with mixtures of experts and full or latent attention."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.formats.gguf_architecture import (
    EXPERTS,
    GRANITE,
    GROUPED_EXPERTS,
    LOCAL_EXPERTS,
    SHARED,
    SIGMOID,
    WINDOW,
    Architecture,
    Config,
    biased,
)
from lmkit.formats.gguf_facts import FULL, SLIDING, Facts

MINIMAX = LOCAL_EXPERTS | {"intermediate_size": "expert_feed_forward_length"}
ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
INDEXER = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
HUNYUAN = EXPERTS | {"moe_topk": "expert_used_count"}
HY_V3 = EXPERTS | {"router_scaling_factor": "expert_weights_scale"}
LLAMA4 = LOCAL_EXPERTS | {
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "intermediate_size_mlp": "feed_forward_length",
    "intermediate_size": "expert_feed_forward_length",
}
MIMO = {"v_head_dim": "attention.value_length", "attention_value_scale": "attention.value_scale"}
LARGE_LLAMA4 = 128  # experts of the model that does not normalize q and k


def _normed(facts: Facts, config: Config) -> Config:
    return {"use_qk_norm": facts.has("attn_q_norm.weight")}


def latent(facts: Facts, config: Config) -> Config:
    """Latent attention. Files of 2024 have the widths of heads under other keys."""
    turned = int(facts.needed("rope.dimension_count"))
    query = facts.number("attention.key_length_mla") or facts.needed("attention.key_length")
    return {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": int(query) - turned,
        "v_head_dim": facts.number("attention.value_length_mla") or facts.needed("attention.value_length"),
        "kv_lora_rank": facts.needed("attention.kv_lora_rank"),
        "q_lora_rank": facts.number("attention.q_lora_rank"),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "norm_topk_prob": bool(config.get("norm_topk_prob")),
    }


def _deepseek2(facts: Facts, config: Config) -> Config:
    """V2, or V3 by the function of the scores, or by the bias that chooses experts."""
    found = latent(facts, config)
    if facts.number("expert_gating_func") != SIGMOID and not facts.has("exp_probs_b.bias"):
        return found | {"topk_method": "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"}
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return found | own | _deepseek3(facts, config)


def _deepseek3(facts: Facts, config: Config) -> Config:
    found = latent(facts, config) | {"n_shared_experts": config.get("n_shared_experts", 0)}
    if "n_group" not in config and config.get("n_routed_experts") != 256:  # which V3 alone has, in groups
        found |= {"n_group": 1, "topk_group": 1}
    return found


def _glm_dsa(facts: Facts, config: Config) -> Config:
    """A layer without an indexer of its own sees what an earlier one has chosen."""
    full = facts.flags("attention.indexer.types") or facts.layers_with("indexer.attn_k.weight")
    kinds = ["full" if own else "shared" for own in full[: config["num_hidden_layers"]]]
    return {"n_group": 1, "topk_group": 1} | _deepseek3(facts, config) | {"indexer_types": kinds}


def _hy_v3(facts: Facts, config: Config) -> Config:
    wide = facts.number("expert_shared_feed_forward_length") or config["moe_intermediate_size"]
    sparse = facts.layers_with("ffn_gate_inp.weight")
    return {
        "num_shared_experts": int(wide) // max(int(config["moe_intermediate_size"]), 1),
        "mlp_layer_types": ["sparse" if has else "dense" for has in sparse],
        "mlp_bias": facts.has("ffn_up.bias"),
    }


def _llama4(facts: Facts, config: Config) -> Config:
    """A window of 0 stands for a model that sees all keys and turns all heads."""
    found: Config = {"use_qk_norm": config["num_local_experts"] != LARGE_LLAMA4}
    if facts.number("attention.sliding_window") == 0:
        found |= {"layer_types": [FULL] * config["num_hidden_layers"], "attn_temperature_tuning": False}
        found["no_rope_layers"] = [1] * config["num_hidden_layers"]
    return found


def _mimo(facts: Facts, config: Config) -> Config:
    """Layers with a window have twice the key-value heads."""
    kinds = facts.layer_types(6)
    heads = facts.by_layer("attention.head_count_kv", len(kinds))
    of_kind = dict(zip(kinds, heads, strict=False))
    base = {"rope_type": "default", "partial_rotary_factor": facts.turned(config)}
    thetas = {FULL: config.get("rope_theta", 5e6), SLIDING: facts.number("rope.freq_base_swa") or 1e4}
    return {
        "layer_types": kinds,
        "num_key_value_heads": of_kind.get(FULL, max(heads) // 2),
        "swa_num_key_value_heads": of_kind.get(SLIDING),
        "attention_value_scale": config.get("attention_value_scale", 1.0),
        "mlp_layer_types": ["sparse" if has else "dense" for has in facts.layers_with("ffn_gate_inp.weight")],
        "rope_parameters": {kind: base | {"rope_theta": theta} for kind, theta in thetas.items()},
    }


MOE: Mapping[str, Architecture] = {
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", EXPERTS | SHARED, {"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, {"norm_topk_prob": True}),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, {"norm_topk_prob": True}),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", GRANITE | LOCAL_EXPERTS),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", GROUPED_EXPERTS, more=_normed),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", LOCAL_EXPERTS | WINDOW),
    "llama4": Architecture("Llama4ForCausalLM", "llama4_text", LLAMA4, more=_llama4),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2", GROUPED_EXPERTS, more=_deepseek2),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", "deepseek_v32", GROUPED_EXPERTS | INDEXER, more=_deepseek3),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", "glm_moe_dsa", GROUPED_EXPERTS | INDEXER, more=_glm_dsa),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", GROUPED_EXPERTS, {"sliding_window": None}),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", EXPERTS, {"norm_topk_prob": False}),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        GROUPED_EXPERTS | WINDOW | MIMO,
        more=_mimo,
        apart=("num_key_value_heads",),
    ),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", HUNYUAN),
    "hy_v3": Architecture("HYV3ForCausalLM", "hy_v3", HY_V3, more=_hy_v3),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE, more=biased),
}  # fmt: skip
