"""Reads images with the processor of a checkpoint that transformers computes, in a `Sandbox`: pixels to the tokens that
stand for the image in a prompt, and to the tensors that the model takes with them.

The pixels are those that `image_process` has decoded. Nothing of the checkpoint's own code is run: processors are
classes of transformers. Video and sound are left out, whose parts need packages that lmkit does not ask for.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
IDS = "input_ids"
_OPENED: dict[str, Any] = {}


class Absent(dict[str, None]):
    """In place of what reads videos or sound. Processors copy settings of it, and write it as JSON."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def without_checks(kind: Any) -> Any:
    """A processor's class whose parts may be absent."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})


def processor_class(folder: Path, model_type: str) -> Any:
    """transformers' class of a checkpoint's processor. Raises ValueError if it has none."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = [folder / name for name in FILES if (folder / name).is_file()]
    names = [json.loads(file.read_text()).get("processor_class") for file in files]
    name = next((name for name in names if name), PROCESSOR_MAPPING_NAMES.get(model_type))
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not hasattr(found, "get_processor_dict"):
        raise ValueError(f"transformers has no processor {name or model_type!r:.60}")
    return found


def open_processor(folder: str) -> Any:
    """The processor of a checkpoint, for text and images."""
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    path = Path(folder)
    found = processor_class(path, json.loads((path / "config.json").read_text())["model_type"])
    settings, _ = found.get_processor_dict(folder, local_files_only=True)
    parts = []
    for name in found.get_attributes():
        if "tokenizer" in name:
            parts.append(found._load_tokenizer_from_pretrained(name, folder, local_files_only=True))
        else:
            images = name == "image_processor"
            parts.append(AutoImageProcessor.from_pretrained(folder, local_files_only=True) if images else Absent())
    return without_checks(found).from_args_and_dict(parts, settings)


def marker(processor: Any) -> str:
    """The text that stands for an image where a chat template writes one. Raises ValueError if there is none."""
    named = ((processor, "image_placeholder_token"), (processor, "image_token"), (processor.tokenizer, "image_token"))
    for owner, name in named:
        text = getattr(owner, name, None)
        if isinstance(text, str) and text:
            return text
    raise ValueError(f"{type(processor).__name__} has no token for images")


def processed(processor: Any, text: str, images: list[Any]) -> dict[str, Any]:
    """The tensors of a text with images: `input_ids` int64 [1, n], and what the model takes with them."""
    import torch

    found = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if left := sorted(found.keys() - tensors.keys()):
        raise ValueError(f"{type(processor).__name__} gives {', '.join(left)}, which is no tensor")
    tensors.pop("attention_mask", None)
    return {name: value.contiguous() for name, value in tensors.items()}


def answer(folder: str, height: int, width: int, pixels: str) -> tuple[str, Any]:
    """The reply to a request with RGB pixels in base64.

    ("image", [ids, safetensors in base64]): the tokens in place of the marker, and the tensors, ids among them
    ("refused", why the processor does not take the image)
    """
    import torch
    from PIL import Image
    from safetensors.torch import save

    torch.set_num_threads(1)
    if folder not in _OPENED:
        _OPENED[folder] = open_processor(folder)
    processor = _OPENED[folder]
    image = Image.frombytes("RGB", (width, height), base64.b64decode(pixels))
    try:
        tensors = processed(processor, marker(processor), [image])
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kind: it is foreign code
        return "refused", f"{type(processor).__name__} of transformers does not take it ({type(error).__name__})"
    return "image", [tensors[IDS][0].tolist(), base64.b64encode(save(tensors)).decode()]
