"""Images and videos that a caller of the pipeline gives: a path, bytes, a data: URL, or an image of Pillow."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from lmkit.errors import RequestError
from lmkit.text.image_process import opaque
from lmkit.text.images import ReadImage, data_url
from lmkit.text.videos import ReadVideo
from lmkit.turbo.transport.prompt_images import Shown

MAX_FILE_BYTES = 64 << 20


def load(source: Any) -> bytes | Shown:
    """The bytes of an image's or a video's file. Raises RequestError."""
    if isinstance(source, ReadImage | ReadVideo | bytes):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        return data_url(source)
    if isinstance(source, str) and "://" in source[:32]:
        raise _refused("a pipeline fetches nothing: give a path, bytes, a data: URL or an image of Pillow")
    if isinstance(source, str | os.PathLike):
        return _read(Path(os.fspath(source)))
    if type(source).__module__.partition(".")[0] == "PIL":
        return _saved(source)
    raise _refused(f"expected a path, bytes, a data: URL or an image of Pillow, got {type(source).__name__}")


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise _refused(f"{path}: there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _refused(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from None


def _saved(image: Any) -> bytes:
    from PIL import ImageOps

    file = io.BytesIO()
    opaque(ImageOps.exif_transpose(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _refused(reason: str) -> RequestError:
    return RequestError("invalid_request", f"image: {reason}", "messages")
