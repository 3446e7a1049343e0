"""Changes of an engine's adapters. All ranks carry them out in one order, between the same plans. No torch here."""

from __future__ import annotations

import msgspec


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter in `folder`, beside the steps, keep it by this key, and say AdapterRead."""

    key: int
    folder: str


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True):
    """Rows with adapter `number` use the adapter with this key from now on; None: the number stands for none."""

    number: int
    key: int | None


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter that has no place, also one that could not be read."""

    key: int


AdapterChange = ReadAdapter | PlaceAdapter | DropAdapter


class AdapterRead(msgspec.Struct, frozen=True):
    """A rank's answer to ReadAdapter."""

    rank: int
    key: int
    digest: str = ""  # of the files
    error: str = ""  # the reason why it cannot be used


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that has a place."""

    number: int  # of its rows in a step
    digest: str
