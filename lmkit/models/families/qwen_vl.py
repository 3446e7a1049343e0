"""Qwen2.5-VL's language model, for text. The vision tower stays in the checkpoint, and images are refused.

A token of text has the same position in all three rows of M-RoPE, so its angles are those of Qwen2's RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError
from lmkit.models.families.llama import qwen2
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

TOWER = "visual."


@family("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl(hf: dict[str, Any]) -> ModelSpec:
    """transformers 5 writes the language model's numbers into `text_config`, and before they stood at the top."""
    text = hf.get("text_config") or {}
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is not an object")
    hf = text | hf
    plain = {key: _without_sections(hf[key]) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    return replace(qwen2(hf | plain), unread=(TOWER,))


def _without_sections(rope: Any) -> Any:
    """`mrope`, the type in transformers 4, is the default RoPE for text."""
    if not isinstance(rope, dict):
        return rope
    return {key: "default" if key in ("type", "rope_type") and x == "mrope" else x for key, x in rope.items()}
