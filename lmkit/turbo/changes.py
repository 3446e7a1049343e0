"""What processes that share a model keep beside it. All carry out its changes in one order, between the same plans. No
torch here."""

from __future__ import annotations

import msgspec

from lmkit.turbo.adapters import AdapterChange


class KeepImage(msgspec.Struct, frozen=True, tag=True):
    """Keep an encoded image, for sequences that enter later. See runners.images."""

    digest: bytes
    rows: bytes  # [tokens, numbers of a token]
    dtype: str  # torch's name of their type
    num_tokens: int
    places: bytes = b""  # int32 [3, tokens + 1]; none: they follow from the image's grid


class DropImage(msgspec.Struct, frozen=True, tag=True):
    """Forget an encoded image."""

    digest: bytes


ImageChange = KeepImage | DropImage
Change = AdapterChange | ImageChange
