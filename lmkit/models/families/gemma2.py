"""Gemma 2: sliding windows on every second layer, soft caps, norms before and after, scaled embeddings, GELU."""

from __future__ import annotations

from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number, typed_windows, windowed
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES, POST_NORM_NAMES
from lmkit.models.spec import ModelSpec


@family("Gemma2ForCausalLM")
def gemma2(hf: dict[str, Any]) -> ModelSpec:
    if hf.get("layer_types") is None:  # by default windows alternate, starting with the first layer
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(hf))]
        hf = hf | {"layer_types": kinds}
    hf = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True} | hf
    scale = max(number(hf, "query_pre_attn_scalar", 256.0), 1e-12) ** -0.5
    bias = bool(hf.get("attention_bias", False))
    layer = layer_spec(
        hf,
        attention=AttentionSpec(scale, softcap=number(hf, "attn_logit_softcapping", 0.0)),
        attn_bias=bias,
        o_bias=bias,
        post_norms=True,
        names=LLAMA_NAMES | POST_NORM_NAMES,
    )
    return model_spec(
        hf,
        windowed(layer, typed_windows(hf, integer(hf, "sliding_window", 0))),
        embedding_scale=layer.hidden_size**0.5,
        final_softcap=number(hf, "final_logit_softcapping", 0.0),
        norm_offset=1.0,
    )
