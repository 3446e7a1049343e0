"""Command R7B and Command A: attention and MLP read the same LayerNorm, and layers without a window turn no heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.parallel import ParallelSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import (
    activation,
    integer,
    model_spec,
    num_layers,
    number,
    self_attention,
    typed_windows,
)
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec


@family("Cohere2ForCausalLM", defaults=defaults.COHERE2)
def cohere2(hf: dict[str, Any]) -> ModelSpec:
    """RoPE turns pairs of neighbours. Every fourth layer has no window, unless `layer_types` says otherwise."""
    period, bias = max(integer(hf, "sliding_window_pattern", 4), 1), bool(hf["attention_bias"])
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers(hf))]
    windows = typed_windows(hf | {"layer_types": hf.get("layer_types") or kinds}, integer(hf, "sliding_window", 0))
    attention = self_attention(hf, attn_bias=bias, o_bias=bias)
    mlp = MLPSpec(integer(hf, "intermediate_size"), activation(hf))

    def layer(window: int) -> LayerSpec:
        rope = replace(attention.rope, interleaved=True) if window else replace(attention.rope, kind="none")
        mixer = replace(attention, rope=rope, attention=replace(attention.attention, window=window))
        return LayerSpec(
            integer(hf, "hidden_size"),
            (Residual(ParallelSpec(mixer, mlp), "norm.attn"),),
            number(hf, "layer_norm_eps", 1e-5),
            norm_bias=True,
            norms_lack_bias=True,
        )

    made = {window: layer(window) for window in set(windows)}
    return model_spec(hf, [made[window] for window in windows], logit_scale=number(hf, "logit_scale", 1.0))
