"""Tiny random checkpoints of every family, made by transformers. Its models are the oracle for our decoder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 24, "rope_theta": 10000.0}  # fmt: skip
GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7, "rope_theta": 10000.0,
           "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}  # fmt: skip
LLAMA4 = {"head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 40, "intermediate_size_mlp": 88,
          "num_local_experts": 5, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "floor_scale": 5,
          "attn_scale": 0.4, "attention_chunk_size": 4096}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 8.0],
}
PAIRS = {"attention_bias": True, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2,
           "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}  # fmt: skip

LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14,
          "num_key_value_heads": 6, "first_k_dense_replace": 1}  # fmt: skip

LINEAR = {"head_dim": 16, "num_hidden_layers": 5, "full_attention_interval": 2,
          "linear_num_key_heads": 2, "linear_num_value_heads": 6,
          "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
          "shared_expert_intermediate_size": 24}  # fmt: skip

CONVOLVED = {"head_dim": 16, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-4, "pad_token_id": None}

MAMBA = {"num_heads": 4, "head_dim": 24, "state_size": 11, "n_groups": 2, "expand": 2, "layer_norm_epsilon": 1e-4,
         "use_bias": True, "time_step_limit": [0.05, 1.5], "pad_token_id": None}  # fmt: skip

GRANITE4 = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 5.0,
            "attention_multiplier": 0.2, "rms_norm_eps": 1e-2, "num_attention_heads": 3, "num_key_value_heads": 1,
            "mamba_n_heads": 4, "mamba_d_state": 11, "mamba_n_groups": 2, "shared_intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0}  # fmt: skip

OLMO_HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 16, "pad_token_id": None,
               "eos_token_id": None}  # fmt: skip

KIMI = LATENT | {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4,
                 "topk_group": 2, "linear_num_heads": 4, "linear_head_dim": 16, "pad_token_id": None}  # fmt: skip

ZAMBA2 = {"num_hidden_layers": 4, "num_key_value_heads": 6, "n_mamba_heads": 4, "mamba_d_state": 11, "adapter_rank": 8,
          "mamba_ngroups": 2, "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
          "pad_token_id": None, "initializer_range": 0.1}  # fmt: skip

FALCON_H1 = {"head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_state": 11, "mamba_n_groups": 2,
             "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.7, 0.3],
             "key_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8,
             "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.4, 0.6, 0.8, 1.3, 0.9],
             "pad_token_id": None}  # fmt: skip

NEMOTRON = {"num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 20, "ssm_state_size": 11, "n_groups": 2,
            "head_dim": 16, "layer_norm_epsilon": 1e-4, "pad_token_id": None, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 2.5, "time_step_min": 0.1, "n_group": 2, "topk_group": 1}  # fmt: skip

GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "hidden_size_per_layer_input": 0}

INTERNLM2 = {
    "lm_head": "output", "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

MARKS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")

VISION: dict[str, dict[str, Any]] = {
    "qwen2-vl": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2},
    "qwen2.5-vl": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "window_size": 16,
                   "fullatt_block_indexes": [1]},
    "qwen3-vl": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 25,
                 "deepstack_visual_indexes": [2, 0]},
    "qwen3-vl-moe": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 9,
                     "deepstack_visual_indexes": [0]},
    "qwen3.5-vl": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 9},
    "gemma3-vision": {"model_type": "siglip_vision_model", "image_size": 32, "vision_use_head": False},
    "internvl": {"model_type": "internvl_vision", "image_size": 16, "attention_bias": True},
    "mistral3-vision": {"model_type": "pixtral", "image_size": 64, "hidden_act": "silu"},
}  # fmt: skip

# name -> (config class, differences from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-bias": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}}),
    "llama-dynamic": ("LlamaConfig", {"max_position_embeddings": 32, "rope_parameters": DYNAMIC}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("LlamaConfig", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1,
                                                                     "beta_fast": 16.0, "beta_slow": 2.0}}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-mha-wide-heads": ("LlamaConfig", {"num_key_value_heads": 6, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-vl": ("Qwen2VLConfig", {}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", {}),
    "qwen3-vl": ("Qwen3VLConfig", {"head_dim": 8}),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", EXPERTS | {"head_dim": 8, "decoder_sparse_step": 2}),
    "internvl": ("InternVLConfig", {"model_type": "qwen3", "head_dim": 16}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": 9,
                                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "pad_token_id": None, "rope_parameters": GROWING}),
    "mistral3-vision": ("Mistral3Config", {"model_type": "ministral3", "head_dim": 16, "pad_token_id": None,
                                           "rope_parameters": GROWING}),
    "llama4": ("Llama4TextConfig", LLAMA4),
    "llama4-plain": ("Llama4TextConfig", LLAMA4 | {"use_qk_norm": False, "interleave_moe_layer_step": 1,
                                                   "attn_temperature_tuning": False, "attention_bias": True}),
    "llama4-vision": ("Llama4TextConfig", LLAMA4),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 5, "sliding_window": 9, "layer_norm_eps": 1e-4,
                                  "logit_scale": 0.25, "attention_bias": True, "pad_token_id": None}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9,
                                "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5,
                                "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": ("Gemma2Config", {"head_dim": 16, "attn_logit_softcapping": None, "attention_bias": True,
                                         "final_logit_softcapping": None, "sliding_window": 7}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 9,
                                    "query_pre_attn_scalar": 24, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}),
    "gemma3-vision": ("Gemma3Config", {"head_dim": 16, "sliding_window": 18, "query_pre_attn_scalar": 24}),
    "gemma4": ("Gemma4TextConfig", GEMMA4 | {"num_hidden_layers": 7, "num_kv_shared_layers": 3,
                                             "hidden_size_per_layer_input": 8,
                                             "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
                                             "layer_types": ["sliding_attention", "full_attention"] * 3 + [
                                                 "full_attention"]}),
    "gemma4-values": ("Gemma4TextConfig", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": ("Gemma4TextConfig", GEMMA4 | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
                                                 "moe_intermediate_size": 40, "attention_k_eq_v": True}),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9,
                                                   "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-unified-vision": ("Gemma4UnifiedTextConfig", {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9}),
    "gemma4-vision": ("Gemma4TextConfig", GEMMA4 | {"attention_k_eq_v": True}),
    "opt": ("OPTConfig", {"ffn_dim": 88, "init_std": 0.2, "pad_token_id": None}),
    "opt-350m": ("OPTConfig", {"ffn_dim": 88, "init_std": 0.2, "pad_token_id": None, "do_layer_norm_before": False,
                               "word_embed_proj_dim": 40}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 5.0,
                                  "attention_multiplier": 0.2, "attention_bias": True, "rms_norm_eps": 1e-2}),
    "granite-moe": ("GraniteMoeConfig", {"embedding_multiplier": 3.0, "residual_multiplier": 0.22,
                                         "logits_scaling": 5.0, "attention_multiplier": 0.2, "rms_norm_eps": 1e-2,
                                         "num_local_experts": 5, "intermediate_size": 40}),
    "granite-swa": ("GraniteSWAConfig", {"embedding_multiplier": 3.0, "residual_multiplier": 0.22,
                                         "logits_scaling": 5.0, "attention_multiplier": 0.2, "sliding_window": 9,
                                         "layer_rope_theta": [0, 1000.0, 500.0], "rms_norm_eps": 1e-2,
                                         "tie_word_embeddings": False}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 7, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": YARN}}),
    "exaone4": ("Exaone4Config", {"num_hidden_layers": 5, "sliding_window": 7, "sliding_window_pattern": 3}),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "smollm3": ("SmolLM3Config", {"pad_token_id": None, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-window": ("SmolLM3Config", {"pad_token_id": None, "use_sliding_window": True, "sliding_window": 7,
                                         "mlp_bias": True}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True}),
    "internlm3": ("InternLM3Config", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "phi3": ("Phi3Config", {"pad_token_id": None, "sliding_window": 11}),
    "phi3-long": ("Phi3Config", {"pad_token_id": None, "original_max_position_embeddings": 24,
                                 "rope_parameters": LONGROPE}),
    "glm": ("GlmConfig", PAIRS | {"pad_token_id": None, "tie_word_embeddings": True, "head_dim": 16}),
    "glm4": ("Glm4Config", PAIRS | {"pad_token_id": None, "head_dim": 16}),
    "internlm2": ("LlamaConfig", {"attention_bias": True}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
                                 "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9,
                                 "rope_parameters": YARN | {"truncate": False}}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-fused": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    "qwen2-moe-window": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True,
                                                      "use_sliding_window": True, "sliding_window": 7,
                                                      "max_window_layers": 2, "qkv_bias": False}),
    "qwen2-moe-fused": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 56}),
    "qwen3-moe-window": ("Qwen3MoeConfig", EXPERTS | {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "glm4-moe": ("Glm4MoeConfig", SIGMOID | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-fused": ("Glm4MoeConfig", SIGMOID | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "dots1": ("Dots1Config", SIGMOID | {"norm_topk_prob": True, "attention_bias": True}),
    "dots1-window": ("Dots1Config", SIGMOID | {"sliding_window": 7, "max_window_layers": 1, "n_shared_experts": 1,
                                               "layer_types": ["full_attention", "sliding_attention",
                                                               "sliding_attention"]}),
    "deepseek-v2-lite": ("DeepseekV2Config", SIGMOID | LATENT | {
        "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}}),
    "deepseek-v2": ("DeepseekV2Config", SIGMOID | LATENT | {"q_lora_rank": 20, "attention_bias": True,
                                                            "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("DeepseekV3Config", SIGMOID | LATENT | {"q_lora_rank": 20, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3.2": ("DeepseekV32Config", SIGMOID | LATENT | {"q_lora_rank": 20, "index_head_dim": 16,
                                                               "index_n_heads": 16, "index_topk": 8}),
    "glm-5": ("GlmMoeDsaConfig", SIGMOID | LATENT | {"q_lora_rank": 20, "index_head_dim": 16, "index_n_heads": 16,
                                                     "index_topk": 8, "n_group": 1, "topk_group": 1,
                                                     "indexer_types": ["full", "full", "shared"]}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", SIGMOID | LATENT | {"q_lora_rank": 20}),
    "glm4-moe-lite-sparse": ("Glm4MoeLiteConfig", SIGMOID | LATENT | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False,
        "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "minimax-m2": ("MiniMaxM2Config", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
                                       "head_dim": 16, "rotary_dim": 8}),
    "solar-open": ("SolarOpenConfig", SIGMOID | {"head_dim": 16, "attention_bias": True}),
    "hy-v3": ("HYV3Config", EXPERTS | {"head_dim": 16, "num_shared_experts": 2, "router_scaling_factor": 1.7}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, "attention_bias": True}),
    "hunyuan-alpha": ("HunYuanDenseV1Config", {"head_dim": 16, "rope_parameters": {
        "rope_type": "dynamic", "alpha": 7.0, "factor": 1.0, "rope_theta": 10000.0}}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 5, "moe_topk": 2, "pad_token_id": None,
                                           "intermediate_size": 40}),
    "arcee": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
                              "norm_topk_prob": True}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40,
                                            "tie_word_embeddings": False}),
    "qwen3-next": ("Qwen3NextConfig", EXPERTS | LINEAR),
    "qwen3-next-dense": ("Qwen3NextConfig", LINEAR | {"num_experts": 0, "num_hidden_layers": 3, "attention_bias": True,
                                                     "layer_types": ["full_attention"] + ["linear_attention"] * 2}),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3.5-recurrent": ("Qwen3_5TextConfig", LINEAR | {"num_hidden_layers": 3, "use_cache": False,
                                                         "layer_types": ["linear_attention"] * 3}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", EXPERTS | LINEAR | {"num_hidden_layers": 4, "initializer_range": 0.1}),
    "lfm2": ("Lfm2Config", CONVOLVED | {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": ("Lfm2Config", CONVOLVED | {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3,
                                                 "full_attn_idxs": [1], "layer_types": None, "conv_L_cache": 4}),
    "lfm2-moe": ("Lfm2MoeConfig", CONVOLVED | EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    "mamba2": ("Mamba2Config", MAMBA),
    "granite-hybrid": ("GraniteMoeHybridConfig", GRANITE4),
    "granite-hybrid-moe": ("GraniteMoeHybridConfig", GRANITE4 | {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "position_embedding_type": "rope"}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 11, "mamba_n_groups": 2,
                              "num_attention_heads": 3, "num_key_value_heads": 1}),
    "olmo-hybrid": ("OlmoHybridConfig", OLMO_HYBRID),
    "olmo-hybrid-unturned": ("OlmoHybridConfig", OLMO_HYBRID | {"num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "kimi-linear": ("KimiLinearConfig", KIMI | {"layer_types": ["linear_attention", "full_attention",
                                                                "linear_attention"]}),
    "bailing-hybrid": ("BailingHybridConfig", KIMI | {"head_dim": 16, "layer_group_size": 3}),
    "bailing-hybrid-free": ("BailingHybridConfig", KIMI | {"head_dim": 12, "layer_group_size": 2,
                                                           "kda_safe_gate": False, "attention_bias": True}),
    "zamba2": ("Zamba2Config", ZAMBA2 | {"num_mem_blocks": 2, "use_shared_attention_adapter": True,
                                         "use_mem_rope": True}),
    "zamba2-plain": ("Zamba2Config", ZAMBA2 | {"hidden_act": "gelu_pytorch_tanh"}),
    "mimo-v2-flash": ("MiMoV2FlashConfig", SIGMOID | {
        "head_dim": 24, "v_head_dim": 16, "sliding_window": 9, "num_key_value_heads": 1, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "pad_token_id": None,
        "rope_parameters": None}),
    "falcon-h1": ("FalconH1Config", FALCON_H1),
    "falcon-h1-normed": ("FalconH1Config", FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False,
                                                        "time_step_limit": [0.05, 1.5]}),
    "nemotron-h": ("NemotronHConfig", NEMOTRON | {
        "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True, "use_bias": True}),
    "nemotron-3": ("NemotronHConfig", NEMOTRON | {
        "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "num_hidden_layers": 5}),
    "nemotron-3-super": ("NemotronHConfig", NEMOTRON | {
        "layer_types": ["moe", "linear_attention", "full_attention", "moe"], "moe_latent_size": 32}),
    "qwen3.5-vl": ("Qwen3_5Config", LINEAR | {"num_hidden_layers": 3, "partial_rotary_factor": 0.5}),
    "qwen3.5-vision": ("Qwen3_5TextConfig", LINEAR | {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "qwen3.5-moe-vision": ("Qwen3_5MoeTextConfig", EXPERTS | LINEAR | {"num_hidden_layers": 3,
                                                                             "initializer_range": 0.1}),
}  # fmt: skip


# name -> differences from COMMON. Encoders: a token sees the whole text.
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"type_vocab_size": 2},
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "relu"},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "ModernBert": {"local_attention": 12, "classifier_pooling": "mean", "norm_eps": 1e-3}
    | dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1),
}
# Without a class that gives the scores of texts as BERT's does.
EMBEDDING: dict[str, dict[str, Any]] = {
    "Gemma3Text": {"use_bidirectional_attention": True, "sliding_window": 12, "head_dim": 16, "num_key_value_heads": 1,
                   "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
}  # fmt: skip


def make_encoder(path: Path, name: str, labels: int = 0) -> transformers.PreTrainedModel:
    """Write an encoder to `path`, with `labels` one that classifies. Returns the transformers model (float32)."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(
        **COMMON | {"num_attention_heads": 3} | (ENCODERS | EMBEDDING)[name]
    )
    kind = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    config.num_labels = labels
    model = kind.from_config(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            mean = 1.0 if parameter_name.lower().endswith("norm.weight") else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    model.save_pretrained(path)
    return model


def make(path: Path, name: str, **overrides: Any) -> transformers.PreTrainedModel:
    """Write a model of family `name` to `path`. Returns the transformers model (float32, biases and norms not
    trivial)."""
    class_name, differences = FAMILIES[name]
    torch.manual_seed(7)
    options = copy.deepcopy(COMMON | differences | overrides)
    for key in ("layer_types", "layer_rope_theta", "indexer_types", "layers_block_type"):
        if options.get(key):
            options[key] = options[key][: options["num_hidden_layers"]]
    if "expand" in options:
        options["head_dim"] = options["expand"] * options["hidden_size"] // options["num_heads"]
    if "hidden_size_per_layer_input" in options:  # a vector for each token
        options["vocab_size_per_layer_input"] = options["vocab_size"]
    kind = transformers.AutoModelForCausalLM
    if name in VISION:
        options, kind = with_vision(options, VISION[name]), transformers.AutoModelForImageTextToText
    config = getattr(transformers, class_name)(**options)
    config._attn_implementation = "eager"
    model = kind.from_config(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 or parameter_name.endswith("_bias"):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.3)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.3)
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model.save_pretrained(path, save_original_format=not name.endswith("-fused"))
    if name == "internlm2":
        rewrite_as_internlm2(path)
    if name.endswith("-vision") and name not in VISION:
        put_beside_a_tower(path)
    return model


