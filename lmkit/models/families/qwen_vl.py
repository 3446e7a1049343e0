"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2, Qwen3 or Qwen3-MoE with M-RoPE, and a vision tower (models.vision).

A token of text has the same position in all three rows of M-RoPE, so its angles are those of plain RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, number, qwen2, qwen3
from lmkit.models.families.moe import qwen3_moe
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec
from lmkit.models.vision_spec import GATED, PAD, Joined, Timed, VisionSpec

TOWER, TOWER_3 = "visual.", "model.visual."
NAMES_2, NAMES_3 = (GATED._replace(mlp=(f"mlp.{x}fc1", f"mlp.{x}fc2")) for x in ("", "linear_"))
MERGER_3 = Joined(names=("norm", "linear_fc1", "linear_fc2"))
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}


@family("Qwen2VLForConditionalGeneration")
def qwen2_vl(hf: dict[str, Any]) -> ModelSpec:
    """All layers of the tower see the whole image."""
    hf = _completed(hf, defaults.QWEN2_VL, defaults.QWEN2_VL_TOWER)
    vision = vision_config(hf)
    width = integer(vision, "embed_dim")
    sizes = {"hidden_size": width, "inner_size": width * integer(vision, "mlp_ratio")}
    tower = vision_spec(hf, "quick_gelu", **sizes, names=NAMES_2, layer_norm=True, videos=_grid(hf))
    return replace(_with_tower(hf, qwen2, tower), unread=(TOWER,))


