"""What llama.cpp's converter does with models of recurrent blocks, short convolutions, indexers and newer experts: the
keys that it writes, and the tensors that it renames, reorders and transforms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = list[tuple[str, Tensor]]
FULL, SLIDING = "full_attention", "sliding_attention"
MAMBA = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight",
         "conv1d.bias": "ssm_conv1d.bias", "in_proj.weight": "ssm_in.weight", "in_proj.bias": "ssm_in.bias",
         "out_proj.weight": "ssm_out.weight", "out_proj.bias": "ssm_out.bias",
         "norm.weight": "ssm_norm.weight"}  # fmt: skip
DELTA = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight",
         "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
         "in_proj_a.weight": "ssm_alpha.weight", "in_proj_b.weight": "ssm_beta.weight",
         "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight"}  # fmt: skip
KDA = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "q_conv1d.weight": "ssm_conv1d_q.weight",
       "k_conv1d.weight": "ssm_conv1d_k.weight", "v_conv1d.weight": "ssm_conv1d_v.weight",
       "f_a_proj.weight": "ssm_f_a.weight", "f_b_proj.weight": "ssm_f_b.weight", "f_proj.weight": "ssm_f_a.weight",
       "g_a_proj.weight": "ssm_g_a.weight", "g_b_proj.weight": "ssm_g_b.weight", "b_proj.weight": "ssm_beta.weight",
       "o_norm.weight": "ssm_norm.weight"}  # fmt: skip
INDEXER = {"wq_b": "attn_q_b", "wk": "attn_k", "k_norm": "k_norm", "weights_proj": "proj"}
# Whose names the package has under another architecture.
NAMED_AS = {"granite_swa": "granite", "deepseek32": "glm-dsa", "hy_v3": "dots1", "bailingmoe3": "kimi-linear"}
MLA = "deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "bailingmoe3"


def renamed(name: str, arch: str) -> str:
    """Names that published checkpoints have otherwise than transformers writes them, or the package does not know."""
    if arch == "bailingmoe3":
        name = name.replace("word_embeddings", "embed_tokens").replace(".attention.dense.", ".self_attn.o_proj.")
        return name.replace(".attention.", ".self_attn.").replace("gate.expert_bias", "gate.e_score_correction_bias")
    if arch == "kimi-linear":
        return re.sub(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)\.", r"mlp.\1.", name)
    if arch == "hy_v3":
        return name.replace("mlp.router.gate", "mlp.gate").replace("shared_mlp", "shared_experts")
    return name.replace("model.language_model.", "model.")


def changed(name: str, tensor: Tensor, config: Any, arch: str) -> Tensors | None:
    """The tensors that become of one; None if it stays as it is."""
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if "visual." in name:
        return []
    place, end = f"blk.{layer}.", name.rpartition("layers.")[2].partition(".")[2]
    inner = end.split(".", 1)[-1]
    if end.startswith("linear_attn.") and arch != "qwen3next":
        return [(place + DELTA[inner], _delta(inner, tensor, config))]
    if inner in MAMBA and (end.startswith("mamba.") or (end.startswith("mixer.") and inner != "norm.weight")):
        return [(place + MAMBA[inner], _mamba(inner, tensor, config, arch))]
    if end == "mixer.norm.weight":
        return [(place + "ssm_norm.weight", _mamba(inner, tensor, config, arch))]
    if end.startswith("self_attn.") and arch in ("kimi-linear", "bailingmoe3"):
        return _kda(place, inner, tensor, config, arch)
    if end.startswith("self_attn.indexer."):
        module, _, suffix = inner.removeprefix("indexer.").rpartition(".")
        return [(f"{place}indexer.{INDEXER[module]}.{suffix}", tensor)]
    if end.startswith("conv."):
        name = {
            "conv.conv": "shortconv.conv",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        }[end.removesuffix(".weight")]
        return [(f"{place}{name}.weight", tensor.squeeze(1) if "conv.conv" in end else tensor)]
    if end == "feed_forward.expert_bias":
        return [(place + "exp_probs_b.bias", tensor)]
    if end == "mlp.expert_bias":
        return [(place + "exp_probs_b", tensor)]
    if end.endswith(("sinks", "attention_sink_bias")):
        return [(place + "attn_sinks.weight", tensor)]
    if arch == "falcon-h1":
        return _falcon(place, end, name, tensor, config)
    if arch == "qwen3vlmoe" and end.endswith(("experts.gate_up_proj", "experts.down_proj")):
        gate, up = tensor.chunk(2, dim=-2)
        parts = {"down": tensor} if end.endswith("down_proj") else {"gate": gate, "up": up}
        return [(f"{place}ffn_{part}_exps.weight", rows) for part, rows in parts.items()]
    if arch == "llama4" and ".experts." in end and end.endswith("_proj"):
        part = end.rpartition(".")[2]
        tensor = tensor.transpose(-1, -2)
        if part == "down_proj":
            return [(place + "ffn_down_exps.weight", tensor)]
        gate, up = tensor.chunk(2, dim=-2)
        return [(place + "ffn_gate_exps.weight", gate), (place + "ffn_up_exps.weight", up)]
    if end.endswith(("moe.input_linear.weight", "shared_mlp.input_linear.weight")):
        gate, up = tensor.chunk(2, dim=-2)
        kind = "_exps" if "moe" in end else "_shexp" if getattr(config, "num_local_experts", 0) else ""
        return [(f"{place}ffn_gate{kind}.weight", gate), (f"{place}ffn_up{kind}.weight", up)]
    if end == "shared_mlp.output_linear.weight":
        kind = "_shexp" if getattr(config, "num_local_experts", 0) else ""
        return [(f"{place}ffn_down{kind}.weight", tensor)]
    return None


def _delta(inner: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads in turns of the key heads."""
    groups, heads, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def in_turns(rows: Tensor, size: int) -> Tensor:
        return rows.reshape(groups, heads // groups, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if inner.startswith(("conv1d", "in_proj_qkv")):
        tensor, keys = tensor.squeeze(), 2 * groups * config.linear_key_head_dim
        return torch.cat([tensor[:keys], in_turns(tensor[keys:], dim)])
    if inner.startswith("in_proj_z"):
        return in_turns(tensor, dim)
    if inner.startswith("out_proj"):
        return in_turns(tensor.T, dim).T
    if inner.startswith("norm"):
        return tensor
    return in_turns(-tensor.exp() if inner == "A_log" else tensor, 1)


def _mamba(inner: str, tensor: Tensor, config: Any, arch: str) -> Tensor:
    if inner == "A_log":
        return -tensor.exp().reshape(-1, 1)
    if inner == "D":
        return tensor.reshape(-1, 1)
    if inner == "norm.weight":
        return tensor.reshape(getattr(config, "n_groups", 0) or config.mamba_n_groups, -1)
    if arch == "falcon-h1" and inner == "in_proj.weight":
        taken = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, taken, taken, config.mamba_n_heads])
        factors = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)
        return tensor * (float(config.ssm_in_multiplier) * factors[:, None])
    if arch == "falcon-h1" and inner == "out_proj.weight":
        return tensor * float(config.ssm_out_multiplier)
    return tensor.squeeze() if inner == "conv1d.weight" else tensor


