"""The part of a JSON schema that a grammar holds (llguidance's), and the keywords that it leaves out.

A keyword that forbids nothing, and a `format` that JSON Schema calls an annotation, go without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Between the parts of a JSON text. A model may write it on lines of its own, but not spaces for ever.
WHITESPACE = r"[ \t\r\n]{0,32}"
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # objects whose values are schemas
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems")
_NAMES = """
$dynamicRef $recursiveRef contains dependencies dependentRequired dependentSchemas else if maxContains minContains not
propertyNames then unevaluatedItems unevaluatedProperties uniqueItems
"""
_UNHELD = frozenset(_NAMES.split())
_NOTHING: Mapping[str, tuple[Any, ...]] = {  # values with which a keyword forbids nothing
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedItems": ({}, True),
    "unevaluatedProperties": ({}, True),
    "uniqueItems": (False,),
}
_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
# (?=...), (?<!...), (?>...), \1, \b: what looks around, and what Rust's regex crate does not know
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:<?[=!]|[>#(])|\\[1-9bBcGkKZ])")
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


class _LeftOut(dict[str, None]):
    """Names of keywords."""

    chars = 512  # of patterns that are still read: it takes up to 7 us for each


def held(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The schema without what no grammar holds, and the names of those keywords. Raises RecursionError."""
    left_out = _LeftOut()
    return _kept(schema, left_out), tuple(left_out)


def _held(schema: Any, left_out: _LeftOut) -> Any:
    return _kept(schema, left_out) if isinstance(schema, dict) else schema  # true and false are schemas, too


def _kept(schema: Mapping[str, Any], left_out: _LeftOut) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _held(item, left_out) for key, item in value.items()}
        elif name in _LISTED and isinstance(value, list):
            kept[name] = [_held(item, left_out) for item in value]
        elif name in _ONE:
            kept[name] = (
                [_held(item, left_out) for item in value] if isinstance(value, list) else _held(value, left_out)
            )
        elif name == "unevaluatedProperties" and value is False and not _COMBINED & schema.keys():
            kept.setdefault("additionalProperties", False)  # without other parts all properties are in sight
        elif not _is_unheld(name, value, left_out):
            kept[name] = value
        elif name != "format" and not _forbids_nothing(name, value, schema):
            left_out[name] = None
    return kept


def _is_unheld(name: str, value: Any, left_out: _LeftOut) -> bool:
    match name:
        case "format":
            return value not in FORMATS if isinstance(value, str) else True
        case "pattern":
            if not isinstance(value, str):
                return False
            left_out.chars -= len(value)
            return _LOOKS_AROUND.search(value) is not None or (left_out.chars >= 0 and not _is_pattern(value))
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return not kinds or any(isinstance(kind, str) and kind not in _TYPES for kind in kinds)
        case "$ref":
            return isinstance(value, str) and not value.startswith("#")
    return name in _UNHELD


def _is_pattern(text: str) -> bool:
    """Whether it can be read. What only Python does not know is for others to judge."""
    try:
        re.compile(text)
    except re.error as error:
        return error.msg.startswith(("bad escape", "incomplete escape", "unknown extension"))
    except (OverflowError, RecursionError):
        return False
    return True


def _forbids_nothing(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if name == "not":  # a type that the values have not
        kind, other = schema.get("type"), value.get("type") if isinstance(value, dict) and len(value) == 1 else None
        return (
            isinstance(kind, str)
            and isinstance(other, str)
            and kind != other
            and {kind, other} != {"integer", "number"}
        )
    if name in ("minContains", "maxContains", "then", "else"):
        return ("contains" if "Contains" in name else "if") not in schema
    return any(value == nothing and type(value) is type(nothing) for nothing in _NOTHING.get(name, ()))
