"""A tiny checkpoint of any architecture that transformers maps from images and text to text, with its processor."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from benchmarks.families.tiny import SPECIAL, WIDTH, merged, randomized, sizes_for
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.text.processor_process import Absent, marker, processor_class, without_checks

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIDE, PATCH, VOCAB, POSITIONS = 56, 14, 4224, 2048  # pixels of images and patches; the demo's tokens and those below
# Tokens that tokenizers of such models have by name, and those whose text processors know.
NAMED = {
    "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "image_start_token": "<image_start>",
    "image_end_token": "<image_end>", "video_token": "<video>", "video_start_token": "<video_start>",
    "video_end_token": "<video_end>", "context_image_token": "<context>", "start_image_token": "<start>",
    "end_image_token": "<end>", "img_line_break_token": "<break>", "image_boundary_token": "<boundary>",
    "image_wrapper_token": "<wrapper>", "eof_token": "<eof>", "eol_token": "<eol>", "sep_token": "<sep>",
    "audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>", "vision_start_token": "<vision_start>",
    "vision_end_token": "<vision_end>", "tile_token": "<tile>", "image_id_start_token": "<ids>",
    "image_id_end_token": "<ide>", "slice_start_token": "<ss>", "slice_end_token": "<se>",
    "image_break_token": "<row>", "start_of_image_token": "<soi>", "end_of_image_token": "<eoimg>",
}  # fmt: skip
KNOWN = (
    "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL",
    "<|IMAGE_PAD|>", "<|VISION_START|>", "<|VISION_END|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<|imgpad|>", "<|img|>", "<|endofimg|>", "<|image|>", "<imgpad>", "<img>", "</img>", "<global-img>",
    "<end_of_utterance>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "|SPEAKER|", "|NEWLINE|", "<|media_pad|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video_pad|>", "<|video|>",
    "<fake_token_around_image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_END>", "<IMG_BLOCK>", "<IMG_ROW>", "<IMG_COL>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
# The fields of towers' configurations, by what they mean.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "projection_dim", "text_hidden_size"), WIDTH),
    **dict.fromkeys(("projection_hidden_dim", "image_token_embed_dim", "vision_output_dim"), WIDTH),
    **dict.fromkeys(("num_heads", "num_attention_heads", "attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 2 * WIDTH),
    **dict.fromkeys(("depth", "num_hidden_layers"), 2),
    "image_size": SIDE, "patch_size": PATCH, "head_dim": WIDTH // 4, "vocab_size": 64, "window_size": 2 * PATCH,
    "fullatt_block_indexes": [1], "num_channels": 3, "in_channels": 3,
}  # fmt: skip
# And of the configurations around them.
AROUND: dict[str, Any] = {
    **dict.fromkeys(("projector_hidden_size", "projection_dim"), WIDTH), "vision_feature_layer": -1,
    "mm_tokens_per_image": 4, "image_seq_length": 4,
    "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
}  # fmt: skip
# The arguments of processors. Those of image processors are made from what they have by default.
PROCESSOR: dict[str, Any] = {
    "patch_size": PATCH, "img_size": SIDE, "image_seq_length": 4, "image_seq_len": 4, "num_image_tokens": 16,
    "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
}  # fmt: skip
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
# What single configurations need beside their sizes.
CHANGED: dict[str, dict[str, Any]] = {
    **{name: {"text_config": TURNED} for name in ("cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga")},
    **{name: {"text_config": TURNED} for name in ("paddleocr_vl", "qwen2_vl", "qwen2_5_vl")},
    "glm4v_moe": {"text_config": {"rope_parameters": TURNED["rope_parameters"] | {"mrope_section": [2, 1, 1]}}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": TURNED["rope_parameters"]}}},
    "ernie4_5_vl_moe": {"text_config": TURNED | {"moe_intermediate_size": [WIDTH, WIDTH]}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "got_ocr2": {"vision_config": {"image_size": 1024, "patch_size": 16}},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_head_dim": 16, "resampler_n_heads": 4}},
    "lfm3_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0], "num_global_layers": 1, "vision_output_dim": 2 * WIDTH},
    },
}
# And single processors, and image processors.
PROCESSED: dict[str, dict[str, Any]] = {
    "aya_vision": {"downsample_factor": 2}, "llava_onevision": {"vision_feature_select_strategy": "full"},
}  # fmt: skip
TILES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
CUT: dict[str, dict[str, Any]] = {
    "deepseek_vl_hybrid": {"high_res_size": {"height": SIDE, "width": SIDE}},
    "got_ocr2": {"size": {"height": 1024, "width": 1024}},
    "granite_docling": TILES, "idefics3": TILES, "smolvlm": TILES,
    "paligemma": {"image_seq_length": 16},
    "video_llava": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
}  # fmt: skip
# Types that share the processors of others.
LIKE = {
    "cosmos3_omni": "qwen3_vl", "glm4v_moe": "glm4v", "glm_ocr": "glm46v", "glmga": "glm46v", "mistral4": "mistral3",
    "qwen3_vl_moe": "qwen3_vl", "fast_vlm": "llava",
}  # fmt: skip


def image_types() -> list[str]:
    """The types of all models of the installed transformers that write about images."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def architecture_of(model_type: str) -> str:
    """The class that transformers makes of a type."""
    return str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def tokenizer() -> PreTrainedTokenizerFast:
    """The demo's, with all tokens that processors ask for."""
    file = str(DEMO_FOLDER / "tokenizer.json")
    ends = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "bos_token": "<|im_start|>", "unk_token": "<|pad|>"}
    made = PreTrainedTokenizerFast(tokenizer_file=file, extra_special_tokens=NAMED, **ends)
    made.add_tokens(list(KNOWN), special_tokens=True)
    return made