def _kda(place: str, inner: str, tensor: Tensor, config: Any, arch: str) -> Tensors | None:
    is_full = config.layer_types[int(place.split(".")[1])] == FULL
    if inner == "A_log":
        return [(place + "ssm_a", -tensor.exp() if arch == "kimi-linear" else tensor.exp().reshape(-1, 1))]
    if "conv1d" in inner:
        return [(place + KDA[inner], tensor.reshape(1, len(tensor), 1, -1))]
    if inner == "g_proj.weight":
        return [(place + ("attn_gate.weight" if is_full else "ssm_g_a.weight"), tensor)]
    return [(place + KDA[inner], tensor)] if inner in KDA else None


def _falcon(place: str, end: str, name: str, tensor: Tensor, config: Any) -> Tensors | None:
    """Factors are in the weights. The norm before the MLP lacks its ending."""
    read, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    factors = {"self_attn.q_proj": read, "self_attn.k_proj": read * config.key_multiplier, "self_attn.v_proj": read,
               "self_attn.o_proj": config.attention_out_multiplier, "feed_forward.gate_proj": gate,
               "feed_forward.down_proj": down, "lm_head": config.lm_head_multiplier,
               "model.embed_tokens": config.embedding_multiplier}  # fmt: skip
    if end == "pre_ff_layernorm.weight":
        return [(place + "ffn_norm", tensor)]
    module = (end if place != "blk.." else name).removesuffix(".weight")
    return [(name, tensor * factors[module])] if module in factors else None


def _layers(config: Any, kind: str, value: Any) -> list[Any]:
    """The value for layers of a kind, and 0 for the others."""
    return [value if each == kind else 0 for each in config.layer_types]


def _ssm(heads: int, width: int, state: int, groups: int, kernel: int) -> dict[str, Any]:
    return {"ssm.conv_kernel": kernel, "ssm.inner_size": width, "ssm.state_size": state,
            "ssm.time_step_rank": heads, "ssm.group_count": groups}  # fmt: skip


def _mamba_beside(config: Any) -> dict[str, Any]:
    width = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
    sizes = config.mamba_n_heads, width, config.mamba_d_state, config.mamba_n_groups, config.mamba_d_conv
    return _ssm(*sizes)


