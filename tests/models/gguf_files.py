"""Tiny models of transformers as GGUF files, by the rules of llama.cpp's converter. The package gguf has the names."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.formats.gguf_writer import Encoded, floats, write
from tests.models import gguf_mixed

PAIRED = "llama", "granite", "granitemoe", "granitehybrid", "granite_swa", "arcee", "internlm2", "smollm3", "mistral3"
OFFSET = (
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma3",
    "qwen3next",
    "qwen35",
    "qwen35moe",
)  # norms are stored as the factor
# A field of config.json -> the end of its key.
KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "num_local_experts": "expert_count",
    "num_experts": "expert_count", "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count", "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "num_kv_shared_layers": "attention.shared_kv_layers",
    "moe_num_shared_experts": "expert_shared_count", "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}  # fmt: skip
# Whose window the converter writes.
WINDOWED = "gemma2", "gemma3", "gemma4", "phi3", "olmo2", "exaone4", "gpt-oss", "cohere2", "mimo2", "granite_swa"
PATTERNED = ("olmo2", "exaone4", "gemma4")


Encode = Callable[[Tensor], Encoded]


def coded(storage: str) -> Encode:
    """What writes matrices in one of the package's types."""

    def encode(tensor: Tensor) -> Encoded:
        codes = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[storage])
        return storage, tuple(tensor.shape), codes.tobytes()

    return encode


def write_gguf(
    path: Path, model: Any, folder: Path, arch: str, encode: Encode = floats, embeddings: Encode = floats, **keys: Any
) -> None:
    """Write the model that was saved in `folder`. `encode` writes matrices of layers. `keys` override the metadata's,
    after the architecture's name."""
    config = getattr(model.config, "text_config", model.config)
    config.allow_global_per_layer_attribute_access = True
    written = _metadata(config, arch) | keys
    metadata = {f"{arch}.{key}": value for key, value in written.items() if value is not None}
    tensors: dict[str, Encoded] = {}
    names = gguf.get_tensor_name_map(_number(arch), config.num_hidden_layers)
    for name, tensor in _tensors(load_file(folder / "model.safetensors"), config, arch):
        is_own = name.startswith(("blk.", "rope_", "per_layer_", "token_embd_norm."))
        place = name if is_own else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        matrix = (
            place.startswith("blk.") and tensor.ndim > 1 and not re.search(r"norm|inp|conv|k_b|v_b|ssm_[ad]$", place)
        )
        write_one = encode if matrix else embeddings if place == "token_embd.weight" else floats
        tensors[place] = write_one(tensor.contiguous())
    if not model.config.tie_word_embeddings or arch == "bert":
        assert arch == "bert" or "output.weight" in tensors
    else:
        tensors.pop("output.weight", None)
    write(path, {"general.architecture": arch} | metadata, tensors)


def _number(arch: str) -> Any:
    known = gguf_mixed.NAMED_AS.get(arch, arch)
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == known)


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, key in KEYS.items():
        value = getattr(config, field, None)
        if value is not None and (field != "sliding_window" or arch in WINDOWED):
            found[key] = float(value) if isinstance(value, float) else value
    found["block_count"] = config.num_hidden_layers
    if "head_dim" in config.to_dict() and config.head_dim is not None:
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch in PATTERNED and getattr(config, "layer_types", None) and config.sliding_window:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    return found | _rope(config, arch) | OWN.get(arch, lambda config: {})(config)


