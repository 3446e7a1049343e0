"""MiMo-V2-Flash: windows and learned sinks in five of six layers, values narrower than keys, experts by sigmoid."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.models.families import hybrid_defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number, typed_layers
from lmkit.models.families.moe import deepseek_experts
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES
from lmkit.models.spec import ModelSpec

BASES = 5e6, 1e4  # of RoPE, in layers without and with a window
NAMES = LLAMA_NAMES | {"attn.sinks": "self_attn.attention_sink_bias"}


@family("MiMoV2FlashForCausalLM", defaults=hybrid_defaults.MIMO_V2_FLASH)
def mimo_v2_flash(hf: dict[str, Any]) -> ModelSpec:
    """Layers with a window have twice the key-value heads. Layers for multi-token prediction are not read."""
    window, count = integer(hf, "sliding_window", 0), num_layers(hf)
    if hf.get("sliding_window_size") is not None:  # keys before a query's own
        window = integer(hf, "sliding_window_size") + 1
    kinds = ["sliding_attention" if i and (i + 1) % 6 else "full_attention" for i in range(count)]
    hf = hf | {"layer_types": hf.get("layer_types") or kinds}
    heads = 2 * integer(hf, "num_key_value_heads")
    if integer(hf, "swa_num_key_value_heads", heads) != heads:
        raise UnsupportedError(f"config.json: swa_num_key_value_heads is not supported; lmkit runs {heads} here")
    factors = {"attn.o": number(hf, "attention_value_scale", 1.0)}  # attention is linear in its values
    bias, value_dim = bool(hf["attention_bias"]), integer(hf, "v_head_dim")
    full = layer_spec(hf, attn_bias=bias, value_dim=value_dim, names=NAMES, factors=factors)

    def own(layer: LayerSpec) -> LayerSpec:
        return layer.having(num_kv_heads=heads, has_sinks=True) if layer.attention.window else layer

    layers = [own(layer) for layer in typed_layers(hf, full, window, bases=BASES)]
    return model_spec(hf, deepseek_experts(hf | {"n_shared_experts": 0}, layers), unread=("model.mtp.",))
