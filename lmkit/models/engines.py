"""Which engine computes a model: lmkit's own decoder, or transformers' modules with lmkit's parts put in."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from lmkit.config import ModelImpl
from lmkit.errors import UnsupportedError
from lmkit.extras import install, needed_for
from lmkit.models.decoder import Decoder
from lmkit.models.identity import Packing
from lmkit.models.registry import NoFamilyError, UnknownArchitectureError
from lmkit.models.source import ModelSource
from lmkit.models.vision import Encodes


def open_source(path: str | Path, impl: ModelImpl, **options: Any) -> ModelSource:
    """Open a checkpoint for the engine `impl`. auto: lmkit's own engine for what its families compute, transformers'
    modules for the rest. `options` are those of ModelSource. Raises its errors."""
    if impl == "flexible":
        return _flexible(path, **options)
    try:
        return ModelSource(path, **options)
    except NoFamilyError as error:
        if impl == "fast":
            raise
        if find_spec("transformers") is None:
            raise UnsupportedError(f"{error}; transformers may have it: {install('any')}") from None
        try:
            return _flexible(path, **options)
        except UnsupportedError as theirs:
            if isinstance(error, UnknownArchitectureError) and not isinstance(theirs, UnknownArchitectureError):
                raise
            raise UnsupportedError(f"{error}; {theirs}") from None


def _flexible(path: str | Path, **options: Any) -> ModelSource:
    with needed_for("the flexible engine"):
        from lmkit.models.flexible.source import FlexibleSource
    return FlexibleSource(path, **options)


def foreign_logits(source: ModelSource, hidden: Tensor) -> Tensor:
    """States float32 [seq_len, hidden] after the last layer -> logits [seq_len, vocab], of a source that transformers
    computes."""
    from lmkit.models.flexible.source import FlexibleSource

    assert isinstance(source, FlexibleSource)
    return source.logits(hidden)


def foreign_tower(source: ModelSource, decoder: Decoder, max_pixels: int) -> Encodes:
    """What encodes images for the decoder of a model that transformers computes. Raises UnsupportedError."""
    from lmkit.models.flexible.decoder import FlexibleDecoder
    from lmkit.models.flexible.source import FlexibleSource

    assert isinstance(source, FlexibleSource)
    assert isinstance(decoder, FlexibleDecoder)
    return source.tower(decoder, max_pixels)


def foreign_decoder(source: ModelSource, packing: Packing) -> Decoder:
    """The decoder of a model that transformers computes."""
    from lmkit.models.flexible.source import FlexibleSource

    assert isinstance(source, FlexibleSource)
    return source.decoder(packing)
