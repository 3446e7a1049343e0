"""Architectures of GGUF files with recurrent blocks or short convolutions. What a layer is, its tensors tell."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.errors import UnsupportedError
from lmkit.formats.gguf_architecture import (
    EXPERTS,
    GRANITE,
    GROUPED_EXPERTS,
    LOCAL_EXPERTS,
    SHARED,
    Architecture,
    Config,
)
from lmkit.formats.gguf_experts import latent
from lmkit.formats.gguf_facts import FULL, Facts

LINEAR = "linear_attention"
DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
CONV = {"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"}
CONV_EXPERTS = {"num_dense_layers": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale"}
MAMBA = {
    "num_heads": "ssm.time_step_rank",
    "state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}
BESIDE = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}  # Mamba-2 in a model that has attention, too
SHARED_MLP = {"shared_intermediate_size": "expert_shared_feed_forward_length"}
NEMOTRON = {
    "mamba_num_heads": "ssm.time_step_rank",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
}
UNSCALED = {
    f"{name}_multiplier": 1.0
    for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
} | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}  # weights are multiplied with them already
KDA = {"short_conv_kernel_size": "ssm.conv_kernel"}


def _kinds(facts: Facts, part: str, kind: str = LINEAR) -> list[str]:
    """The kind of each layer: `kind` if it has the tensor, else full attention."""
    return [kind if has else FULL for has in facts.layers_with(part)]


def _width(facts: Facts) -> int:
    """Of one of the heads of a state."""
    return int(facts.needed("ssm.inner_size")) // max(int(facts.needed("ssm.time_step_rank")), 1)


def _delta(facts: Facts, config: Config) -> Config:
    """llama.cpp has queries, keys, values and gates apart, as Qwen3.5 has them; Qwen3-Next differs in nothing else."""
    return {"linear_value_head_dim": _width(facts), "layer_types": _kinds(facts, "ssm_conv1d.weight")}


def _conv(facts: Facts, config: Config) -> Config:
    if facts.number("attention.sliding_window"):
        raise UnsupportedError(f"{facts.file.path}: a window of {facts.kind} is not read from GGUF")
    return {
        "layer_types": _kinds(facts, "shortconv.conv.weight", "conv"),
        "block_auto_adjust_ff_dim": False,
        "use_expert_bias": facts.has("exp_probs_b.bias"),
        "conv_bias": facts.has("shortconv.in_proj.bias"),
    }


def _mamba(facts: Facts, config: Config) -> Config:
    return {
        "head_dim": _width(facts),
        "expand": int(facts.needed("ssm.inner_size")) // max(int(config["hidden_size"]), 1),
        "use_bias": facts.has("ssm_in.bias"),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def _mamba_beside(facts: Facts) -> Config:
    return {
        "mamba_d_head": _width(facts),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def _granite_hybrid(facts: Facts, config: Config) -> Config:
    """Granite 4, or Bamba, which has RoPE and no factors."""
    head = config["hidden_size"] // max(int(config["num_attention_heads"]), 1)
    found = _mamba_beside(facts) | {
        "layer_types": _kinds(facts, "ssm_in.weight"),
        "mamba_expand": int(facts.needed("ssm.inner_size")) // max(int(config["hidden_size"]), 1),
        "num_local_experts": config.get("num_local_experts", 0),
        "position_embedding_type": "nope" if facts.number("rope.scaling.finetuned") is False else "rope",
        "attention_multiplier": config.get("attention_multiplier", max(head, 1) ** -0.5),
    }
    wide = config.get("shared_intermediate_size", config.get("intermediate_size"))
    return found | {"shared_intermediate_size": wide}


def _falcon(facts: Facts, config: Config) -> Config:
    return _mamba_beside(facts) | {
        "mamba_d_ssm": facts.needed("ssm.inner_size"),
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron(facts: Facts, config: Config) -> Config:
    kinds = {"ssm_in": LINEAR, "attn_output": FULL, "ffn_gate_inp": "moe"}
    has = {kind: facts.layers_with(f"{part}.weight") for part, kind in kinds.items()}
    count = range(config["num_hidden_layers"])
    return {
        "layers_block_type": [next((kind for kind, there in has.items() if there[i]), "mlp") for i in count],
        "mamba_head_dim": _width(facts),
        "layer_norm_epsilon": config.get("rms_norm_eps", facts.number("attention.layer_norm_epsilon")),
        "use_bias": facts.has("ssm_in.bias"),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
        "mlp_bias": facts.has("ffn_up.bias") or facts.has("ffn_up_shexp.bias"),
    }


def _kda(facts: Facts, config: Config) -> Config:
    """Kimi Delta Attention in most layers, latent attention in the others."""
    dim = facts.needed("kda.head_dim")
    return latent(facts, config) | {
        "layer_types": _kinds(facts, "ssm_beta.weight"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": dim,
        "linear_conv_kernel_dim": facts.needed("ssm.conv_kernel"),
        "n_shared_experts": config.get("n_shared_experts", 0),
    }


def _kimi(facts: Facts, config: Config) -> Config:
    return _kda(facts, config) | {"norm_topk_prob": config.get("norm_topk_prob", True)}


def _ling(facts: Facts, config: Config) -> Config:
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if any(facts.numbers(key)):
            raise UnsupportedError(f"{facts.file.path}: {facts.kind}.{key} (limits of an activation) is not supported")
    floor = facts.number("kda.gate_lower_bound")
    return _kda(facts, config) | {
        "head_dim": facts.needed("kda.head_dim"),
        "kda_safe_gate": floor is not None,
        "kda_lower_bound": floor,
    }


HYBRIDS: Mapping[str, Architecture] = {
    "qwen3next": Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", EXPERTS | SHARED | DELTA, more=_delta),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA, more=_delta),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", EXPERTS | SHARED | DELTA, more=_delta),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", CONV, more=_conv),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", "lfm2_moe", CONV | EXPERTS | CONV_EXPERTS, more=_conv),
    "mamba2": Architecture("Mamba2ForCausalLM", "mamba2", MAMBA, more=_mamba),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        GRANITE | LOCAL_EXPERTS | BESIDE | SHARED_MLP,
        more=_granite_hybrid,
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", "falcon_h1", BESIDE, UNSCALED, more=_falcon),
    "nemotron_h": Architecture("NemotronHForCausalLM", "nemotron_h", NEMOTRON, more=_nemotron),
    "nemotron_h_moe": Architecture("NemotronHForCausalLM", "nemotron_h", NEMOTRON | GROUPED_EXPERTS, more=_nemotron),
    "kimi-linear": Architecture("KimiLinearForCausalLM", "kimi_linear", GROUPED_EXPERTS, more=_kimi),
    "bailingmoe3": Architecture("BailingHybridForCausalLM", "bailing_hybrid", GROUPED_EXPERTS | KDA, more=_ling),
}  # fmt: skip