def tiny_config(model_type: str, words: PreTrainedTokenizerFast, image_id: int) -> Any:
    """The configuration of a tiny model, whose tokens are those of `words`."""
    config_class = CONFIG_MAPPING[model_type]
    values, whole = sizes_for(config_class), config_class()
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(whole, name, None)
        if inner is not None and any(part in name for part in ("vision", "vq", "image", "high_res")):
            known = {key: value for key, value in TOWER.items() if hasattr(inner, key)}
            values[name] = {"model_type": inner.model_type} | values.get(name, {}) | known
    values |= {name: value for name, value in AROUND.items() if hasattr(whole, name)}
    values |= _token_ids(whole, words, image_id)
    values = _vocabulary(merged(merged(values, SPECIAL.get(model_type, {})), CHANGED.get(model_type, {})))
    return config_class(**values)


def _token_ids(whole: Any, words: PreTrainedTokenizerFast, image_id: int) -> dict[str, int]:
    ids = {}
    for name in vars(whole):
        stem = name.removesuffix("_id").removesuffix("_index")
        if stem != name and stem.endswith("_token") and stem in NAMED:
            ids[name] = image_id if stem == "image_token" else words.convert_tokens_to_ids(NAMED[stem])
    return ids


def _vocabulary(values: dict[str, Any]) -> dict[str, Any]:
    """The values with room for all tokens."""
    changed = {name: _vocabulary(value) if isinstance(value, dict) else value for name, value in values.items()}
    if values.get("vocab_size", 0) > 1000:
        changed["vocab_size"] = VOCAB
    return changed | ({"max_position_embeddings": POSITIONS} if "max_position_embeddings" in values else {})


def image_processor(model_type: str) -> Any:
    """The image processor of a type, for small images."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(LIKE.get(model_type, model_type)) or {}
    if not names:
        raise ValueError("no image processor")
    kind = getattr(transformers, names.get("pil") or names["torchvision"])
    size, values = getattr(kind, "size", None) or {}, dict[str, Any]()
    if set(size) == {"shortest_edge", "longest_edge"} and size["longest_edge"] > 5000:  # pixels in all
        values["size"] = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
    elif size:
        values["size"] = dict.fromkeys(size, SIDE)
    if getattr(kind, "crop_size", None):
        values["crop_size"] = {"height": SIDE, "width": SIDE}
    if isinstance(getattr(kind, "patch_size", None), int):
        values["patch_size"] = PATCH
    if getattr(kind, "image_grid_pinpoints", None):
        values["image_grid_pinpoints"] = AROUND["image_grid_pinpoints"]
    return kind(**values | CUT.get(model_type, {}))


def tiny_processor(model_type: str, folder: Path) -> Any:
    """A processor, saved into a folder."""
    found = processor_class(folder, LIKE.get(model_type, model_type))
    known = inspect.signature(found.__init__).parameters
    parts: dict[str, Any] = {name: Absent() for name in found.get_attributes()}
    parts |= {"tokenizer": tokenizer(), "image_processor": image_processor(model_type)}
    values = {name: value for name, value in PROCESSOR.items() if name in known}
    return without_checks(found)(**parts, **values | PROCESSED.get(model_type, {}))


def save_tiny(model_type: str, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """Write a tiny model with its processor. Returns (model, processor)."""
    folder.mkdir(parents=True, exist_ok=True)
    processor = tiny_processor(model_type, folder)
    words = processor.tokenizer
    image_id = getattr(processor, "image_token_id", None) or words.image_token_id
    if processor.image_token == words.boi_token:  # the token that a text has is another one than the tower's
        image_id = words.image_token_id
    torch.manual_seed(seed)
    config = tiny_config(model_type, words, image_id)
    model = randomized(getattr(transformers, architecture_of(model_type))(config))
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"architectures": [architecture_of(model_type)]}, indent=2)
    )
    _save(processor, folder)
    return model, processor


def _save(processor: Any, folder: Path) -> None:
    words, images = processor.tokenizer, processor.image_processor
    words.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", marker(processor)))
    images.save_pretrained(folder)
    names = set(inspect.signature(type(processor).__init__).parameters) - {"self", "kwargs", "args", "chat_template"}
    values = {
        name: getattr(processor, name) for name in names - set(processor.get_attributes()) if hasattr(processor, name)
    }
    known = {"processor_class": type(processor).__name__} | values
    (folder / "processor_config.json").write_text(json.dumps(known, indent=2))