def _delta_keys(config: Any) -> dict[str, Any]:
    is_linear = [kind != FULL for kind in config.layer_types]
    return {"ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "full_attention_interval": 4, "attention.recurrent_layers": is_linear,
            "rope.dimension_sections": [2, 1, 1, 0]}  # fmt: skip


def _lfm2(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": _layers(config, FULL, config.num_key_value_heads),
            "attention.layer_norm_rms_epsilon": config.norm_eps, "shortconv.l_cache": config.conv_L_cache,
            "leading_dense_block_count": getattr(config, "num_dense_layers", None),
            "expert_gating_func": 2 if hasattr(config, "num_dense_layers") else None}  # fmt: skip


def _mamba2(config: Any) -> dict[str, Any]:
    own = _ssm(
        config.num_heads, config.expand * config.hidden_size, config.state_size, config.n_groups, config.conv_kernel
    )
    zeros = {"feed_forward_length": 0, "attention.head_count": 0, "context_length": 1 << 20}
    absent = dict.fromkeys(("attention.key_length", "attention.value_length", "attention.head_count_kv"))
    return own | zeros | absent | {"attention.layer_norm_rms_epsilon": config.layer_norm_epsilon}


def _granite_hybrid(config: Any) -> dict[str, Any]:
    has_rope = config.model_type == "bamba"
    kinds = [FULL if kind in ("attention", FULL) else "" for kind in config.layer_types]
    shared = getattr(config, "shared_intermediate_size", None)
    return _mamba_beside(config) | {
        "attention.head_count_kv": [config.num_key_value_heads if kind else 0 for kind in kinds],
        "rope.scaling.finetuned": has_rope, "rope.dimension_count": 8 if has_rope else None,
        "expert_shared_feed_forward_length": shared}  # fmt: skip


def _nemotron(config: Any) -> dict[str, Any]:
    is_sparse, inner = "moe" in config.layer_types, config.mamba_num_heads * config.mamba_head_dim
    own = _ssm(config.mamba_num_heads, inner, config.ssm_state_size, config.n_groups, config.conv_kernel)
    own |= {"attention.head_count_kv": _layers(config, FULL, config.num_key_value_heads),
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "attention.layer_norm_rms_epsilon": None}  # fmt: skip
    size = config.moe_intermediate_size if is_sparse else config.intermediate_size
    own["feed_forward_length"] = _layers(config, "moe" if is_sparse else "mlp", size)
    if not is_sparse:
        return own
    shared = {"expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size}
    return own | shared | {"moe_latent_size": config.moe_latent_size}


def latent(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _indexed(config: Any) -> dict[str, Any]:
    kinds = getattr(config, "indexer_types", None)
    return latent(config) | {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [kind == "full" for kind in kinds] if kinds else None,
        "expert_gating_func": None if kinds else 2,
    }


def _kda_keys(config: Any) -> dict[str, Any]:
    return latent(config) | {
        "attention.head_count_kv": _layers(config, FULL, 1),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "kda.gate_lower_bound": getattr(config, "kda_lower_bound", None),
        "expert_gating_func": 2,
        "expert_weights_norm": None if config.model_type == "kimi_linear" else True,
    }  # fmt: skip


def _mimo(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads * (1 + (kind == SLIDING)) for kind in config.layer_types]
    return {"attention.head_count_kv": heads, "attention.value_length": config.v_head_dim,
            "attention.sliding_window_pattern": [int(kind == SLIDING) for kind in config.layer_types],
            "attention.value_scale": config.attention_value_scale, "expert_gating_func": 2,
            "rope.dimension_count": 8}  # fmt: skip


def _hy_v3(config: Any) -> dict[str, Any]:
    wide = config.moe_intermediate_size * config.num_shared_experts
    return {"expert_shared_feed_forward_length": wide, "expert_weights_norm": True, "expert_gating_func": 2,
            "expert_weights_scale": config.router_scaling_factor, "expert_shared_count": None}  # fmt: skip


OWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "qwen35": _delta_keys,
    "qwen35moe": _delta_keys,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "mamba2": _mamba2,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _mamba_beside,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "deepseek32": _indexed,
    "glm-dsa": _indexed,
    "kimi-linear": _kda_keys,
    "bailingmoe3": _kda_keys,
    "mimo2": _mimo,
    "hy_v3": _hy_v3,
    "glm4moe": lambda config: {
        "expert_gating_func": 2,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)),
    },
    "cohere2": lambda config: {"logit_scale": config.logit_scale},
    "hunyuan-moe": lambda config: {
        "expert_used_count": config.moe_topk,
        "expert_feed_forward_length": config.intermediate_size,
    },
    "llama4": lambda config: {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "expert_used_count": 1,
    },
    "granite_swa": lambda config: {
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "attention.rope_pattern": [bool(base) for base in config.layer_rope_theta],
        "rope.freq_base": max(config.layer_rope_theta),
    },
}
