"""Tiny random models of architectures that lmkit has no family for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 199,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Keys and values in lmkit's blocks; those of a step's sequences are computed together.
PAGED: dict[str, dict[str, Any]] = {
    "olmo": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "persimmon": {},
    "gpt_neox": {},
    "cohere2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
}
# Recurrent states in transformers' caches, and attention, if there is any, in lmkit's blocks.
STATES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "jamba": {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
}  # fmt: skip
# Attention of transformers on keys and values in lmkit's blocks.
STORED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "bart": {
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 1,
        "is_decoder": True, "is_encoder_decoder": False,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
}  # fmt: skip
# Keys and values in a cache of the model's own.
OWN: dict[str, dict[str, Any]] = {
    "minimax": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}
ALL = PAGED | STATES | STORED | OWN


def make(folder: Path, name: str) -> torch.nn.Module:
    """Save a checkpoint, and return transformers' model of it in float32."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **(SIZES | ALL[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    return model
