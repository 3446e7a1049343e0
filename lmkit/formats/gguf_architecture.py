"""An architecture of llama.cpp as an entry of a table, and the keys that several of them share.

The metadata has the sizes under keys that begin with the architecture's name (`qwen3.block_count`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmkit.formats.gguf_facts import Facts

Config = dict[str, Any]
Rule = Callable[[Facts, Config], Config]

# Hugging Face's name of a size -> the key after the architecture's name.
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
EXPERTS = {"num_experts": "expert_count"}
LOCAL_EXPERTS = {"num_local_experts": "expert_count"}
GROUPED_EXPERTS = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
SIGMOID = 2  # expert_gating_func


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture become a config.json."""

    name: str  # Hugging Face's
    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)  # besides SIZES and OPTIONAL
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Rule = lambda facts, config: {}  # what a rule gives
    apart: tuple[str, ...] = ()  # names in OPTIONAL that the rule reads in another way


def biased(facts: Facts, config: Config) -> Config:
    """Of ERNIE 4.5: all linears have a bias, or none."""
    return {"use_bias": facts.has("attn_q.bias")}
