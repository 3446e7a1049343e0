"""Images on their way from messages into a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmkit.errors import RequestError
from lmkit.text.images import ReadImage, expanded
from lmkit.text.messages import ImagePart
from lmkit.text.processed_images import AnySettings
from lmkit.turbo.request import EngineInfo, ImageInput


def settings_of(info: EngineInfo) -> AnySettings:
    """How the engine wants images. Raises RequestError if it takes none."""
    if isinstance(info.images, str):
        raise RequestError("unsupported_parameter", f"images are not supported: {info.images}", "messages")
    return info.images


def read_images(
    parts: Iterable[ImagePart], info: EngineInfo, load: Callable[[Any], bytes | ReadImage]
) -> list[ReadImage]:
    """The images of a prompt. `load` gives the bytes of a source. Raises RequestError."""
    parts = list(parts)
    if parts and len(parts) > (most := settings_of(info).most):
        raise RequestError("invalid_request", f"{len(parts)} images: at most {most} in one request", "messages")
    found: list[ReadImage] = []
    for part in parts:
        settings, given = settings_of(info), load(part.source)
        found.append(given if isinstance(given, ReadImage) else settings.read(given, part.detail))
        if (count := sum(image.num_tokens for image in found)) > info.max_model_len:
            message = f"{len(found)} images alone take {count} tokens, and the context has {info.max_model_len}"
            raise RequestError("context_length_exceeded", message, "messages", n_ctx=info.max_model_len)
    return found


def with_images(
    ids: Sequence[int], images: Sequence[ReadImage], info: EngineInfo
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """A prompt with the tokens of its images, and the images in their places. Raises RequestError."""
    if not images:
        return list(ids), ()
    found, starts = expanded(ids, images, settings_of(info))
    return found, tuple(ImageInput(start, *image) for start, image in zip(starts, images, strict=True))
