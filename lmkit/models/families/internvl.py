"""InternVL: its tower beside a language model of another family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.models.families.llama import llama, qwen2, qwen3
from lmkit.models.families.moe import qwen3_moe
from lmkit.models.families.nested import TIED, beside_towers, text_config
from lmkit.models.families.towers import intern
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

TEXTS = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "llama": llama}


@family("InternVLForConditionalGeneration")
def internvl(hf: dict[str, Any]) -> ModelSpec:
    kind = text_config(hf).get("model_type", "qwen2")
    if kind not in TEXTS:
        raise UnsupportedError(f"text_config: model_type {kind!r} is not supported; lmkit runs {', '.join(TEXTS)}")
    return replace(beside_towers({TIED: True} | hf, TEXTS[kind]), vision=intern(hf))
