"""Roles: one word for each weight of a decoder layer, independent of its name in a checkpoint.

Smoothing pairs, fusing, tensor-parallel split and LoRA targets are written over roles, once, for every family
(models.layer_spec).
"""

from __future__ import annotations

# role -> the name of its module in a checkpoint, below `model.layers.{i}.`
LLAMA_NAMES = {
    "norm.attn": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.sinks": "self_attn.sinks",
    "norm.mlp": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Roles that only models with norms after attention and MLP have (Gemma 2), and the one role that they name
# differently.
POST_NORM_NAMES = {
    "norm.attn_out": "post_attention_layernorm",
    "norm.mlp": "pre_feedforward_layernorm",
    "norm.mlp_out": "post_feedforward_layernorm",
}
# OLMo 2 has only the norms after them.
AFTER_NORM_NAMES = {"norm.attn_out": "post_attention_layernorm", "norm.mlp_out": "post_feedforward_layernorm"}
# Names of sparse layers, by kind of checkpoint. {} is the number of an expert.
QWEN_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
    "mlp.shared_router": "mlp.shared_expert_gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}
# GLM-4.5, dots.llm1: a bias for the choice of experts, and a shared expert that no router weighs.
SIGMOID_EXPERTS = QWEN_EXPERTS | {
    "mlp.score_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
# Hunyuan 3.
HUNYUAN_EXPERTS = {
    "mlp.router": "mlp.router.gate",
    "mlp.score_bias": "mlp.expert_bias",
    "mlp.shared.gate": "mlp.shared_mlp.gate_proj",
    "mlp.shared.up": "mlp.shared_mlp.up_proj",
    "mlp.shared.down": "mlp.shared_mlp.down_proj",
}
LATENT_NAMES = LLAMA_NAMES | {
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
    "attn.index_q": "self_attn.indexer.wq_b",
    "attn.index_k": "self_attn.indexer.wk",
    "attn.index_k_norm": "self_attn.indexer.k_norm",
    "attn.index_weights": "self_attn.indexer.weights_proj",
}
GPT_OSS_EXPERTS = QWEN_EXPERTS | {"mlp.router": "mlp.router"}
MIXTRAL_EXPERTS = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.score_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down": "block_sparse_moe.experts.{}.w2",
}
GRANITE_EXPERTS = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.gate_proj",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.up_proj",
    "mlp.experts.{}.down": "block_sparse_moe.experts.{}.down_proj",
}
# Qwen3-Next and Qwen3.5. A checkpoint has q and the gate of a head side by side in q_proj: models.fused.
GATED_NAMES = {"attn.q": "self_attn.query_proj", "attn.gate": "self_attn.gate_proj"}
DELTA_NAMES = {
    "attn.qkvz": "linear_attn.in_proj_qkvz",
    "attn.ba": "linear_attn.in_proj_ba",
    "attn.qkv": "linear_attn.in_proj_qkv",
    "attn.z": "linear_attn.in_proj_z",
    "attn.b": "linear_attn.in_proj_b",
    "attn.a": "linear_attn.in_proj_a",
    "attn.conv": "linear_attn.conv1d",
    "attn.a_log": "linear_attn.A_log",
    "attn.dt_bias": "linear_attn.dt_bias",
    "attn.delta_norm": "linear_attn.norm",
    "attn.o": "linear_attn.out_proj",
}
# Gemma 4: a vector of each token for each layer, and a number that the residual stream is multiplied with.
PER_LAYER_NAMES = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.out": "per_layer_projection",
    "norm.per_layer_out": "post_per_layer_input_norm",
    "stream_scale": "layer_scalar",
}
# Gemma 4's experts stand beside a dense MLP, in the place of a shared expert.
BESIDE_EXPERTS = {
    "mlp.shared.gate": "mlp.gate_proj",
    "mlp.shared.up": "mlp.up_proj",
    "mlp.shared.down": "mlp.down_proj",
    "mlp.router": "router.proj",
    "mlp.router_norm": "router.scale",
    "mlp.expert_scale": "router.per_expert_scale",
    "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.shared_out_norm": "post_feedforward_layernorm_1",
    "mlp.experts_out_norm": "post_feedforward_layernorm_2",
    "mlp.experts.{}.gate": "experts.{}.gate_proj",
    "mlp.experts.{}.up": "experts.{}.up_proj",
    "mlp.experts.{}.down": "experts.{}.down_proj",
}
OPT_NAMES = {
    "norm.attn": "self_attn_layer_norm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "norm.mlp": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}
WHISPER_NAMES = OPT_NAMES | {
    "norm.cross": "encoder_attn_layer_norm",
    "cross.q": "encoder_attn.q_proj",
    "cross.k": "encoder_attn.k_proj",
    "cross.v": "encoder_attn.v_proj",
    "cross.o": "encoder_attn.out_proj",
}
BERT_NAMES = {
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "norm.attn": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm.mlp": "output.LayerNorm",
}
MODERNBERT_NAMES = LLAMA_NAMES | {
    "norm.attn": "attn_norm",
    "attn.o": "attn.Wo",
    "norm.mlp": "mlp_norm",
    "mlp.down": "mlp.Wo",
}
EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens", "model.norm", "lm_head"
POSITIONS, TOKEN_TYPES, EMBED_NORM = "model.embed_positions", "model.embed_types", "model.embed_norm"
PER_LAYER_TABLE, PER_LAYER_NORM = "model.embed_tokens_per_layer", "model.per_layer_projection_norm"
PER_LAYER_PROJECTION = "model.per_layer_model_projection"
PROJECT_IN, PROJECT_OUT = "model.project_in", "model.project_out"

QKV = ("attn.q", "attn.k", "attn.v")
LINEARS = (*QKV, "attn.o", "mlp.gate", "mlp.up", "mlp.down")  # of a dense layer


def expert_of(role: str) -> int | None:
    """3 for `mlp.experts.3.up`; None for a role that computes every token."""
    return int(role.split(".")[2]) if role.startswith("mlp.experts.") else None
