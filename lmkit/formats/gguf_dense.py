"""Dense architectures of GGUF files, and encoders."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.errors import UnsupportedError
from lmkit.formats.gguf_architecture import (
    CAPS,
    EXPERTS,
    GRANITE,
    LOCAL_EXPERTS,
    WINDOW,
    Architecture,
    Config,
    Rule,
    biased,
)
from lmkit.formats.gguf_facts import FULL, SLIDING, Facts
from lmkit.formats.gguf_rope import rope_fields

COHERE = {"logit_scale": "logit_scale", "layer_norm_eps": "attention.layer_norm_epsilon"}
MODERN_BERT = {"local_attention": "attention.sliding_window", "norm_eps": "attention.layer_norm_epsilon"}
BY_LAYER = "intermediate_size", "num_key_value_heads"  # of Gemma 4, which may have other ones in each layer


def _llama(facts: Facts, config: Config) -> Config:
    """Llama's name stands for Mistral, Mixtral and InternLM 3, too."""
    if config.get("num_local_experts"):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if config.get("sliding_window"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if facts.has("attn_q.bias") and not facts.has("attn_output.bias"):
        return {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": False}
    return {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}


def _mistral3(facts: Facts, config: Config) -> Config:
    """Ministral 3 has queries that grow behind the context before YaRN."""
    if not (rate := facts.number("attention.temperature_scale")):
        return {}
    scaling = rope_fields(facts, config).get("rope_scaling", {})
    rope = {"rope_theta": config.get("rope_theta", 1e6), "llama_4_scaling_beta": rate} | scaling
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}


def _gemma(period: int, largest: int) -> Rule:
    """The largest model, known by its number of layers, divides queries by other numbers than the rest."""

    def more(facts: Facts, config: Config) -> Config:
        head = config.get("head_dim", 256)
        if config["num_hidden_layers"] == largest:
            head = config["hidden_size"] // max(config["num_attention_heads"], 1)
        made = {"query_pre_attn_scalar": head}
        if period == 6:  # Gemma 3
            made["rope_local_base_freq"] = facts.number("rope.freq_base_swa") or 10000.0
        return made | {"layer_types": facts.layer_types(period if config.get("sliding_window") else 1)}

    return more


def _gemma4(facts: Facts, config: Config) -> Config:
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


def _olmo2(facts: Facts, config: Config) -> Config:
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


def _phi3(facts: Facts, config: Config) -> Config:
    """The length before a scaling stands outside of it."""
    original = facts.number("rope.scaling.original_context_length")
    return {"original_max_position_embeddings": original or config["max_position_embeddings"]}


def _exaone4(facts: Facts, config: Config) -> Config:
    return {"layer_types": facts.layer_types(4)} if config.get("sliding_window") else {"sliding_window": None}


def _granite_swa(facts: Facts, config: Config) -> Config:
    """Layers without RoPE have a base of 0."""
    turns = facts.flags("attention.rope_pattern")
    bases = {"layer_rope_theta": [config.get("rope_theta", 1e4) if turn else 0 for turn in turns]} if turns else {}
    return bases | {"layer_types": facts.layer_types(4)}


def _unbiased(facts: Facts, config: Config) -> Config:
    return {"mlp_bias": facts.has("ffn_up.bias")}


def _gemma_embedding(facts: Facts, config: Config) -> Config:
    if facts.has_outer("dense_2.") or facts.has_outer("dense_3."):
        raise UnsupportedError(
            f"{facts.file.path}: linears after the pooling (dense_2, dense_3) are not read from GGUF"
        )
    return _gemma(6, 0)(facts, config)


def _bert(facts: Facts, config: Config) -> Config:
    types = facts.file.tensors.get("token_types.weight")
    if facts.has_outer("cls."):
        raise UnsupportedError(f"{facts.file.path}: a head for classes (cls) is not read from GGUF")
    return {"type_vocab_size": types.shape[0] if types else 0}


def _modern_bert(facts: Facts, config: Config) -> Config:
    if facts.has_outer("cls."):
        raise UnsupportedError(f"{facts.file.path}: a head for classes (cls) is not read from GGUF")
    return {
        "hidden_activation": facts.text("hidden_activation") or "gelu",
        "global_attn_every_n_layers": facts.number("attention.sliding_window_pattern") or 3,
        "global_rope_theta": config.get("rope_theta", 160000.0),
        "local_rope_theta": facts.number("rope.freq_base_swa") or 10000.0,
        "mlp_bias": facts.has("ffn_up.bias"),
        "norm_bias": facts.has("attn_norm.bias"),
    }


DENSE: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", LOCAL_EXPERTS | WINDOW, more=_llama),
    "mistral3": Architecture("MistralForCausalLM", "mistral", WINDOW, more=_mistral3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": Architecture("GemmaForCausalLM", "gemma"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", CAPS | WINDOW, more=_gemma(2, 46)),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", CAPS | WINDOW, more=_gemma(6, 62)),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", EXPERTS | CAPS | WINDOW, more=_gemma4, apart=BY_LAYER),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", WINDOW, more=_phi3),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE),
    "granite_swa": Architecture("GraniteSWAForCausalLM", "granite_swa", GRANITE | WINDOW, more=_granite_swa),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", WINDOW, more=_olmo2),
    "exaone": Architecture("LlamaForCausalLM", "llama"),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", WINDOW, more=_exaone4),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3"),
    "chatglm": Architecture("GlmForCausalLM", "glm"),
    "glm4": Architecture("Glm4ForCausalLM", "glm4"),
    "internlm2": Architecture("InternLM2ForCausalLM", "internlm2"),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", more=biased),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", COHERE | WINDOW),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "arcee": Architecture("ArceeForCausalLM", "arcee", more=_unbiased),
    "gemma-embedding": Architecture(
        "Gemma3TextModel", "gemma3_text", WINDOW, {"use_bidirectional_attention": True}, _gemma_embedding
    ),
    "bert": Architecture("BertModel", "bert", {"layer_norm_eps": "attention.layer_norm_epsilon"}, more=_bert),
    "modern-bert": Architecture("ModernBertModel", "modernbert", MODERN_BERT, more=_modern_bert),
}  # fmt: skip
