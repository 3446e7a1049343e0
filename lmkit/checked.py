"""Structs whose constructor checks names and types, with errors in Python's words."""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lmkit import other_names
from lmkit.errors import ConfigError


class CheckedMeta(msgspec.StructMeta):
    """Makes the constructor of a struct check names and types, as reading the struct from a file does.

    An unknown field that another tool has is answered with ours (`lmkit.other_names`). Raises ConfigError.
    """

    if not TYPE_CHECKING:  # a type checker sees the constructor of the fields

        def __call__(cls, *args: Any, **named: Any) -> Any:
            if args:
                raise ConfigError(f"{cls.__name__}: expected fields by name, got {reprlib.repr(args[0])}")
            given = cls.plain(named)
            for name in given.keys() - set(cls.__struct_fields__):
                advice = other_names.hint(name, cls.__struct_fields__, cls.__name__)
                raise ConfigError(f"{cls.__name__} has no field {name}{advice}")
            try:
                return msgspec.convert(given, cls)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {_in_words(str(error), cls, given)}") from None

    def plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The values that the caller gave, each as the field has it."""
        return given


_WORDS = {"null": "None", "array": "list", "object": "dict", "|": "or"}  # JSON's types in Python
_KINDS = {"NoneType": "None", "tuple": "list"}


def _in_words(error: str, cls: type, given: Mapping[str, Any]) -> str:
    """msgspec's sentence with Python's names: `temperature='hot': expected float, got str`."""
    text, _, path = error.partition(" - at ")
    field = next(iter(re.findall(r"\$\.(\w+)", path)), "")
    words = " ".join(_WORDS.get(word, word) for word in text.replace("`", "").replace(",", " ,").split())
    words = (words[:1].lower() + words[1:]).replace(" ,", ",")
    value = given.get(field)
    if path == f"`$.{field}`" and (", got " in text or text.startswith("Invalid enum")):
        words = f"expected {_kinds(typing.get_type_hints(cls)[field])}, got {type(value).__name__}"
    return f"{field}={reprlib.repr(value)}: {words}"


def _kinds(hint: Any) -> str:
    """The type of a field: `int or None`, `auto, cpu, cuda`."""
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(map(_kinds, typing.get_args(hint)))
    name: str = (typing.get_origin(hint) or hint).__name__
    return _KINDS.get(name, name)
