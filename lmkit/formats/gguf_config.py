"""config.json of a GGUF file, from its metadata. Each architecture of llama.cpp is an entry of `ARCHITECTURES`.

The metadata has the sizes under keys that begin with the architecture's name (`qwen3.block_count`). What a family has
that no key tells (an activation, biases, norms of q and k) is seen from the tensors, or is fixed in its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_facts import FULL, SLIDING, Facts
from lmkit.formats.gguf_model import GgufModel
from lmkit.formats.gguf_rope import rope_fields

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
MINIMAX = LOCAL_EXPERTS | {"intermediate_size": "expert_feed_forward_length"}
ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
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
DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
# A file without the key has no such thing. A config.json without it has the default of its family's class.
NONE_IF_ABSENT = {*WINDOW, *CAPS, "q_lora_rank"}
SIGMOID = 2  # expert_gating_func


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture become a config.json."""

    name: str  # Hugging Face's
    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)  # besides SIZES and OPTIONAL
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Facts, dict[str, Any]], dict[str, Any]] = lambda facts, config: {}  # what a rule gives


def _llama(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Llama's name stands for Mistral, Mixtral and InternLM 3, too."""
    if config.get("num_local_experts"):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if config.get("sliding_window"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if facts.has("attn_q.bias") and not facts.has("attn_output.bias"):
        return {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": False}
    return {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}


def _mistral3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3 has queries that grow behind the context before YaRN."""
    if not (rate := facts.number("attention.temperature_scale")):
        return {}
    scaling = rope_fields(facts, config).get("rope_scaling", {})
    rope = {"rope_theta": config.get("rope_theta", 1e6), "llama_4_scaling_beta": rate} | scaling
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}


def _ernie(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": facts.has("attn_q.bias")}


def _gemma(period: int, largest: int) -> Callable[[Facts, dict[str, Any]], dict[str, Any]]:
    """The largest model, known by its number of layers, divides queries by other numbers than the rest."""

    def more(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        head = config.get("head_dim", 256)
        if config["num_hidden_layers"] == largest:
            head = config["hidden_size"] // max(config["num_attention_heads"], 1)
        made = {"query_pre_attn_scalar": head}
        if period == 6:  # Gemma 3
            made["rope_local_base_freq"] = facts.number("rope.freq_base_swa") or 10000.0
        return made | {"layer_types": facts.layer_types(period if config.get("sliding_window") else 1)}

    return more


def _gemma4(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    kinds = facts.layer_types(6)
    heads, inner = (facts.by_layer(key, len(kinds)) for key in ("attention.head_count_kv", "feed_forward_length"))
    of_kind = dict(zip(kinds, heads, strict=False))
    first = kinds.index(FULL) if FULL in kinds else 0
    divisors = facts.file.floats("rope_freqs.weight")
    turned = sum(divisor == 1 for divisor in divisors) / len(divisors) if divisors else 0.25
    theta = {FULL: config.get("rope_theta", 1e6), SLIDING: facts.number("rope.freq_base_swa") or 1e4}
    table = facts.file.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": kinds,
        "head_dim": facts.number("attention.key_length_swa") or config.get("head_dim", 256),
        "global_head_dim": config.get("head_dim", 512),
        "num_key_value_heads": of_kind.get(SLIDING, of_kind.get(FULL)),
        "num_global_key_value_heads": of_kind.get(FULL),
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in facts.file.tensors,
        "num_kv_shared_layers": facts.number("attention.shared_kv_layers") or 0,
        "intermediate_size": min(inner),
        "use_double_wide_mlp": len(set(inner)) > 1,
        "hidden_size_per_layer_input": facts.number("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
        "enable_moe_block": facts.has("ffn_gate_up_exps.weight") or facts.has("ffn_gate_exps.weight"),
        "top_k_experts": config.get("num_experts_per_tok"),
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": turned, "rope_theta": theta[FULL]},
            SLIDING: {"rope_type": "default", "rope_theta": theta[SLIDING]},
        },
    }


def _qwen3next(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp has queries, keys, values and gates apart, as Qwen3.5 has them; the models differ in nothing else."""
    return {
        "linear_value_head_dim": int(facts.needed("ssm.inner_size")) // max(int(facts.needed("ssm.time_step_rank")), 1)
    }


def _olmo2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": config.get("rope_theta", 5e5)}
    stretched = rope_fields(facts, config).get("rope_scaling", {})
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": facts.layer_types(4),
        "rope_parameters": {FULL: plain | stretched, SLIDING: plain},
    }


def _phi3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The length before a scaling stands outside of it."""
    original = facts.number("rope.scaling.original_context_length")
    return {"original_max_position_embeddings": original or config["max_position_embeddings"]}


def _exaone4(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": facts.layer_types(4)} if config.get("sliding_window") else {"sliding_window": None}


def _predicting(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The last blocks predict tokens beyond the next one; they are not read."""
    own = {"num_hidden_layers": config["num_hidden_layers"] - int(facts.number("nextn_predict_layers") or 0)}
    return own | {"use_qk_norm": facts.has("attn_q_norm.weight")}


def _deepseek2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """V2, or V3 by the function of the scores. Files of 2024 have the widths of heads under other keys."""
    turned = int(facts.needed("rope.dimension_count"))
    query = facts.number("attention.key_length_mla") or facts.needed("attention.key_length")
    found = {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": int(query) - turned,
        "v_head_dim": facts.number("attention.value_length_mla") or facts.needed("attention.value_length"),
        "kv_lora_rank": facts.needed("attention.kv_lora_rank"),
        "q_lora_rank": facts.number("attention.q_lora_rank"),
        "num_key_value_heads": config["num_attention_heads"],
        "num_hidden_layers": _predicting(facts, config)["num_hidden_layers"],
        "head_dim": None,
        "norm_topk_prob": bool(config.get("norm_topk_prob")),
    }
    if facts.number("expert_gating_func") != SIGMOID:
        return found | {"topk_method": "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"}
    if "n_group" not in config and config.get("n_routed_experts") != 256:  # which V3 alone has, in groups
        found |= {"n_group": 1, "topk_group": 1}
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return found | own | {"n_shared_experts": config.get("n_shared_experts", 0)}


def _bert(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    types = facts.file.tensors.get("token_types.weight")
    if any(name.startswith("cls.") for name in facts.file.tensors):
        raise UnsupportedError(f"{facts.file.path}: a head for classes (cls) is not read from GGUF")
    return {"type_vocab_size": types.shape[0] if types else 0}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", LOCAL_EXPERTS | WINDOW, more=_llama),
    "mistral3": Architecture("MistralForCausalLM", "mistral", WINDOW, more=_mistral3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", EXPERTS | SHARED, {"norm_topk_prob": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, {"norm_topk_prob": True}),
    "qwen3next": Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", EXPERTS | SHARED | DELTA, more=_qwen3next),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", CAPS | WINDOW, more=_gemma(2, 46)),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", CAPS | WINDOW, more=_gemma(6, 62)),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", EXPERTS | CAPS | WINDOW, more=_gemma4),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", WINDOW, more=_phi3),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", WINDOW, more=_olmo2),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", WINDOW, more=_exaone4),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3"),
    "chatglm": Architecture("GlmForCausalLM", "glm"),
    "glm4": Architecture("Glm4ForCausalLM", "glm4"),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", GROUPED_EXPERTS, more=_predicting),
    "internlm2": Architecture("InternLM2ForCausalLM", "internlm2"),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", LOCAL_EXPERTS | WINDOW),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2", GROUPED_EXPERTS, more=_deepseek2),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", GROUPED_EXPERTS, {"sliding_window": None}),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", EXPERTS, {"norm_topk_prob": False}),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", more=_ernie),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE, more=_ernie),
    "bert": Architecture("BertModel", "bert", {"layer_norm_eps": "attention.layer_norm_epsilon"}, more=_bert),
}  # fmt: skip