def with_vision(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """The options of a language model and a small vision tower."""
    marks = dict(zip(MARKS, range(text["vocab_size"] - len(MARKS), text["vocab_size"]), strict=True))
    if "model_type" in tower:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | text
        name = "image_token_id" if "attention_bias" in tower else "image_token_index"
        outer = {name: marks["image_token_id"], "tie_word_embeddings": False}
        outer |= {"mm_tokens_per_image": 16} if "vision_use_head" in tower else {}
        return {"text_config": text, "vision_config": sizes | {"patch_size": 4} | tower} | outer
    partial = text.pop("partial_rotary_factor", 1.0)
    half = int(text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) * partial) // 2
    sections = [half // 2, half // 4, half // 4]  # of time, height and width
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial, "mrope_section": sections}
    sizes = {"hidden_size": text["hidden_size"]} if "embed_dim" in tower else {"out_hidden_size": text["hidden_size"]}
    vision = {"num_heads": 2, "patch_size": 4} | tower | sizes
    text = {"bos_token_id": None, "eos_token_id": None, "rope_parameters": rope} | text
    tied = text.get("tie_word_embeddings", False)
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied} | marks


def tower_parts(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    """The modules of a tower of VISION, and of what leads to the language model."""
    names = ("visual", "vision_tower", "multi_modal_projector")
    return [module for name in names if (module := getattr(model.model, name, None)) is not None]


# Architectures whose tensors stand under the names of transformers 4.
NAMED_AS_BEFORE = ("Gemma3", "Mistral3", "Llama4")


def put_beside_a_tower(path: Path) -> None:
    """Write a language model as it is stored with a vision tower, which has one tensor here."""
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    outer = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration").replace("Mini", "Mi")
    if before := outer.startswith(NAMED_AS_BEFORE):
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    else:
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tower = "vision_tower.proj.weight" if before else "model.visual.proj.weight"
    save_file(renamed | {tower: torch.ones(3, 4)}, path / "model.safetensors", {"format": "pt"})
    tied = config.get("tie_word_embeddings", False)
    config = {"architectures": [outer], "text_config": config, "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))


def rewrite_as_internlm2(path: Path) -> None:
    """Write a Llama as InternLM 2 stores it: other names, and q, k and v of each KV head side by side."""
    config = json.loads((path / "config.json").read_text())
    heads, tensors = config["num_key_value_heads"], load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            qkv = [tensors.pop(f"{prefix}self_attn.{x}_proj.{kind}") for x in "qkv"]
            grouped = torch.cat([x.unflatten(0, (heads, -1)) for x in qkv], dim=1)
            tensors[f"{prefix}attention.wqkv.{kind}"] = grouped.flatten(0, 1).contiguous()
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in INTERNLM2.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    config |= {"architectures": ["InternLM2ForCausalLM"], "bias": True}
    (path / "config.json").write_text(json.dumps(config))
