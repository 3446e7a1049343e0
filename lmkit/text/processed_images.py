"""Images for a model that transformers computes: its own processor says which tokens stand for one. No torch here."""

from __future__ import annotations

import base64
import hashlib
from typing import ClassVar

import msgspec

from lmkit.errors import RequestError
from lmkit.text.images import MAX_IMAGES, ImageSettings, ReadImage, Resizing, SentImage, decoded
from lmkit.text.sandbox import Sandbox

CPU_SECONDS = 60.0  # of one image; the first one waits for torch and transformers
MEMORY = 8 << 30  # of addresses: torch maps some GiB
SHARED = Sandbox("processor_process.py", CPU_SECONDS, MEMORY)


class ProcessorSettings(msgspec.Struct, frozen=True, kw_only=True, tag="processor"):
    """How images of a checkpoint are read."""

    ends_prompt: ClassVar[bool] = False  # whether the token of an image may be a prompt's last

    token_id: int  # stands for an image in a chat template
    folder: str  # of the checkpoint
    max_pixels: int  # of one image before the processor has it
    most: int = MAX_IMAGES  # of one request

    @property
    def marks(self) -> tuple[int, ...]:
        """See ImageSettings."""
        return (self.token_id,)

    def read(self, data: bytes, detail: str) -> ReadImage:
        """Decode an image in one process, and have the processor read it in another. Raises RequestError."""
        height, width, pixels = decoded(data, Resizing(1, 1, self.max_pixels), detail)
        kind, value = SHARED.ask(self.folder, height, width, base64.b64encode(pixels).decode())
        if kind != "image":
            reason = value or "its processor takes too much time or memory"
            raise RequestError("invalid_request", f"image: {reason}", "messages")
        return of_tensors(value[0], base64.b64decode(value[1]))

    def mark_of(self, image: SentImage) -> int:
        """See ImageSettings."""
        return self.token_id

    def tokens_of(self, image: SentImage) -> list[int]:
        """The tokens of an image in a prompt."""
        return list(image.ids)

    def check(self, image: SentImage) -> None:
        """The tower reads the tensors."""


def of_tensors(ids: list[int], tensors: bytes) -> ReadImage:
    """An image with its tokens and the tensors of its processor, as safetensors has them."""
    return ReadImage(1, len(ids), hashlib.sha256(tensors).digest(), tensors, ids=tuple(ids))


AnySettings = ImageSettings | ProcessorSettings