@family("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl(hf: dict[str, Any]) -> ModelSpec:
    hf = _completed(hf, defaults.QWEN2_5_VL, defaults.QWEN2_5_VL_TOWER)
    return replace(_with_tower(hf, qwen2, windowed_tower(hf)), unread=(TOWER,))


@family("Qwen3VLForConditionalGeneration")
def qwen3_vl(hf: dict[str, Any]) -> ModelSpec:
    return _deep(_completed(hf, defaults.QWEN3_VL, defaults.QWEN3_VL_TOWER), qwen3)


@family("Qwen3VLMoeForConditionalGeneration")
def qwen3_vl_moe(hf: dict[str, Any]) -> ModelSpec:
    """Scores of chosen experts always add up to 1."""
    hf = _completed(hf, defaults.QWEN3_VL_MOE, defaults.QWEN3_VL_TOWER)
    return _deep(hf | {"norm_topk_prob": True}, qwen3_moe)


def _deep(hf: dict[str, Any], of_text: Callable[[dict[str, Any]], ModelSpec]) -> ModelSpec:
    """Outputs of some layers of the tower are added after the first layers of the language model (DeepStack)."""
    tapped = _layers(vision_config(hf), "deepstack_visual_indexes")
    spec = _with_tower(hf, of_text, tower_3(hf, tapped=tapped), mixed_sections=True)
    if spec.deep_layers > spec.num_layers:
        raise CheckpointError("vision_config: deepstack_visual_indexes has more layers than the language model")
    layers = tuple(replace(layer, prefix="model.language_model.layers") for layer in spec.layers)
    return replace(spec, layers=layers, unread=(TOWER_3,))


def _completed(hf: dict[str, Any], text_defaults: dict[str, Any], tower_defaults: dict[str, Any]) -> dict[str, Any]:
    """config.json with the language model's numbers at the top, and what it leaves out. transformers 5 writes them into
    `text_config`, and before they stood at the top."""
    text = hf.get("text_config") or {}
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is not an object")
    return text_defaults | text | hf | {"vision_config": tower_defaults | vision_config(hf)}


def _with_tower(
    hf: dict[str, Any], of_text: Callable[[dict[str, Any]], ModelSpec], tower: VisionSpec, **rope: Any
) -> ModelSpec:
    """The language model with its tower."""
    plain = {key: _without_sections(hf[key]) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    return seeing(of_text(hf | plain), hf, tower, **rope)


def seeing(spec: ModelSpec, hf: dict[str, Any], tower: VisionSpec, **rope: Any) -> ModelSpec:
    """The language model with a tower and M-RoPE. `rope` has fields of RopeSpec."""
    plain = next((layer.rope for layer in spec.layers if layer.kv), None)
    if plain is None:
        raise UnsupportedError("config.json: layer_types names no layer of full_attention, which a tower needs")
    turned = replace(plain, sections=_sections(hf, plain.rotary_dim), **rope)
    layers = (layer.having(rope=turned) if layer.kv else layer for layer in spec.layers)
    return replace(spec, layers=tuple(layers), vision=tower)


def tower_3(hf: dict[str, Any], **given: Any) -> VisionSpec:
    """The tower of Qwen3-VL, and without tapped layers that of Qwen3.5."""
    side = math.isqrt(integer(vision_config(hf), "num_position_embeddings"))
    if not side:
        raise CheckpointError("vision_config: num_position_embeddings is 0")
    options: dict[str, Any] = {"positions": side, "patch_bias": True, "layer_norm": True, "names": NAMES_3}
    options |= {"prefix": TOWER_3, "merger": MERGER_3, "videos": Timed(integer(hf, "video_token_id", 151656))}
    return vision_spec(hf, "gelu_pytorch_tanh", **options, **given)


def windowed_tower(hf: dict[str, Any]) -> VisionSpec:
    """The tower of Qwen2.5-VL."""
    vision = vision_config(hf)
    full = _layers(vision, "fullatt_block_indexes")
    window = integer(vision, "window_size")
    videos = _grid(hf, number(vision, "tokens_per_second", 4.0))
    spec = vision_spec(hf, "silu", window_size=window, full_layers=full, videos=videos)
    if not spec.window_cells:
        raise CheckpointError("vision_config: hidden_size, num_heads, patch_size and window_size do not fit together")
    return spec


def _grid(hf: dict[str, Any], places: float = 0.0) -> Timed:
    """Videos as one grid."""
    return Timed(integer(hf, "video_token_id", 151656), PAD, PAD, grid=True, places=places)


def vision_spec(hf: dict[str, Any], activation: str, **given: Any) -> VisionSpec:
    """The tower of a config.json. `given` has fields of VisionSpec. Raises CheckpointError and UnsupportedError."""
    vision = vision_config(hf)
    if vision.get("hidden_act", activation) != activation:
        raise UnsupportedError(f"vision_config: hidden_act {vision['hidden_act']!r}; lmkit has {activation}")
    fields: dict[str, Any] = {
        "num_layers": integer(vision, "depth"),
        "num_heads": integer(vision, "num_heads"),
        "channels": integer(vision, "in_channels"),
        "patch_size": integer(vision, "patch_size"),
        "temporal_patch_size": integer(vision, "temporal_patch_size"),
        "merge_size": integer(vision, "spatial_merge_size"),
        "activation": ACTIVATIONS[activation],
        "token_id": integer(hf, "image_token_id", 151655),
    }
    for name, key in (("hidden_size", "hidden_size"), ("inner_size", "intermediate_size")):
        if name not in given:
            fields[name] = integer(vision, key)
    spec = VisionSpec(**(fields | given))
    if not (spec.num_heads and spec.unit) or spec.hidden_size % (4 * spec.num_heads):
        raise CheckpointError("vision_config: hidden_size, num_heads, patch_size and window_size do not fit together")
    if spec.channels != 3:
        raise UnsupportedError(f"vision_config: {spec.channels} channels; lmkit has images of 3")
    return spec


def vision_config(hf: dict[str, Any]) -> dict[str, Any]:
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json: vision_config is not an object")
    return vision


def _layers(vision: dict[str, Any], key: str) -> tuple[int, ...]:
    found = vision.get(key)
    if not isinstance(found, list) or not all(type(x) is int for x in found):
        raise CheckpointError(f"vision_config: {key} is not a list of integers")
    return tuple(found)


def _sections(hf: dict[str, Any], rotary_dim: int) -> tuple[int, ...]:
    """The pairs that turn by time, height and width."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
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
