"""What a key of config.json means that is left out: the default of the family's configuration class.

A file may leave out what is as its class has it. A key that is there with null is not left out: it says that the model
has no such thing, as no window or no soft cap. tests/models/test_defaults.py compares the tables with transformers.
"""

from __future__ import annotations

from typing import Any

Defaults = dict[str, Any]

LLAMA: Defaults = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
MISTRAL: Defaults = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "sliding_window": 4096, "rope_theta": 10000.0,
}  # fmt: skip
MINISTRAL3: Defaults = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
QWEN2: Defaults = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "rope_theta": 10000.0,
}  # fmt: skip
QWEN3: Defaults = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "rope_theta": 10000.0,
}  # fmt: skip
QWEN2_MOE: Defaults = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
    "qkv_bias": True, "rope_theta": 10000.0,
}  # fmt: skip
QWEN3_MOE: Defaults = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
    "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "rope_theta": 10000.0,
    "num_experts": 128,
}  # fmt: skip
MIXTRAL: Defaults = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "num_experts_per_tok": 2, "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}  # fmt: skip
GEMMA2: Defaults = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping":
    50.0, "rope_theta": 10000.0,
}  # fmt: skip
GEMMA3: Defaults = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "use_bidirectional_attention": False, "rope_theta":
    1000000.0, "rope_local_base_freq": 10000.0,
}  # fmt: skip
GEMMA4: Defaults = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "attention_bias": False,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
}  # fmt: skip
OPT: Defaults = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings":
    2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False, "num_attention_heads": 12,
    "activation_function": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings":
    True,
}  # fmt: skip
GRANITE: Defaults = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "rope_theta": 10000.0,
}  # fmt: skip
GRANITE_SWA: Defaults = GRANITE | {
    "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True, "sliding_window": 128,
}  # fmt: skip
OLMO2: Defaults = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
}  # fmt: skip
OLMO3: Defaults = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False, "rms_norm_eps": 1e-05, "sliding_window": 4096, "rope_theta": 500000.0,
}  # fmt: skip
EXAONE4: Defaults = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "sliding_window": 4096, "sliding_window_pattern": 4,
    "rope_theta": 10000.0,
}  # fmt: skip
SMOLLM3: Defaults = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "use_sliding_window": False, "no_rope_layer_interval": 4, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2000000.0,
}  # fmt: skip
SEED_OSS: Defaults = {
    "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 80, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": False,
    "mlp_bias": False, "head_dim": 128, "rope_theta": 10000.0,
}  # fmt: skip
INTERNLM3: Defaults = {
    "vocab_size": 128512, "hidden_size": 4096, "intermediate_size": 10240, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": 128,
    "rope_theta": 10000.0,
}  # fmt: skip
PHI3: Defaults = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "rope_theta":
    10000.0, "partial_rotary_factor": 1.0,
}  # fmt: skip
GLM: Defaults = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False, "attention_bias":
    True, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
GLM4: Defaults = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False, "attention_bias":
    True, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
GLM4_MOE: Defaults = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group":
    1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "rope_theta":
    10000.0, "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS: Defaults = {
    "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size":
    2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True, "rope_theta":
    150000.0, "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip
DOTS1: Defaults = {
    "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": False, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False, "routed_scaling_factor": 1.0,
    "sliding_window": 4096, "max_window_layers": 62, "rope_theta": 10000.0,
}  # fmt: skip
DEEPSEEK_V2: Defaults = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "first_k_dense_replace": 0,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False,
    "v_head_dim": 128, "moe_intermediate_size": 1407, "rope_theta": 10000.0,
}  # fmt: skip
GLM4_MOE_LITE: Defaults = {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_shared_experts": 1,
    "n_routed_experts": 64, "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim":
    64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 202752, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False, "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MINIMAX_M2: Defaults = {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 196608, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "num_experts_per_tok": 8,
    "num_local_experts": 256, "rope_theta": 5000000.0,
}  # fmt: skip
OLMOE: Defaults = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "attention_bias": False, "num_experts_per_tok": 8, "num_experts": 64,
    "norm_topk_prob": False, "rope_theta": 10000.0,
}  # fmt: skip
ERNIE4_5: Defaults = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "use_bias": False,
    "rope_theta": 500000.0,
}  # fmt: skip
ERNIE4_5_MOE: Defaults = {
    "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "use_bias": False, "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1, "rope_theta": 500000.0,
}  # fmt: skip
DEEPSEEK_V3: Defaults = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "rope_interleave": True,
    "attention_bias": False, "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN3_NEXT: Defaults = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN3_5: Defaults = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN3_5_MOE: Defaults = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads":
    32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts":
    256, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
