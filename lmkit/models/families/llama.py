"""Llama, and families that differ by a flag: Qwen2 (bias on q, k, v), Qwen3 (norms on q and k), Mistral (window)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.blocks.base import Block, two_blocks
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import MAX_LAYERS, family
from lmkit.models.spec import ModelSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ORIGINAL = "original_max_position_embeddings"
DTYPES = ("float32", "bfloat16", "float16")


NORMS = "pre_norms", "post_norms", "stream_norms"  # see two_blocks
OUTER = {field.name for field in fields(LayerSpec)}


def layer_spec(
    hf: dict[str, Any],
    *,
    mixer: Block | None = None,
    mlp: Block | None = None,
    mlp_bias: bool = False,
    **flags: Any,
) -> LayerSpec:
    """A layer from a config.json of transformers 4 or 5: attention, or `mixer`, and a dense MLP, or `mlp`. `flags`
    override fields of LayerSpec and SelfAttentionSpec, and choose the places of norms."""
    outer: dict[str, Any] = {
        "hidden_size": integer(hf, "hidden_size"),
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
    } | {name: flags.pop(name) for name in OUTER & flags.keys()}
    norms = {name: flags.pop(name) for name in NORMS if name in flags}
    mixer = mixer or self_attention(hf, **flags)
    mlp = mlp or MLPSpec(integer(hf, "intermediate_size"), activation(hf), mlp_bias)
    return LayerSpec(blocks=two_blocks(mixer, mlp, **norms), **outer)


def self_attention(hf: dict[str, Any], **flags: Any) -> SelfAttentionSpec:
    """Full attention from config.json. `flags` override fields."""
    num_heads = integer(hf, "num_attention_heads")
    head_dim = integer(hf, "head_dim", integer(hf, "hidden_size") // max(num_heads, 1))
    own: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": integer(hf, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "attention": AttentionSpec(max(head_dim, 1) ** -0.5),
        "rope": rope_spec(hf, head_dim),
    }
    return SelfAttentionSpec(**(own | flags))


def model_spec(hf: dict[str, Any], layers: Iterable[LayerSpec], **flags: Any) -> ModelSpec:
    """The whole model from config.json. `flags` override fields of ModelSpec."""
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"config.json: dtype {dtype!r} is not supported; lmkit runs {', '.join(DTYPES)}")
    own: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "layers": tuple(layers),
        "vocab_size": integer(hf, "vocab_size"),
        "max_position": integer(hf, "max_position_embeddings", 2048),
        "dtype": dtype,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    return ModelSpec(**(own | flags))


def windowed(layer: LayerSpec, windows: list[int]) -> list[LayerSpec]:
    """The same layer once for each of the windows, 0 = full attention."""
    made = {window: layer.having(attention=replace(layer.attention, window=window)) for window in set(windows)}
    return [made[window] for window in windows]


def activation(hf: dict[str, Any]) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: hidden_act {name!r} is not supported; lmkit runs {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


@family("LlamaForCausalLM", defaults=defaults.LLAMA)
def llama(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))
    return model_spec(hf, [layer] * num_layers(hf))


@family("MistralForCausalLM", defaults=defaults.MISTRAL)
def mistral(hf: dict[str, Any]) -> ModelSpec:
    return model_spec(hf, windowed(layer_spec(hf), [integer(hf, "sliding_window", 0)] * num_layers(hf)))


@family("Qwen2ForCausalLM", defaults=defaults.QWEN2)
def qwen2(hf: dict[str, Any]) -> ModelSpec:
    return model_spec(hf, windowed(layer_spec(hf, attn_bias=True), layer_windows(hf)))


@family("ArceeForCausalLM", defaults=defaults.ARCEE)
def arcee(hf: dict[str, Any]) -> ModelSpec:
    """The MLP has no gate."""
    if hf["hidden_act"] != "relu2":
        raise UnsupportedError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported; this family has relu2")
    bias, mlp_bias = bool(hf["attention_bias"]), bool(hf["mlp_bias"])
    mlp = MLPSpec(integer(hf, "intermediate_size"), "relu2", mlp_bias)
    return model_spec(hf, [layer_spec(hf, mlp=mlp, attn_bias=bias, o_bias=bias)] * num_layers(hf))


@family("InternLM3ForCausalLM", defaults=defaults.INTERNLM3)
def internlm3(hf: dict[str, Any]) -> ModelSpec:
    """Its own code has `qkv_bias` and `bias`. transformers has one for all of attention."""
    qkv = bool(hf.get("attention_bias", hf.get("qkv_bias", False)))
    others = bool(hf.get("mlp_bias", hf.get("bias", False)))
    o_bias = qkv if "attention_bias" in hf else others
    layer = layer_spec(hf, attn_bias=qkv, o_bias=o_bias, mlp_bias=others)
    return model_spec(hf, [layer] * num_layers(hf))


@family("SeedOssForCausalLM", defaults=defaults.SEED_OSS)
def seed_oss(hf: dict[str, Any]) -> ModelSpec:
    bias, o_bias = bool(hf.get("attention_bias", True)), bool(hf.get("attention_out_bias", False))
    layer = layer_spec(hf, mlp_bias=bool(hf.get("mlp_bias", False)), attn_bias=bias, o_bias=o_bias)
    return model_spec(hf, [layer] * num_layers(hf))


@family("SmolLM3ForCausalLM", defaults=defaults.SMOLLM3)
def smollm3(hf: dict[str, Any]) -> ModelSpec:
    """Every fourth layer turns no heads. Only such layers may have a window."""
    count, bias = num_layers(hf), bool(hf.get("attention_bias", False))
    interval = max(integer(hf, "no_rope_layer_interval", 4), 1)
    turned = hf.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]  # 1: with RoPE
    if not isinstance(turned, list) or len(turned) != count:
        raise CheckpointError(f"config.json: no_rope_layers must have {count} entries")
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))
    if hf.get("layer_types") is None:
        hf = hf | {"layer_types": ["full_attention" if turns else "sliding_attention" for turns in turned]}
    windows = layer_windows(hf)
    unturned = layer.having(rope=replace(layer.rope, kind="none"))
    layers = windowed(layer, windows), windowed(unturned, windows)
    return model_spec(hf, [layers[not turns][i] for i, turns in enumerate(turned)])


@family("Qwen3ForCausalLM", defaults=defaults.QWEN3)
def qwen3(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("attention_bias", False))
    return model_spec(hf, windowed(layer_spec(hf, attn_bias=bias, o_bias=bias, qk_norm=True), layer_windows(hf)))


def rope_spec(hf: dict[str, Any], head_dim: int) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before). Of both, `rope_scaling` counts:
    somebody added it."""
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError("config.json: rope_parameters is not an object")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"config.json: rope_type {kind!r} is not supported; lmkit runs {', '.join(ROPE_KINDS)}")
    max_position = integer(hf, "max_position_embeddings", 2048)
    original = integer(parameters, ORIGINAL, integer(hf, ORIGINAL, 0))
    if kind in ("dynamic", "yarn", "longrope", "llama3") and not original:
        original = max_position
    factor = parameters.get("factor")
    if factor is None:
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0
    factor = number({"factor": factor}, "factor", 1.0)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        attention_factor = number(parameters, "attention_factor", 1.0)
    elif kind == "longrope" and factor > 1 < original:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    partial = number(parameters, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    return RopeSpec(
        kind=kind,
        theta=number(parameters, "rope_theta", number(hf, "rope_theta", 10000.0)),
        factor=factor,
        # Dynamic NTK counts from the declared context, as transformers does.
        original_max_position=max_position if kind == "dynamic" else original,
        rotary_dim=head_dim if kind == "proportional" else int(head_dim * partial),
        partial_rotary_factor=partial if kind == "proportional" else 1.0,
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        mscale=number(parameters, "mscale", 0.0),
        mscale_all_dim=number(parameters, "mscale_all_dim", 0.0),
        attention_factor=attention_factor,
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=number(parameters, "high_freq_factor", 4.0),
        short_factor=_factors(parameters, "short_factor") if kind == "longrope" else (),
        long_factor=_factors(parameters, "long_factor") if kind == "longrope" else (),
    )


def _factors(parameters: dict[str, Any], key: str) -> tuple[float, ...]:
    found = parameters.get(key)
    if not isinstance(found, list):
        raise CheckpointError(f"config.json: rope_type longrope needs {key}, a list of numbers")
    return tuple(number({key: x}, key, 1.0) for x in found)


def typed_layers(
    hf: dict[str, Any], layer: LayerSpec, window: int, *, bases: tuple[float, float] | None = None
) -> list[LayerSpec]:
    """The layer for each entry of `layer_types`: with the window and the RoPE of its kind.

    `bases`: those of layers without and with a window, in a family whose `rope_parameters` are by kind of layer. There,
    `rope_scaling` is for layers without a window. In other families all layers have the same RoPE.
    """
    typed_windows(hf, window)  # checks layer_types
    nested, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if not isinstance(nested, dict) or not isinstance(scaling, dict):
        raise CheckpointError("config.json: rope_parameters is not an object")
    made = {}
    for index, (kind, size) in enumerate((("full_attention", 0), ("sliding_attention", window))):
        rope = layer.rope
        if bases is not None:
            own = (
                {"rope_type": "default", "rope_theta": bases[index]}
                | (nested.get(kind) or {})
                | ({} if index else scaling)
            )
            rope = rope_spec(hf | {"rope_scaling": None, "rope_parameters": own}, layer.head_dim)
        made[kind] = layer.having(attention=replace(layer.attention, window=size), rope=rope)
    return [made[kind] for kind in hf["layer_types"]]


def layer_windows(hf: dict[str, Any]) -> list[int]:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers on, or those that `layer_types` names."""
    window, count = integer(hf, "sliding_window", 0), num_layers(hf)
    if not hf.get("use_sliding_window", False):
        return [0] * count
    if hf.get("layer_types") is not None:
        return typed_windows(hf, window)
    first = integer(hf, "max_window_layers", count)
    return [window if i >= first else 0 for i in range(count)]


def typed_windows(hf: dict[str, Any], window: int) -> list[int]:
    """`window` for the layers that `layer_types` calls sliding, 0 for the others."""
    kinds, count = hf.get("layer_types"), num_layers(hf)
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: layer_types must name full_attention or sliding_attention {count} times")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def num_layers(hf: dict[str, Any]) -> int:
    """The number of layers, checked here already, since lists of one entry a layer are made from it."""
    count = integer(hf, "num_hidden_layers")
    if not 1 <= count <= MAX_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers = {count} is not in 1 .. {MAX_LAYERS}")
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
