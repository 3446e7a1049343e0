"""Defaults of config.json, as in families.defaults, of families whose layers differ in what they keep of a sequence."""

from __future__ import annotations

from lmkit.models.families.defaults import Defaults

FALCON_H1: Defaults = {
    "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "rope_theta":
    10000.0, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state":
    256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False,
}  # fmt: skip
OLMO_HYBRID: Defaults = {
    "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 30, "hidden_act": "silu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
}  # fmt: skip
MIMO_V2_FLASH: Defaults = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_routed_experts": 256, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.334,
}  # fmt: skip
KIMI_LINEAR: Defaults = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 1048576, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1024, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_num_heads": 32, "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
BAILING_HYBRID: Defaults = {
    "vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 42,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 768, "n_routed_experts": 512,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_theta": 6000000.0, "head_dim": 128,
    "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_safe_gate": True, "kda_lower_bound": -5.0,
}  # fmt: skip
ZAMBA2: Defaults = {
    "vocab_size": 32000, "hidden_size": 2560, "num_attention_heads": 32, "hidden_act": "gelu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "mamba_d_state": 64,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "time_step_min": 0.001, "n_mamba_heads": 8,
    "num_mem_blocks": 1, "add_bias_linear": False, "use_mem_rope": False, "use_long_context": False,
}  # fmt: skip
