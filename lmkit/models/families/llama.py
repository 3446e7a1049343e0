"""Llama and what differs from it by a flag: Qwen2 (bias on q, k, v), Qwen3 (norms on q and k), Mistral (window)."""

from __future__ import annotations

from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.registry import LIMITS, family
from lmkit.models.spec import ModelSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


def llama_spec(hf: dict[str, Any], **flags: Any) -> ModelSpec:
    """The common part of config.json, as transformers 4 and 5 write it; `flags` override fields of ModelSpec."""
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported; lmkit runs silu")
    num_heads = integer(hf, "num_attention_heads")
    head_dim = integer(hf, "head_dim", integer(hf, "hidden_size") // max(num_heads, 1))
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"config.json: dtype {dtype!r} is not supported; lmkit runs {', '.join(DTYPES)}")
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "hidden_size": integer(hf, "hidden_size"),
        "num_layers": num_layers(hf),
        "num_heads": num_heads,
        "num_kv_heads": integer(hf, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": integer(hf, "intermediate_size"),
        "vocab_size": integer(hf, "vocab_size"),
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "rope": rope_spec(hf, head_dim),
        "max_position": integer(hf, "max_position_embeddings", 2048),
        "dtype": dtype,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    return ModelSpec(**(fields | flags))


@family("LlamaForCausalLM")
def llama(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    return llama_spec(hf, attn_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


@family("MistralForCausalLM")
def mistral(hf: dict[str, Any]) -> ModelSpec:
    window = integer(hf, "sliding_window", 0)
    return llama_spec(hf, windows=(window,) * num_layers(hf) if window else ())


@family("Qwen2ForCausalLM")
def qwen2(hf: dict[str, Any]) -> ModelSpec:
    return llama_spec(hf, attn_bias=True, windows=layer_windows(hf))


@family("Qwen3ForCausalLM")
def qwen3(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    head_dim = integer(hf, "head_dim", 128)
    return llama_spec(hf | {"head_dim": head_dim}, attn_bias=bias, o_bias=bias, qk_norm=True, windows=layer_windows(hf))


def rope_spec(hf: dict[str, Any], head_dim: int) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError("config.json: rope_parameters is not an object")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"config.json: rope_type {kind!r} is not supported; lmkit runs {', '.join(ROPE_KINDS)}")
    max_position = integer(hf, "max_position_embeddings", 2048)
    original = integer(parameters, "original_max_position_embeddings", 0)
    if kind in ("dynamic", "yarn") and not original:
        original = max_position
    if kind == "llama3" and not original:
        raise CheckpointError("config.json: rope_type llama3 needs original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        factor = max_position / original if kind == "yarn" else 1.0
    attention_factor = parameters.get("attention_factor")
    partial = number(parameters, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    return RopeSpec(
        kind=kind,
        theta=number(parameters, "rope_theta", number(hf, "rope_theta", 10000.0)),
        factor=number({"factor": factor}, "factor", 1.0),
        # Dynamic NTK counts from the declared context, as transformers does.
        original_max_position=max_position if kind == "dynamic" else original,
        rotary_dim=int(head_dim * partial),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        mscale=number(parameters, "mscale", 0.0),
        mscale_all_dim=number(parameters, "mscale_all_dim", 0.0),
        attention_factor=None if attention_factor is None else number(parameters, "attention_factor", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=number(parameters, "high_freq_factor", 4.0),
    )


def layer_windows(hf: dict[str, Any]) -> tuple[int, ...]:
    """Qwen's rule: with use_sliding_window, layers from max_window_layers on, or as `layer_types` says."""
    window = integer(hf, "sliding_window", 0)
    if not hf.get("use_sliding_window", False) or not window:
        return ()
    count = num_layers(hf)
    kinds = hf.get("layer_types")
    if kinds is None:
        first = integer(hf, "max_window_layers", count)
        return tuple(window if i >= first else 0 for i in range(count))
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: layer_types must name full_attention or sliding_attention {count} times")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def num_layers(hf: dict[str, Any]) -> int:
    """Bounded here already: lists of one entry a layer are made from it."""
    count = integer(hf, "num_hidden_layers")
    if count > LIMITS["num_layers"]:
        raise CheckpointError(f"config.json: num_hidden_layers = {count} is more than {LIMITS['num_layers']}")
    return count


def integer(hf: dict[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise CheckpointError(f"config.json: {key} = {value!r} is not a sensible integer")
    return value


def number(hf: dict[str, Any], key: str, default: float) -> float:
    value = hf.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise CheckpointError(f"config.json: {key} = {value!r} is not a sensible number")
    return float(value)
