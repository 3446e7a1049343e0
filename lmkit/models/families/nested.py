"""Language models beside towers for images or sound: config.json has the model in `text_config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.spec import ModelSpec

TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
TIED = "tie_word_embeddings"


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of config.json, with the architecture of the whole."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is not an object")
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise UnsupportedError("config.json: the model's tokens see later ones; lmkit runs causal models only")
    whole = {key: hf[key] for key in ("architectures", TIED) if key in hf}  # what the whole says goes before its part
    return {"dtype": hf.get("dtype") or hf.get("torch_dtype")} | text | whole


def beside_towers(
    hf: dict[str, Any], of_text: Callable[[dict[str, Any]], ModelSpec], towers: tuple[str, ...] = TOWERS
) -> ModelSpec:
    """The language model. The tensors of its `towers` are not read."""
    spec = of_text(text_config(hf))
    layers = tuple(replace(layer, prefix="model.language_model.layers") for layer in spec.layers)
    return replace(spec, layers=layers, unread=(*spec.unread, *towers))
