"""The images of a model that transformers computes: its processor, its tower, and what its language model is given.

A tower runs as a part of the whole model, up to the call of the language model. The arguments of that call are all that
an image changes: embeddings, positions, and what is added to the first layers. They are kept in place of a pass over
the tower, and no name of a tower is known here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from lmkit.errors import UnsupportedError
from lmkit.models.flexible.decoder import DEEP, DEEP_ROWS, FlexibleDecoder
from lmkit.models.flexible.module import foreign
from lmkit.models.vision import Encoded, Encoding
from lmkit.text.processed_images import ProcessorSettings
from lmkit.text.processor_process import IDS
from lmkit.text.videos import NO_VIDEOS, VideoSettings

PER_TOKEN = "token_type_ids"


class _Reached(Exception):
    """The language model is called."""


@dataclass(frozen=True)
class Given:
    """What the language model is given for n tokens."""

    rows: Tensor  # float32 [n, hidden * (1 + deep layers)]
    places: Tensor  # int32 [3, n]
    turned: bool  # whether the three places differ
    sees_later: bool  # whether tokens attend to later ones
    deep: int
    others: tuple[str, ...]  # arguments that are not known here


@dataclass(frozen=True)
class ForeignTower:
    """See lmkit.models.vision.Encodes."""

    decoder: FlexibleDecoder
    settings: ProcessorSettings
    videos: VideoSettings | str = NO_VIDEOS

    def encode(self, rows: int, columns: int, pixels: bytes) -> Encoding:
        """`pixels` are the tensors of the processor."""
        yield
        try:
            found = given(self.decoder, followed(load(pixels)))
        except (UnsupportedError, ValueError, TypeError) as error:
            raise RuntimeError(str(error)) from error
        return Encoded(found.rows[:-1].clone(), found.places)


def followed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an image with a token of text after it."""
    ids = tensors[IDS]
    more = {name: value for name, value in tensors.items() if name.endswith(PER_TOKEN) and value.shape == ids.shape}
    return tensors | {name: nn.functional.pad(value, (0, 1)) for name, value in (more | {IDS: ids}).items()}


def given(decoder: FlexibleDecoder, tensors: dict[str, Tensor]) -> Given:
    """What the language model is given for these tokens and images. Raises UnsupportedError."""
    arguments = _arguments(decoder, tensors)
    rows, count = arguments.pop("inputs_embeds", None), tensors[IDS].shape[1]
    if not isinstance(rows, Tensor) or rows.shape[:2] != (1, count):
        raise UnsupportedError(f"{decoder.spec.architecture}: its language model is given no embeddings of images")
    positions = arguments.pop("position_ids", None)
    turned = isinstance(positions, Tensor) and positions.ndim == 3
    places = positions[-3:, 0] if turned else torch.arange(count).expand(3, -1)
    mask, deep = arguments.pop("attention_mask", None), arguments.pop(DEEP, None) or []
    is_image = arguments.pop(DEEP_ROWS, None)
    parts = [rows[0].float()]
    for each in deep:
        parts.append(torch.zeros(count, rows.shape[2]))
        parts[-1][is_image[0]] = each.float()
    others = sorted(name for name, value in arguments.items() if isinstance(value, Tensor | list | tuple))
    return Given(torch.cat(parts, -1), places.int(), turned, _sees_later(mask), len(deep), tuple(others))


def _arguments(decoder: FlexibleDecoder, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of the language model in a pass of the whole model."""
    language, found = decoder.language, dict[str, Any]()
    own = language.forward
    signature = inspect.signature(own)

    def reached(*args: Any, **options: Any) -> None:
        bound = signature.bind(*args, **options)
        for name, value in bound.arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found.update(value if is_rest else {name: value})
        raise _Reached

    with foreign(decoder.spec.architecture, "cannot encode an image"), decoder.alone():
        language.forward = reached  # type: ignore[method-assign]
        try:
            decoder.module(**tensors, attention_mask=torch.ones_like(tensors[IDS]), use_cache=False)
        except _Reached:
            pass
        finally:
            language.forward = own  # type: ignore[method-assign]
    return found


def _sees_later(mask: Any) -> bool:
    """Whether tokens see later ones, by a mask of any of the kinds that transformers has."""
    if isinstance(mask, dict):
        return any(map(_sees_later, mask.values()))
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    seen = mask[0, 0] if mask.dtype is torch.bool else mask[0, 0] == 0
    return bool(seen.triu(1).any())