def _rope(config: Any, arch: str) -> dict[str, Any]:
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    found: dict[str, Any] = {"rope.freq_base": rope.get("rope_theta")}
    if "sliding_attention" in every:
        found["rope.freq_base_swa"] = every["sliding_attention"]["rope_theta"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and rope.get("rope_type") != "proportional":
        found["rope.dimension_count"] = int(size * partial)
    if rope.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "longrope":
        found |= {"rope.scaling.type": "longrope",
                  "rope.scaling.original_context_length": config.original_max_position_embeddings}  # fmt: skip
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        found["rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(scale) / math.log(config.original_max_position_embeddings)
        )
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
                  "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}  # fmt: skip
        for field in ("beta_fast", "beta_slow"):
            found[f"rope.scaling.yarn_{field}"] = rope.get(field)
    return found


def _deepseek2(config: Any) -> dict[str, Any]:
    found = gguf_mixed.latent(config) | {"expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2}
    log = config.rope_parameters.get("mscale_all_dim")
    return found | ({} if log is None else {"rope.scaling.yarn_log_multiplier": 0.1 * log})


def _gemma4(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    first, count = config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers
    layers = [config.per_layer_config[i] for i in range(count)]
    found: dict[str, Any] = {"attention.key_length": layers[slides.index(False)].head_dim}
    found["attention.key_length_swa"] = layers[slides.index(True)].head_dim
    if config.use_double_wide_mlp:
        found["feed_forward_length"] = [config.intermediate_size * (1 + (i >= first)) for i in range(count)]
    found["attention.head_count_kv"] = [layer.num_key_value_heads for layer in layers]
    return found


def _qwen3next(config: Any) -> dict[str, Any]:
    inner = config.linear_value_head_dim * config.linear_num_value_heads
    return {"full_attention_interval": 1 + config.layer_types.index("full_attention"), "ssm.inner_size": inner}


OWN: dict[str, Callable[[Any], dict[str, Any]]] = gguf_mixed.OWN | {
    "deepseek2": _deepseek2,
    "gemma4": _gemma4,
    "gpt-oss": lambda config: {"expert_feed_forward_length": config.intermediate_size},
    "minimax-m2": lambda config: {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2},
    "mistral3": lambda config: {
        "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
    },
    "qwen3next": _qwen3next,
}


def _tensors(saved: dict[str, Tensor], config: Any, arch: str) -> list[tuple[str, Tensor]]:
    """The checkpoint's tensors as the converter changes them, still with Hugging Face's names."""
    found, experts = [], defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in ((gguf_mixed.renamed(name, arch), tensor) for name, tensor in saved.items()):
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", name):
            experts[f"{match[1]}.{match[3]}.weight"][int(match[2])] = tensor
        else:
            found += _changed(name, tensor.float(), config, arch)
    for name, parts in experts.items():
        name = name.replace("block_sparse_moe.experts.w", "feed_forward.experts.w")
        name = re.sub(r"backbone(.*)mixer.experts", r"model\1mlp.experts", name)
        if "feed_forward.experts" in name:
            name = name.replace("model.layers", "layers")
        found.append((name, torch.stack([parts[i] for i in range(len(parts))])))
    return found + _divisors(config, arch)


def _changed(name: str, tensor: Tensor, config: Any, arch: str) -> list[tuple[str, Tensor]]:
    if (own := gguf_mixed.changed(name, tensor, config, arch)) is not None:
        return own
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    module = name.split(".")[-2]
    if arch in PAIRED and module in heads:
        tensor = tensor.reshape(heads[module], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if arch in OFFSET and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("correction_bias", "correction.bias"), tensor)]
    if name.endswith(("sinks", "layer_scalar")):
        return [(name + ".weight", tensor)]
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if arch == "gemma4" and name.endswith("router.scale"):
        return [(f"blk.{layer}.ffn_gate_inp.scale", tensor)]
    if arch == "gemma4" and name.endswith("per_expert_scale"):
        return [(f"blk.{layer}.ffn_down_exps.scale", tensor)]
    if arch == "gemma4" and ".experts." in name:
        return [(name + ".weight", tensor)]
    if arch == "gpt-oss" and ".experts." in name:
        return _gpt_oss(name, tensor)
    if arch in gguf_mixed.MLA and name.endswith("kv_b_proj.weight"):
        split = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
        keys, values = split.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return [(name.replace("kv_b", "k_b"), keys.transpose(1, 2)), (name.replace("kv_b", "v_b"), values)]
    if arch == "qwen3next" and "linear_attn" in name:
        return _delta(name, tensor, config, layer)
    if arch == "bert" and name.startswith("pooler"):
        return []
    if arch == "bert" and "position_embeddings" in name and config.model_type != "bert":
        tensor = tensor[config.pad_token_id + 1 :]
    return [(name, tensor.squeeze() if "shared_expert_gate" in name else tensor)]


def _gpt_oss(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if not name.endswith("_bias"):
        name, tensor = name + ".weight", tensor.transpose(-1, -2)
    axis = -1 if name.endswith("_bias") else -2
    name = name.replace("_proj_bias", "_proj.bias")
    if "gate_up" not in name:
        return [(name, tensor)]
    even, odd = (tensor.index_select(axis, torch.arange(i, tensor.shape[axis], 2)) for i in (0, 1))
    return [(name.replace("gate_up", "gate"), even), (name.replace("gate_up", "up"), odd)]


def _delta(name: str, tensor: Tensor, config: Any, layer: str) -> list[tuple[str, Tensor]]:
    if name.endswith("A_log"):
        return [(name, -tensor.exp())]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if "conv1d" in name:
        return [(name, tensor.squeeze())]
    if "in_proj_qkvz" not in name:
        return [(name, tensor)]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    value = values // keys * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, value, value]
    q, k, v, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, dim=1))
    return [(f"blk.{layer}.attn_qkv.weight", torch.cat([q, k, v])), (f"blk.{layer}.attn_gate.weight", z)]


def _divisors(config: Any, arch: str) -> list[tuple[str, Tensor]]:
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = rope.get("rope_type")
    if kind == "proportional":
        size = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
        turned = int(size * rope["partial_rotary_factor"] / 2)
        rest = size // 2 - turned
        return [("rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * rest))]
    if kind == "longrope":
        return [(f"rope_factors_{x}.weight", torch.tensor(rope[f"{x}_factor"])) for x in ("long", "short")]
    if kind != "llama3":
        return []
    turns = rope["original_max_position_embeddings"] / (2 * math.pi)
    turns = turns / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return [("rope_freqs.weight", 1 / ((1 - ramp) / rope["factor"] + ramp))]
