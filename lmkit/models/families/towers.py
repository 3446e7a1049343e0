"""Vision towers beside language models: SigLIP as Gemma 3 has it, Pixtral's as Mistral 3 has it, and InternVL's."""

from __future__ import annotations

import math
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, number
from lmkit.models.vision_spec import Folded, Names, Pooled, Reading, Shuffled, VisionSpec

HALVES = (0.5, 0.5, 0.5)
QKV = "q_proj", "k_proj", "v_proj"
SIGLIP = Names(
    mlp=("mlp.fc1", "mlp.fc2"),
    attention=tuple(f"self_attn.{x}" for x in QKV),
    attention_out="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    layer="vision_tower.encoder.layers.{}.",
    patch="vision_tower.embeddings.patch_embedding",
    positions="vision_tower.embeddings.position_embedding",
)
PIXTRAL = Names(
    mlp=tuple(f"feed_forward.{x}_proj" for x in ("gate", "up", "down")),
    attention=tuple(f"attention.{x}" for x in QKV),
    attention_out="attention.o_proj",
    norms=("attention_norm", "ffn_norm"),
    layer="vision_tower.transformer.layers.{}.",
    patch="vision_tower.patch_conv",
)
INTERN = Names(
    mlp=("mlp.fc1", "mlp.fc2"),
    attention=tuple(f"attention.{x}" for x in QKV),
    attention_out="attention.projection_layer",
    norms=("layernorm_before", "layernorm_after"),
    layer="vision_tower.encoder.layer.{}.",
    patch="vision_tower.embeddings.patch_embeddings.projection",
    positions="vision_tower.embeddings.position_embeddings",
    first="vision_tower.embeddings.cls_token",
    scales=("lambda_1", "lambda_2"),
)
OF_INTERN = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
OF_INTERN_TOWER = {"norm_type": "layer_norm", "use_qk_norm": False, "use_absolute_position_embeddings": True}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation by color
BREAKS = {"[IMG_BREAK]": 12, "[IMG_END]": 13}  # of Mistral's tokenizers; tokenizer.json says which
BASE = "model."


def siglip(hf: dict[str, Any]) -> VisionSpec | None:
    """Gemma 3's tower, which reads images of one size. The mean of some patches is a row."""
    if (vision := _vision(hf, defaults.SIGLIP)) is None:
        return None
    side, size = integer(vision, "image_size"), integer(vision, "patch_size")
    places = side // max(size, 1)
    merge = places // max(math.isqrt(integer(hf, "mm_tokens_per_image", 256)), 1)
    if not merge or places % merge or places * size != side:
        raise CheckpointError("vision_config: image_size, patch_size and mm_tokens_per_image do not fit together")
    return _tower(
        vision,
        {"gelu_pytorch_tanh": "gelu_tanh"},
        merge_size=merge,
        layer_norm=True,
        eps=number(vision, "layer_norm_eps", 1e-6),
        patch_bias=True,
        positions=places,
        axes=None,
        last_norm="vision_tower.post_layernorm",
        names=SIGLIP,
        merger=Pooled(),
        reading=Reading(HALVES, HALVES, 2, side=side),
        token_id=integer(hf, "image_token_id", integer(hf, "image_token_index", 262144)),
        sees_all=True,
    )


def pixtral(hf: dict[str, Any], eps: float) -> VisionSpec | None:
    """Mistral 3's tower. `eps`: of the language model's norms. The exponents by width lie between those by height."""
    if (vision := _vision(hf, defaults.PIXTRAL)) is None:
        return None
    if hf.get("vision_feature_layer", -1) != -1 or hf.get("projector_hidden_act", "gelu") != "gelu":
        raise UnsupportedError("config.json: vision_feature_layer must be -1, and projector_hidden_act gelu")
    return _tower(
        vision,
        {"silu": "silu", "gelu": "gelu"},
        merge_size=integer(hf, "spatial_merge_size", 2),
        eps=1e-5,  # config.json does not give it
        bias=False,
        axes=(0.0, 1.0),
        first_norm="vision_tower.ln_pre",
        names=PIXTRAL,
        merger=Folded(
            eps=eps,
            bias=bool(hf.get("multimodal_projector_bias", False)),
            breaks=tuple(BREAKS.values()),
            marks=tuple(BREAKS),
        ),
        reading=Reading(edge=integer(vision, "image_size")),
        token_id=integer(hf, "image_token_id", integer(hf, "image_token_index", 10)),
    )


def intern(hf: dict[str, Any]) -> VisionSpec | None:
    """InternVL's tower of 300M, which reads squares of one size: an image is cut into some, beside the whole of it."""
    if (vision := _vision(hf, defaults.INTERN)) is None:
        return None
    for part, built in ((hf, OF_INTERN), (vision, OF_INTERN_TOWER)):
        for name, value in built.items():
            if part.get(name, value) != value:
                raise UnsupportedError(f"config.json: {name} = {part[name]!r} is not supported; lmkit has {value!r}")
    side, size = (_square(vision, name) for name in ("image_size", "patch_size"))
    merge, places = round(1 / max(number(hf, "downsample_ratio", 0.5), 1e-3)), side // max(size, 1)
    if not merge or places % merge or places * size != side:
        raise CheckpointError("vision_config: image_size, patch_size and downsample_ratio do not fit together")
    return _tower(
        vision | {"patch_size": size},
        {"gelu": "gelu"},
        merge_size=merge,
        layer_norm=True,
        eps=number(vision, "layer_norm_eps", 1e-6),
        qkv_bias=bool(vision["attention_bias"]),
        patch_bias=True,
        positions=places,
        axes=None,
        last_norm="" if vision["use_mean_pooling"] else "vision_tower.layernorm",
        names=INTERN,
        merger=Shuffled(),
        reading=Reading(*IMAGENET, side=side, tiles=(1, 12)),
        token_id=integer(hf, "image_token_id", 151667),
    )


def _square(vision: dict[str, Any], name: str) -> int:
    """The side of a square, which may be written twice."""
    value = vision[name]
    return integer({name: value[0] if isinstance(value, list) and value == value[:1] * 2 else value}, name)


def _vision(hf: dict[str, Any], default: dict[str, Any]) -> dict[str, Any] | None:
    """The tower's part of config.json, completed. None: the model was saved without."""
    vision = hf.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, dict):
        raise CheckpointError("config.json: vision_config is not an object")
    if vision.get("model_type", default["model_type"]) != default["model_type"]:
        return None
    return default | vision


def _tower(vision: dict[str, Any], activations: dict[str, str], **fields: Any) -> VisionSpec:
    """A tower of these fields, with its sizes from config.json."""
    name = vision["hidden_act"]
    if name not in activations:
        raise UnsupportedError(f"vision_config: hidden_act {name!r}; lmkit has {', '.join(activations)}")
    spec = VisionSpec(
        num_layers=integer(vision, "num_hidden_layers"),
        hidden_size=integer(vision, "hidden_size"),
        inner_size=integer(vision, "intermediate_size"),
        num_heads=integer(vision, "num_attention_heads"),
        channels=integer(vision, "num_channels"),
        patch_size=integer(vision, "patch_size"),
        activation=activations[name],
        prefix=BASE,
        **fields,
    )
    if not (spec.num_heads and spec.unit) or spec.hidden_size % (4 * spec.num_heads):
        raise CheckpointError("vision_config: hidden_size, num_attention_heads and patch_size do not fit together")
    if spec.channels != 3:
        raise UnsupportedError(f"vision_config: {spec.channels} channels; lmkit has images of 3")
    return spec
