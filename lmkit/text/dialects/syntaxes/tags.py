"""Arguments as tags in each other, as MiniMax-M3 writes them: <city>Oslo</city><units><item>m</item></units>.

A mark stands before each tag, so a value may have any other text. The schema tells strings, and lists from objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import KEY, MAX_DEPTH, Rules, with_definitions
from lmkit.text.dialects.schemas import Schema, is_text, leaves, types_of, value_of
from lmkit.text.dialects.syntaxes.base import Syntax

ITEM = "item"
_EMPTY = {"object": "{}", "array": "[]"}


class Tags(Syntax):
    def __init__(self, mark: str) -> None:
        self._mark = mark

    def read(self, reader: Reader, schema: Any) -> Steps:
        root = schema if isinstance(schema, Mapping) else {}
        return (yield from self._children(reader, {"type": "object", **root}, root, "", 0))

    def _children(self, reader: Reader, about: Any, root: Schema, first: str, depth: int) -> Steps:
        """Read tags up to one that closes, which is left. `first` is the name of one that is read already."""
        types = types_of(about, root)
        is_list = first == ITEM and not ("object" in types and "array" not in types)
        opening = "[" if is_list else "{"
        while True:
            if not first:
                found = yield from reader.match(rf"\s*{re.escape(self._mark)}<(?P<name>[^\s<>/]{{1,256}})>")
                if found is None:
                    break
                first = found["name"]
            if (is_list and first != ITEM) or depth > MAX_DEPTH:
                return False
            reader.argue(opening + ("" if is_list else json.dumps(first, ensure_ascii=False) + ": "))
            opening = ", "
            part = _items(about, root) if is_list else _property(about, root, first)
            if not (yield from self._value(reader, part, root, first, depth)):
                return False
            first = ""
        empty = opening in ("[", "{")
        reader.argue((opening if empty else "") + ("]" if is_list else "}"))
        return True

    def _value(self, reader: Reader, about: Any, root: Schema, name: str, depth: int) -> Steps:
        """Read a value and the tag that closes it."""
        parts: list[str] = []
        yield from reader.until([self._mark], parts.append)
        text, types = "".join(parts), types_of(about, root)
        tag = yield from reader.match(rf"<(?P<name>[^\s<>/]{{1,256}})>|(?P<closing></{re.escape(name)}>)")
        if tag is None or tag["closing"]:
            empty = next((_EMPTY[kind] for kind in types if kind in _EMPTY), None) if not text.strip() else None
            reader.argue(empty or value_of(text, types))
            return tag is not None
        whole = yield from self._children(reader, about, root, tag["name"], depth + 1)
        end = rf"\s*{re.escape(self._mark)}</{re.escape(name)}>"
        return whole and (yield from reader.match(end)) is not None

    # ---- the grammar

    def rules(self, rules: Rules, schema: Schema, name: str) -> str:
        return self._members(rules, schema, schema, name, 0)

    def _members(self, rules: Rules, about: Schema, root: Schema, name: str, depth: int) -> str:
        properties = about.get("properties") or {}
        if not properties and about.get("additionalProperties", True) is not False:
            return f"{self._any(rules)}*"
        required = about.get("required") or ()
        parts = []
        for idx, (key, part) in enumerate(properties.items()):
            member = rules.rule(f"{name}_m{idx}", self._tag(rules, key, part, root, f"{name}_{idx}", depth + 1))
            parts.append(member if key in required else f"{member}?")
        return " ".join(parts)

    def _tag(self, rules: Rules, key: str, about: Any, root: Schema, name: str, depth: int) -> str:
        opening, closing = rules.literal(f"{self._mark}<{key}>"), f"{self._mark}</{key}>"
        options = list(leaves(about, root))
        if is_text(types_of(about, root)):
            return f"{opening} {rules.texts(options, name, closing)}"
        inside = (self._leaf(rules, leaf, root, f"{name}_{idx}", depth) for idx, leaf in enumerate(options))
        return f"{opening} ({' | '.join(inside)}) {rules.literal(closing)}"

    def _leaf(self, rules: Rules, leaf: Schema, root: Schema, name: str, depth: int) -> str:
        match leaf.get("type"):
            case "object" if depth <= MAX_DEPTH:
                return rules.rule(f"{name}_o", self._members(rules, leaf, root, name, depth))
            case "array" if depth <= MAX_DEPTH and "prefixItems" not in leaf:
                item = rules.rule(f"{name}_i", self._tag(rules, ITEM, leaf.get("items", {}), root, name, depth + 1))
                most = leaf.get("maxItems")
                return f"{item}{{{leaf.get('minItems', 0)},{'' if most is None else most}}}"
        return rules.json(with_definitions(leaf, root))

    def _any(self, rules: Rules) -> str:
        """A tag of any name with any text, or with such tags."""
        key = rules.rule("KEY", KEY)
        opening, closing = rules.literal(f"{self._mark}<"), f"{self._mark}</"
        inside = f"({rules.up_to('any_text', closing)} | any_tag+ {rules.literal(closing)})"
        return rules.rule("any_tag", f'{opening} {key} ">" {inside} {key} ">"')

    # ---- a text

    def text(self, arguments: Mapping[str, Any]) -> str:
        return self._tags(arguments.items())

    def _tags(self, members: Iterable[tuple[str, Any]]) -> str:
        """Tags of members. One without a value is left out, as the chat template does."""
        return "".join(
            f"{self._mark}<{key}>{self._inside(value)}{self._mark}</{key}>"
            for key, value in members
            if value is not None
        )

    def _inside(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return self._tags(value.items())
        if isinstance(value, list):
            return self._tags((ITEM, item) for item in value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _property(about: Any, root: Schema, name: str) -> Any:
    """The schema of an object's property; {} if none tells it."""
    found = (
        leaf["properties"].get(name) for leaf in leaves(about, root) if isinstance(leaf.get("properties"), Mapping)
    )
    return next((part for part in found if part is not None), {})


def _items(about: Any, root: Schema) -> Any:
    """The schema of a list's items; {} if none tells it."""
    return next((leaf["items"] for leaf in leaves(about, root) if "items" in leaf), {})
