"""Phi-3 and Phi-4: Llama with fused linears, LongRoPE and, on Phi-4-mini, RoPE on a part of each head."""

from __future__ import annotations

from typing import Any

from lmkit.models.families import defaults
from lmkit.models.families.llama import ORIGINAL, integer, layer_spec, model_spec, num_layers, windowed
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

LONG = ("su", "yarn")  # LongRoPE's names in Phi-3's first checkpoints


@family("Phi3ForCausalLM", defaults=defaults.PHI3)
def phi3(hf: dict[str, Any]) -> ModelSpec:
    hf = hf | {key: _renamed(hf[key], hf.get(ORIGINAL)) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    return model_spec(hf, windowed(layer_spec(hf), [integer(hf, "sliding_window", 0)] * num_layers(hf)))


def _renamed(scaling: Any, original: Any) -> Any:
    """With LongRoPE under its own name, and the trained context of config.json, which goes before its own."""
    if not isinstance(scaling, dict):
        return scaling
    scaling = scaling | ({} if original is None else {ORIGINAL: original})
    return {key: "longrope" if key in ("type", "rope_type") and x in LONG else x for key, x in scaling.items()}
