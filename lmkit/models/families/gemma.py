"""Gemma, Gemma 2 and 3: norms before and after, scaled embeddings, GELU, and sliding windows on most layers.

Gemma 2 has soft caps. Gemma 3 has norms on q and k instead, and its layers with a window turn heads by another base.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number, typed_layers
from lmkit.models.families.nested import beside_towers
from lmkit.models.families.towers import siglip
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES, POST_NORM_NAMES
from lmkit.models.spec import ModelSpec


@family("GemmaForCausalLM", defaults=defaults.GEMMA)
def gemma(hf: dict[str, Any]) -> ModelSpec:
    """Norms stand only before attention and MLP."""
    bias = bool(hf.get("attention_bias", False))
    return _model(hf, [layer_spec(hf, attn_bias=bias, o_bias=bias)] * num_layers(hf))


@family("Gemma2ForCausalLM", defaults=defaults.GEMMA2)
def gemma2(hf: dict[str, Any]) -> ModelSpec:
    hf = _with_pattern(hf, 2)
    layer = _layer(hf, softcap=number(hf, "attn_logit_softcapping", 0.0))
    return _model(hf, typed_layers(hf, layer, integer(hf, "sliding_window", 0)))


@family("Gemma3TextModel", defaults=defaults.GEMMA3)
def embedding_gemma(hf: dict[str, Any]) -> ModelSpec:
    """EmbeddingGemma. Its windows have two sides: config.json has the width of both."""
    if not hf["use_bidirectional_attention"]:
        return gemma3(hf)
    return replace(gemma3(hf | {"sliding_window": integer(hf, "sliding_window", 0) // 2 + 1}), sees_all=True)


@family("Gemma3ForCausalLM", defaults=defaults.GEMMA3)
def gemma3(hf: dict[str, Any]) -> ModelSpec:
    hf = _with_pattern(hf, integer(hf, "sliding_window_pattern", 6))
    layer = _layer(hf, softcap=number(hf, "attn_logit_softcapping", 0.0)).having(qk_norm=True)
    window = integer(hf, "sliding_window", 0)
    bases = number(hf, "rope_theta", 0.0), number(hf, "rope_local_base_freq", 0.0)
    return _model(hf, typed_layers(hf, layer, window, bases=bases))


@family("Gemma3ForConditionalGeneration")
def gemma3_beside_tower(hf: dict[str, Any]) -> ModelSpec:
    return replace(beside_towers(hf, gemma3), vision=siglip(hf))


def _with_pattern(hf: dict[str, Any], period: int) -> dict[str, Any]:
    """With `layer_types`. Every `period`-th layer has no window."""
    kinds = ["sliding_attention" if (i + 1) % max(period, 1) else "full_attention" for i in range(num_layers(hf))]
    return hf | ({} if hf.get("layer_types") else {"layer_types": kinds})


def _layer(hf: dict[str, Any], *, softcap: float) -> LayerSpec:
    scale = max(number(hf, "query_pre_attn_scalar", 256.0), 1e-12) ** -0.5
    bias = bool(hf.get("attention_bias", False))
    return layer_spec(
        hf,
        attention=AttentionSpec(scale, softcap=softcap),
        attn_bias=bias,
        o_bias=bias,
        post_norms=True,
        names=LLAMA_NAMES | POST_NORM_NAMES,
    )


def _model(hf: dict[str, Any], layers: list[LayerSpec]) -> ModelSpec:
    spec = model_spec(hf, layers, final_softcap=number(hf, "final_logit_softcapping", 0.0), norm_offset=1.0)
    return replace(spec, embedding_scale=rounded(spec.hidden_size**0.5, spec.dtype))


def rounded(x: float, dtype: str) -> float:
    """x as the nearest number of a float type."""
    if dtype == "bfloat16":
        bits = int.from_bytes(struct.pack(">f", x))
        x = struct.unpack(">f", (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).to_bytes(4))[0]
        return x
    kind = "e" if dtype == "float16" else "f"
    return float(struct.unpack(kind, struct.pack(kind, x))[0])
