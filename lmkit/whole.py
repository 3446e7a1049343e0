"""Whole numbers of JSON, as every part of lmkit reads them. JSON has one kind of number: 2.0 and 2e0 are 2."""

from __future__ import annotations

from typing import Any

EXACT = 1 << 53  # beyond it, a float may stand for several whole numbers


def whole(value: Any) -> int | None:
    """The whole number that a JSON value is; None for all else: true is none, nor is "2"."""
    if type(value) is int:
        return value
    return int(value) if type(value) is float and value.is_integer() and abs(value) < EXACT else None