def make_config(file: GgufModel) -> dict[str, Any]:
    """The content of config.json. Its numbers are checked like those of every config.json.

    Raises UnsupportedError for an architecture that is not known, and CheckpointError for missing or wrong metadata.
    """
    kind = file.metadata.get("general.architecture")
    entry = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise UnsupportedError(
            f"{file.path}: architecture {kind!r}; lmkit reads {', '.join(ARCHITECTURES)} from GGUF (docs/formats.md)"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    assert isinstance(kind, str)
    facts = Facts(file, kind)
    known = OPTIONAL if kind != "gemma4" else {k: v for k, v in OPTIONAL.items() if k not in PER_LAYER}
    config: dict[str, Any] = {"architectures": [entry.name], "model_type": entry.model_type}
    config |= {name: facts.needed(key) for name, key in SIZES.items()}
    config |= facts.fields(known) | facts.fields(entry.fields) | dict(entry.fixed)
    config |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "attention_bias": any(map(facts.has, ("attn_q.bias", "attn_qkv.bias", "attn_kv_a_mqa.bias"))),
        "attention_out_bias": facts.has("attn_output.bias"),
        "bias": facts.has("attn_q.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": file.float_type,
    }
    config |= entry.more(facts, config)
    if "rope_parameters" not in config and kind != "bert":
        config |= rope_fields(facts, config)
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if type(token := file.metadata.get(f"tokenizer.ggml.{name}_token_id")) is int:
            config[key] = token
    absent = dict.fromkeys(NONE_IF_ABSENT & entry.fields.keys())
    return absent | {name: value for name, value in config.items() if value is not None or name in NONE_IF_ABSENT}


PER_LAYER = ("intermediate_size", "num_key_value_heads")  # of Gemma 4, which may have other ones in each layer
