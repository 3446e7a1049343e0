"""The values and fields that may stand at a place, for errors: msgspec names the wrong one alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import ValidationError, inspect

from lmkit.other_names import hint


def with_choices(error: ValidationError, into: Any) -> str:
    """The message of `error`, raised while data was converted into type `into`, with the values that are allowed.

    `Invalid enum value 'best'` gets `; expected prefix, random`, sorted. Other messages stay as they are.
    """
    message = str(error)
    if not message.startswith("Invalid enum value"):
        return message
    values = [str(value) for kind in _at(message, into) for variant in _variants(kind) for value in _values(variant)]
    return f"{message}; expected {', '.join(dict.fromkeys(values))}" if values else message


def explained(error: ValidationError, into: Any) -> str:
    """The same, and for an unknown field `; did you mean port?`."""
    message = with_choices(error, into)
    unknown = re.search(r"unknown field `(.*?)`", message)
    if unknown is None:
        return message
    structs = (each for kind in _at(message, into) for each in _variants(kind) if isinstance(each, inspect.StructType))
    return message + hint(unknown[1], [field.encode_name for struct in structs for field in struct.fields])


def _at(message: str, into: Any) -> list[inspect.Type]:
    """The types at the place that a message names, within type `into`."""
    where = re.search(r" - at `\$(.*)`$", message)
    kinds = [inspect.type_info(into)]
    for name, _ in re.findall(r"\.([^.\[]+)|(\[[^\]]*\])", where[1] if where else ""):
        kinds = [inner for kind in kinds for inner in _inner(kind, name)]
    return kinds


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
