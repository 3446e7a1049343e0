"""Images and videos on their way from messages into a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmkit.errors import RequestError
from lmkit.text.images import ReadImage, expanded
from lmkit.text.messages import ImagePart
from lmkit.text.processed_images import AnySettings
from lmkit.text.videos import MAX_VIDEOS, ReadVideo, pictures, with_videos
from lmkit.turbo.request import EngineInfo, ImageInput


def settings_of(info: EngineInfo) -> AnySettings:
    """How the engine wants images. Raises RequestError if it takes none."""
    if isinstance(info.images, str):
        raise RequestError("unsupported_parameter", f"images are not supported: {info.images}", "messages")
    return info.images


Shown = ReadImage | ReadVideo


def read_images(parts: Iterable[ImagePart], info: EngineInfo, load: Callable[[Any], bytes | Shown]) -> list[Shown]:
    """The images and videos of a prompt. `load` gives the bytes of a source. Raises RequestError."""
    parts = list(parts)
    if parts and len(parts) > (most := settings_of(info).most):
        raise RequestError("invalid_request", f"{len(parts)} images: at most {most} in one request", "messages")
    if (videos := sum(part.mark == "video" for part in parts)) > MAX_VIDEOS:
        raise RequestError("invalid_request", f"{videos} videos: at most {MAX_VIDEOS} in one request", "messages")
    found: list[Shown] = []
    for part in parts:
        given = load(part.source)
        found.append(_read(part, given, info) if isinstance(given, bytes) else given)
        if (count := sum(image.num_tokens for image in found)) > info.max_model_len:
            message = f"{len(found)} images alone take {count} tokens, and the context has {info.max_model_len}"
            raise RequestError("context_length_exceeded", message, "messages", n_ctx=info.max_model_len)
    return found


def _read(part: ImagePart, data: bytes, info: EngineInfo) -> Shown:
    if part.mark == "image":
        return settings_of(info).read(data, part.detail)
    if isinstance(info.videos, str):
        raise RequestError("unsupported_parameter", f"videos are not supported: {info.videos}", "messages")
    return info.videos.read(data, part.detail, part.fps)


def with_frames(text: str, shown: Sequence[Shown], info: EngineInfo) -> str:
    """A rendered conversation in which pairs of frames stand for its videos. Raises RequestError."""
    videos = [each for each in shown if isinstance(each, ReadVideo)]
    return text if isinstance(info.videos, str) else with_videos(text, videos, info.videos)


def with_images(
    ids: Sequence[int], shown: Sequence[Shown], info: EngineInfo
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """A prompt, after `with_frames`, with the tokens of its images, and the images in their places. Raises
    RequestError."""
    if not (images := pictures(shown)):
        return list(ids), ()
    found, starts = expanded(ids, images, settings_of(info))
    return found, tuple(ImageInput(start, *image) for start, image in zip(starts, images, strict=True))
