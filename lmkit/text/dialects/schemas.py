"""What dialects that write values as text need to know of a JSON schema: its types, and strings as patterns."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
# A value of these types is a text by itself: the other two are words.
WORDS: Mapping[str, tuple[str, ...]] = {"null": ("null",), "boolean": ("true", "false")}
_DIGITS = {"date": r"\d{4}-\d\d-\d\d", "time": r"\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)"}
FORMATS = {
    **_DIGITS,
    "date-time": f"{_DIGITS['date']}T{_DIGITS['time']}",
    "uuid": "-".join(f"[0-9a-fA-F]{{{size}}}" for size in (8, 4, 4, 4, 12)),
    "ipv4": r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
}
_TEXT = r"(.|\n)*"
_MAX_DEPTH = 16


def leaves(about: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """The alternatives of a schema, each of one type or with fixed values. One of an unknown form is {}."""
    if not isinstance(about, Mapping) or depth > _MAX_DEPTH:
        yield {}
    elif isinstance(about.get("$ref"), str):
        yield from leaves(_referred(about["$ref"], root), root, depth + 1)
    elif isinstance(options := about.get("anyOf", about.get("oneOf")), list):
        for option in options:
            yield from leaves(option, root, depth + 1)
    elif "const" in about:
        yield {"enum": [about["const"]]}
    elif isinstance(about.get("enum"), list):
        yield {"enum": about["enum"]}
    elif isinstance(kinds := about.get("type"), list):
        for kind in kinds:
            yield {**about, "type": kind}
    else:
        yield about if isinstance(kinds, str) and "allOf" not in about else {}


def types_of(about: Any, root: Schema) -> tuple[str, ...]:
    """The JSON types of a schema's values; () if it does not tell them."""
    types: dict[str, None] = {}
    for leaf in leaves(about, root):
        if "enum" in leaf:
            types |= dict.fromkeys(map(type_of, leaf["enum"]))
        elif "type" in leaf:
            types[leaf["type"]] = None
        else:
            return ()
    return tuple(types)


def is_text(types: tuple[str, ...]) -> bool:
    """Whether a value of these types stands as it is, without quotes: it is a string or a word."""
    return "string" in types and all(kind == "string" or kind in WORDS for kind in types)


def patterns(leaf: Schema) -> list[str]:
    """Regular expressions that all hold for a string of this schema. Other formats than FORMATS are any text."""
    found = [FORMATS[leaf["format"]]] if leaf.get("format") in FORMATS else []
    least, most = leaf.get("minLength", 0), leaf.get("maxLength")
    if least or most is not None:
        found.append(rf"(.|\n){{{least},{'' if most is None else most}}}")
    if isinstance(pattern := leaf.get("pattern"), str):
        found.append(_anchored(pattern))
    return found


def _anchored(pattern: str) -> str:
    """A pattern for the whole text, of one for a part of it."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inside = pattern[begins : len(pattern) - ends]
    if "|" in inside and (begins or ends):  # ^a|b$ is (^a)|(b$)
        parts = [_anchored(part) for part in _alternatives(pattern)]
        if len(parts) > 1:
            return "|".join(f"({part})" for part in parts)
    return ("" if begins else _TEXT) + f"({inside})" + ("" if ends else _TEXT)


def _alternatives(pattern: str) -> list[str]:
    """A pattern's parts between | that stand in no group."""
    parts, depth, at = [""], 0, 0
    for found in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|[()|]", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "|" and not depth:
            parts[-1] = pattern[at : found.start()]
            parts.append("")
            at = found.end()
    parts[-1] = pattern[at:]
    return parts


def _referred(name: str, root: Schema) -> Any:
    """What a `$ref` inside the schema names; None if it is elsewhere."""
    found: Any = root
    for part in name.removeprefix("#/").split("/") if name.startswith("#/") else [name]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return root if name == "#" else found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    kinds = ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def types_by_name(schema: Any) -> dict[str, tuple[str, ...]]:
    """The JSON types of each parameter, as far as its schema names them."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: types_of(about, schema) for name, about in properties.items()}


def value_of(text: str, types: tuple[str, ...]) -> str:
    """A parameter's value as JSON. A text that is no JSON of its type is a string."""
    if is_text(types):
        words = {word for kind in types for word in WORDS.get(kind, ())}
        return text if text in words else json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(_python(text) if types and "string" not in types else text, ensure_ascii=False)
    if isinstance(value, str) and not text.strip().startswith('"'):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _python(text: str) -> Any:
    """The value of a text as Python writes it, as some chat templates show values: True, None, {'a': [1]}."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value
