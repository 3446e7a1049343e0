"""A tiny checkpoint of any causal architecture of the installed transformers, made from its configuration class.

Every size that a configuration has is set from one table; what an architecture needs beside it stands in a second one.
Weights are random, as wide as keeps activations near one, so that greedy answers do not hang on the last bit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmkit.formats.hub import DEMO_FOLDER

TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
WIDTH, INNER, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, CHOSEN, VOCAB, POSITIONS = 64, 128, 4, 2, 16, 2, 4, 2, 4096, 512

# The fields of configuration classes, by what they mean.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"), WIDTH),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("attention_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), INNER),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff"), INNER),
    **dict.fromkeys(("feed_forward_size", "d_inner", "ffn_hidden_size", "shared_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), KV_HEADS),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_groups", "n_groups"), KV_HEADS),
    "index_n_heads": 16,  # few give many keys a score of 0 by ReLU, and which of equals are chosen hangs on the pass
    **dict.fromkeys(("head_dim", "swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "linear_head_dim", "dim_head", "d_head"), HEAD),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "attention_head_size", "rotary_dim"), HEAD),
    **dict.fromkeys(("global_head_dim", "conv_dim"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim",), HEAD // 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hc_lowrank"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "zero_expert_num"), CHOSEN),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "num_nextn_predict_layers", "num_mtp_layers"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "context_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "original_max_position_embeddings"), POSITIONS),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 16),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size"), 32),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size_per_layer_input", "altup_rank", "laurel_rank", "router_hidden_size"), 32),
    **dict.fromkeys(("query_pre_attn_scalar",), HEAD),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("pad_token_id",), 3),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0),
}  # fmt: skip

QWEN4_INDEX = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}  # fmt: skip
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# What single architectures need beside their sizes.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": {"gated_norm_rank": 32},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 512},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0}},
    "dots3_note": {
        "text_config": {"num_key_value_heads": HEADS},
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    },
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": INNER},
    "gemma3": {"vision_config": {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"rope_parameters": {"full_attention": HALF_TURNED, "sliding_attention": HALF_TURNED}},
    "qwen4_exp": {"text_config": QWEN4_INDEX},
    "qwen4_exp_text": QWEN4_INDEX,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "rwkv": {"attention_hidden_size": WIDTH},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def fields_of(config_class: type) -> set[str]:
    """The names of the fields of a configuration class."""
    return {field.name for field in dataclasses.fields(config_class)}


def sizes_for(config_class: type) -> dict[str, Any]:
    """The tiny values of the fields of a configuration class, with those of the configurations in it."""
    known = fields_of(config_class)
    values = {name: value for name, value in SIZES.items() if name in known}
    if "is_decoder" in known:
        values["is_decoder"] = True
    if "linear_conv_kernel_dim" in known:  # every fourth layer has attention
        values["num_hidden_layers"] = 4
    if "kv_lora_rank" in known:  # latent attention: its keys have parts of their own
        values |= {"head_dim": values["qk_rope_head_dim"], "num_key_value_heads": HEADS}
    if names := known & getattr(config_class, "sub_configs", {}).keys():
        whole = config_class()
        for name in names:
            if (inner := getattr(whole, name)) is not None:
                values[name] = {"model_type": inner.model_type} | sizes_for(type(inner))
    return values


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, dictionaries inside them too."""
    result = dict(values)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a tiny model of this type."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**merged(sizes_for(config_class), SPECIAL.get(model_type, {})))


def architecture_of(model_type: str) -> str:
    """The class that transformers makes of a causal model of this type."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """A transformers model of this type in float32 with random weights."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    model_class = getattr(transformers, architecture_of(model_type))
    if not isinstance(config, model_class.config_class):  # a model of text whose configuration is inside another
        config = config.get_text_config()
    return randomized(model_class(config))


@torch.no_grad()
def randomized(model: Any) -> Any:
    """A model in float32 with random weights."""
    model.to(torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not name.endswith(("A_log", ".D", "dt_bias")):
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


def save_tiny(model_type: str, folder: Path, seed: int = 0) -> Any:
    """Write a tiny model with the demo model's tokenizer, and return it."""
    model = tiny_model(model_type, seed)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("architectures", [architecture_of(model_type)])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER:
        shutil.copy(DEMO_FOLDER / name, folder)
    return model


def causal_types() -> list[str]:
    """The types of all causal models of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def version() -> str:
    """The version of transformers whose architectures these are."""
    return str(transformers.__version__)
