"""The values that a field takes, for errors: msgspec names the wrong value alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import ValidationError, inspect


def with_choices(error: ValidationError, into: Any) -> str:
    """The message of `error`, raised while data was converted into type `into`, with the values that are allowed.

    `Invalid enum value 'best'` gets `; expected prefix, random`, sorted. Other messages stay as they are.
    """
    message = str(error)
    if not message.startswith("Invalid enum value"):
        return message
    where = re.search(r" - at `\$(.*)`$", message)
    kinds = [inspect.type_info(into)]
    for name, _ in re.findall(r"\.([^.\[]+)|(\[[^\]]*\])", where[1] if where else ""):
        kinds = [inner for kind in kinds for inner in _inner(kind, name)]
    values = [str(value) for kind in kinds for variant in _variants(kind) for value in _values(variant)]
    return f"{message}; expected {', '.join(dict.fromkeys(values))}" if values else message


def _variants(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The type without metadata, and each type of a union."""
    if isinstance(kind, inspect.Metadata):
        yield from _variants(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for variant in kind.types:
            yield from _variants(variant)
    else:
        yield kind


def _inner(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of a struct's field `name`, or of a collection's entries if `name` is empty."""
    for variant in _variants(kind):
        if isinstance(variant, inspect.StructType):
            yield from (field.type for field in variant.fields if field.encode_name == name)
        elif isinstance(variant, inspect.DictType):
            yield variant.value_type
        elif isinstance(variant, inspect.TupleType):
            yield from variant.item_types
        elif isinstance(variant, inspect.CollectionType):
            yield variant.item_type


def _values(kind: inspect.Type) -> tuple[Any, ...]:
    if isinstance(kind, inspect.EnumType):
        return tuple(member.value for member in kind.cls)
    return kind.values if isinstance(kind, inspect.LiteralType) else ()