LFM2: Defaults = {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-05,
    "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "rope_theta": 1000000.0,
}  # fmt: skip
LFM2_MOE: Defaults = {
    "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "rope_theta": 1000000.0,
}  # fmt: skip
MAMBA2: Defaults = {
    "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096, "state_size": 128,
    "num_hidden_layers": 64, "layer_norm_epsilon": 1e-05, "expand": 2, "conv_kernel": 4, "n_groups": 8,
    "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GRANITE_HYBRID: Defaults = GRANITE | {
    "hidden_size": 4096, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 11008,
    "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
BAMBA: Defaults = {
    "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "mamba_n_heads":
    128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
NEMOTRON_H: Defaults = {
    "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-05, "tie_word_embeddings": False, "intermediate_size":
    21504, "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
    "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
LLAMA4: Defaults = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "num_experts_per_tok": 1,
    "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    "attention_bias": False, "rope_theta": 500000.0,
}  # fmt: skip
COHERE2: Defaults = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "logit_scale": 0.0625, "num_hidden_layers":
    40, "num_attention_heads": 64, "hidden_act": "silu", "max_position_embeddings": 8192, "layer_norm_eps": 1e-05,
    "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096, "rope_theta": 10000.0,
}  # fmt: skip
GEMMA: Defaults = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "attention_bias": False,
    "rope_theta": 10000.0,
}  # fmt: skip
GRANITE_MOE: Defaults = GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
ARCEE: Defaults = {
    "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
SOLAR_OPEN: Defaults = {
    "vocab_size": 196608, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1280,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group":
    1, "topk_group": 1, "norm_topk_prob": True, "rope_theta": 1000000.0,
}  # fmt: skip
HY_V3: Defaults = {
    "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size":
    1536, "router_scaling_factor": 2.826, "rope_theta": 11158840.0,
}  # fmt: skip
BERT: Defaults = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size":
    3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
}  # fmt: skip
ROBERTA: Defaults = BERT | {"vocab_size": 50265}
XLM_ROBERTA: Defaults = BERT
MODERNBERT: Defaults = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-05,
    "norm_bias": False, "attention_bias": False, "mlp_bias": False, "local_attention": 128, "tie_word_embeddings": True,
    "classifier_pooling": "cls", "classifier_activation": "gelu", "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
}  # fmt: skip
_QWEN_VL: Defaults = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,
    "max_window_layers": 80, "rope_theta": 1000000.0,
}  # fmt: skip
_QWEN3_TOWER: Defaults = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}  # fmt: skip
# Models with a tower: what differs from the language model's own class, and what the tower's class has.
QWEN2_VL, QWEN2_VL_TOWER = _QWEN_VL, {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN2_5_VL, QWEN2_5_VL_TOWER = _QWEN_VL, {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
QWEN3_VL: Defaults = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
QWEN3_VL_MOE: Defaults = QWEN3_VL | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
}  # fmt: skip
QWEN3_VL_TOWER: Defaults = _QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]}
QWEN3_5_TOWER = _QWEN3_TOWER
DEEPSEEK_V32: Defaults = DEEPSEEK_V3 | {
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 0, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 64,
}  # fmt: skip
GLM_MOE_DSA: Defaults = GLM4_MOE_LITE | {
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "q_lora_rank": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_nextn_predict_layers": 0,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
}  # fmt: skip
GEMMA4_UNIFIED: Defaults = GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024}
HUNYUAN: Defaults = LLAMA | {"vocab_size": 290943, "rms_norm_eps": 1e-05}
HUNYUAN_MOE: Defaults = HUNYUAN | {"num_experts": 1, "moe_topk": 1}
SIGLIP: Defaults = {
    "model_type": "siglip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
INTERN: Defaults = {
    "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 448, "patch_size": 14, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "attention_bias": False, "use_mean_pooling": True,
}  # fmt: skip
PIXTRAL: Defaults = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
