"""Qwen2.5-VL: Qwen2 with M-RoPE, and a vision tower (models.vision).

A token of text has the same position in all three rows of M-RoPE, so its angles are those of Qwen2's RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.families.llama import integer, qwen2
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec
from lmkit.models.vision_spec import VisionSpec

TOWER = "visual."


@family("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl(hf: dict[str, Any]) -> ModelSpec:
    """transformers 5 writes the language model's numbers into `text_config`, and before they stood at the top."""
    text = hf.get("text_config") or {}
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is not an object")
    hf = text | hf
    plain = {key: _without_sections(hf[key]) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    spec = qwen2(hf | plain)
    rope = replace(spec.layers[0].rope, sections=_sections(hf, spec.layers[0].rope.rotary_dim))
    layers = tuple(replace(layer, rope=rope) for layer in spec.layers)
    return replace(spec, layers=layers, unread=(TOWER,), vision=vision_spec(hf))


def vision_spec(hf: dict[str, Any]) -> VisionSpec:
    """The tower of a config.json. Raises CheckpointError and UnsupportedError."""
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json: vision_config is not an object")
    if vision.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"vision_config: hidden_act {vision['hidden_act']!r}; lmkit has silu")
    full = vision.get("fullatt_block_indexes")
    if not isinstance(full, list) or not all(type(x) is int for x in full):
        raise CheckpointError("vision_config: fullatt_block_indexes is not a list of integers")
    spec = VisionSpec(
        num_layers=integer(vision, "depth"),
        hidden_size=integer(vision, "hidden_size"),
        inner_size=integer(vision, "intermediate_size"),
        num_heads=integer(vision, "num_heads"),
        channels=integer(vision, "in_channels", integer(vision, "in_chans", 3)),
        patch_size=integer(vision, "patch_size"),
        temporal_patch_size=integer(vision, "temporal_patch_size", 2),
        merge_size=integer(vision, "spatial_merge_size", 2),
        window_size=integer(vision, "window_size"),
        full_layers=tuple(full),
        token_id=integer(hf, "image_token_id", 151655),
    )
    sizes = spec.num_heads, spec.unit
    if not all(sizes) or spec.hidden_size % (4 * spec.num_heads) or not spec.window_cells:
        raise CheckpointError("vision_config: hidden_size, num_heads, patch_size and window_size do not fit together")
    if spec.channels != 3:
        raise UnsupportedError(f"vision_config: {spec.channels} channels; lmkit has images of 3")
    return spec


def _sections(hf: dict[str, Any], rotary_dim: int) -> tuple[int, ...]:
    """The pairs that turn by time, height and width."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    sections = given.get("mrope_section", [16, 24, 24])
    fits = isinstance(sections, list) and len(sections) == 3 and all(type(x) is int and x > 0 for x in sections)
    if not fits or 2 * sum(sections) != rotary_dim:
        raise CheckpointError(f"config.json: mrope_section {sections!r} does not share out {rotary_dim // 2} pairs")
    return tuple(sections)


def _without_sections(rope: Any) -> Any:
    """`mrope`, the type in transformers 4, is the default RoPE for text."""
    if not isinstance(rope, dict):
        return rope
    return {key: "default" if key in ("type", "rope_type") and x == "mrope" else x for key, x in rope.items()}
