"""Arguments of which each stands by itself between marks: <parameter=city>Oslo</parameter>.

A string stands as it is, any other value as JSON. Some dialects say of each value what it is; for the others the schema
tells strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import KEY, LINE, Rules, with_definitions
from lmkit.text.dialects.schemas import Schema, is_text, leaves, type_of, types_by_name, types_of, value_of
from lmkit.text.dialects.syntaxes.base import Syntax

KIND = "\2"  # in the text before a value: of what kind it is
_WORDS = {"boolean": '"true" | "false" | "True" | "False"', "null": '"null" | "None"'}  # some write Python's


@dataclass(frozen=True)
class Members(Syntax):
    """A member is before, KEY, between, VALUE, after, end."""

    before: str
    between: str
    after: str
    end: str = ""
    on_lines: bool = False  # a value may have lines of its own
    kinds: Mapping[str, str] = field(default_factory=dict)  # of the JSON types; "" has that of the others
    quotes: tuple[str, str] = ("", "")  # marks that may stand around a value, so that it may have any other

    def read(self, reader: Reader, schema: Any) -> Steps:
        types = types_by_name(schema)
        opening, mark = "{", self.after.strip()
        while found := (yield from reader.match(self._header)):
            key, kind = found["name"].strip(), found.groupdict().get("kind")
            reader.argue(opening + json.dumps(key, ensure_ascii=False) + ": ")
            opening = ", "
            parts: list[str] = []
            is_quoted = self.quotes[0] and (yield from self._is_quoted(reader))
            closed = yield from reader.until([self.quotes[1] + mark if is_quoted else mark], parts.append)
            value = "".join(parts)
            if self.on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            own = types.get(key, ()) if kind is None else ("string",) if kind == self.kinds["string"] else ("number",)
            reader.argue(value_of(value, own))
            if not closed:
                return True  # the object stays open
        reader.argue("{}" if opening == "{" else "}")
        return True

    @cached_property
    def _header(self) -> str:
        """A pattern of what stands before a value."""
        before, between = (
            r"\s*".join(map(re.escape, re.split(rf"\s+|{LINE}", text.rstrip(f"\n{LINE}"))))
            for text in (self.before, self.between)
        )
        return rf"\s*{before}(?P<name>[^<>\"]{{1,256}})" + between.replace(KIND, "(?P<kind>[a-z]{1,16})")

    def _is_quoted(self, reader: Reader) -> Steps:
        """Whether a mark begins the value, which is read."""
        first, second = map(re.escape, self.quotes[0][:2])
        found = yield from reader.match(f"(?P<mark>{re.escape(self.quotes[0])})|(?=[^{first}]|{first}[^{second}])")
        return found is not None and found["mark"] is not None

    def rules(self, rules: Rules, schema: Schema, name: str) -> str:
        """The properties of a schema in their order. If it has none, any members."""
        properties = schema.get("properties") or {}
        before, end = rules.literal(self.before), rules.literal(self.end)
        if not properties and schema.get("additionalProperties", True) is not False:
            return f"({before} {rules.rule('KEY', KEY)} {self._any(rules, f'{name}_any')} {end})*"
        required = schema.get("required") or ()
        parts = []
        for idx, (key, about) in enumerate(properties.items()):
            value = self._value(rules, about, schema, f"{name}_v{idx}")
            member = rules.rule(f"{name}_p{idx}", f"{rules.literal(self.before + key)} {value} {end}")
            parts.append(member if key in required else f"{member}?")
        return " ".join(parts)

    def _kind(self, kind: str) -> str:
        """What stands before a value of a JSON type."""
        return self.between.replace(KIND, self.kinds.get(kind, self.kinds.get("", kind)))

    def _any(self, rules: Rules, name: str) -> str:
        text = f"{rules.literal(self._kind('string'))} {rules.up_to(name, self.after)}"
        if not self.kinds:
            return text
        others = [
            f"{rules.literal(self._kind(kind))} {rules.json({'type': kind})} {rules.literal(self.after)}"
            for kind in ("number", "boolean", "null", "object", "array")
        ]
        return rules.rule(f"{name}_value", " | ".join([text, *others]))

    def _value(self, rules: Rules, about: Any, root: Schema, name: str) -> str:
        """What stands between a key and the end of its member."""
        if self.kinds:
            found = (self._leaf(rules, leaf, root, f"{name}_{idx}") for idx, leaf in enumerate(leaves(about, root)))
            return f"({' | '.join(found)})"
        between, after = rules.literal(self.between), rules.literal(self.after)
        options = list(leaves(about, root))
        if is_text(types_of(about, root)):
            return f"{between} {rules.texts(options, name, self.after)}"
        if all("enum" not in leaf and leaf.get("type") in _WORDS for leaf in options):
            return f"{between} ({' | '.join(_WORDS[leaf['type']] for leaf in options)}) {after}"
        return f"{between} {rules.json(with_definitions(about, root))} {after}"

    def _leaf(self, rules: Rules, leaf: Schema, root: Schema, name: str) -> str:
        """A value whose kind is told."""
        if "enum" in leaf:
            shown = ((type_of(word), word) for word in leaf["enum"])
            return " | ".join(
                rules.literal(self._kind(kind) + (word if kind == "string" else json.dumps(word)) + self.after)
                for kind, word in shown
            )
        if leaf.get("type") == "string":
            return f"{rules.literal(self._kind('string'))} {rules.texts([leaf], name, self.after)}"
        if "type" not in leaf:
            return self._any(rules, name)
        held = rules.json(with_definitions(leaf, root))
        return f"{rules.literal(self._kind(leaf['type']))} {held} {rules.literal(self.after)}"

    def text(self, arguments: Mapping[str, Any]) -> str:
        members = []
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            members.append(self.before + key + self._kind(type_of(value)) + shown + self.after + self.end)
        return "".join(members)
