"""Formats of structural tags, as xgrammar has them: parts of an answer in each other, as a grammar in Lark.

A format is {"type": ..., ...}, see `FORMATS`. Text ends where the next fixed text begins, so `any_text` stands at the
end, in a tag, or before a `const_string`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_DEPTH = 16
MAX_PARTS = 1024
_TEXT = r"(.|\n)*"


def lark_of(value: Any, to_lark: Callable[[Any], str]) -> str:
    """The grammar of a format. `to_lark` reads grammars inside it.

    Raises ValueError, which says where a format is wrong.
    """
    rules = _Rules(to_lark)
    return "\n".join([f"start: {rules.write(value, 'format', 0)}", *rules.lines])


class _Rules:
    def __init__(self, to_lark: Callable[[Any], str]) -> None:
        self._to_lark = to_lark
        self.lines: list[str] = []

    def rule(self, text: str, attributes: str = "", *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        if len(self.lines) >= MAX_PARTS:
            raise ValueError(f"at most {MAX_PARTS} parts")
        self.lines.append(f"{name}{attributes}: {text}")
        return name

    def write(self, value: Any, where: str, depth: int) -> str:
        kind = str(value.get("type")) if isinstance(value, dict) else ""
        if kind not in FORMATS or depth > MAX_DEPTH:
            names = ", ".join(FORMATS)
            raise ValueError(f"{where}: expected a format whose type is one of {names}, at most {MAX_DEPTH} deep")
        write, needed, optional = FORMATS[kind]
        fields = {name: item for name, item in value.items() if name != "type" and item is not None}
        for name in needed:
            if name not in fields:
                raise ValueError(f"{where}: {kind} needs {name}")
        for name in fields:
            if name not in needed and name not in optional:
                raise ValueError(f"{where}: {kind} has no field {str(name)[:64]!r}")
        return write(self, fields, where, depth)

    def const_string(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        return _quoted(_string(fields["value"], f"{where}.value"))

    def json_schema(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        if fields.get("style", "json") != "json":
            raise ValueError(f'{where}.style: only "json" is supported')
        if not isinstance(fields["json_schema"], dict):
            raise ValueError(f"{where}.json_schema: expected a JSON schema")
        return self.rule(f"%json {json.dumps(fields['json_schema'])}")

    def regex(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        return _slashed(_string(fields["pattern"], f"{where}.pattern"))

    def grammar(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        return self.rule(f"%lark {{\n{self._to_lark(fields['grammar'])}\n}}")

    def any_text(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        return self.rule(without(_strings(fields.get("excludes", []), f"{where}.excludes")), terminal=True)

    def up_to(self, ends: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Any text up to the first of these texts, and that."""
        text = self.rule(without(excludes), terminal=True) if excludes else f"/{_TEXT}/"
        found = [self.rule(text, f"[suffix={_quoted(end)}]") for end in ends]
        return f"({' | '.join(found)})"

    def sequence(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        parts = _list(fields["elements"], f"{where}.elements")
        written, skip = [], False
        for i, part in enumerate(parts):
            if skip:
                skip = False
                continue
            follows = parts[i + 1] if i + 1 < len(parts) else None
            if _is_text(part) and follows is not None:
                if not (isinstance(follows, dict) and follows.get("type") == "const_string"):
                    raise ValueError(f"{where}.elements[{i}]: any_text needs a const_string behind it, or the end")
                end = _string(follows.get("value"), f"{where}.elements[{i + 1}].value")
                excludes = _strings(part.get("excludes") or [], f"{where}.elements[{i}].excludes")
                written.append(self.up_to([end], excludes))
                skip = True
            else:
                written.append(self.write(part, f"{where}.elements[{i}]", depth + 1))
        return self.rule(" ".join(written))

    def either(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        parts = _list(fields["elements"], f"{where}.elements")
        return self.rule(" | ".join(self.write(p, f"{where}.elements[{i}]", depth + 1) for i, p in enumerate(parts)))

    def tag(self, fields: Mapping[str, Any], where: str, depth: int, begun: str = "") -> str:
        """`begun` is what is written of its beginning."""
        begin = _string(fields["begin"], f"{where}.begin", empty=True)
        given = fields["end"]
        ends = _strings(given if isinstance(given, list) else [given], f"{where}.end", empty=True)
        content = fields["content"]
        if _is_text(content) and all(ends):
            rest = self.up_to(ends, _strings(content.get("excludes") or [], f"{where}.content.excludes"))
        else:
            ending = " | ".join(map(_quoted, ends))
            rest = f"{self.write(content, f'{where}.content', depth + 1)} ({ending})"
        return self.rule(f"{_quoted(begin.removeprefix(begun))} {rest}")

    def tags(self, fields: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        found = []
        for i, tag in enumerate(_list(fields["tags"], f"{where}.tags")):
            here = f"{where}.tags[{i}]"
            needed = {"begin", "content", "end"}
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag" or not needed <= tag.keys():
                raise ValueError(f"{here}: expected a tag with begin, content and end")
            if unknown := next((name for name in tag if name not in needed | {"type"}), None):
                raise ValueError(f"{here}: tag has no field {unknown[:64]!r}")
            found.append(tag)
        return found

    def triggered_tags(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        triggers = _strings(fields["triggers"], f"{where}.triggers")
        tags = self.tags(fields, where)
        excludes = _strings(fields.get("excludes", []), f"{where}.excludes")
        if not triggers:
            raise ValueError(f"{where}.triggers: expected a trigger")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(tags):
            begin = _string(tag["begin"], f"{where}.tags[{i}].begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"{where}.tags[{i}].begin: it begins with none of the triggers")
            by_trigger[trigger].append(self.tag(tag, f"{where}.tags[{i}]", depth + 1, trigger))
        headed, bare = [], []
        for trigger, found in by_trigger.items():
            if found:
                others = [other for other in triggers if other != trigger]
                bodies = f"({' | '.join(found)})"
                headed.append(f"{self.up_to([trigger], [*others, *excludes])} {bodies}")
                bare.append(f"{_quoted(trigger)} {bodies}")
        first, once = self.rule(" | ".join(bare)), self.rule(" | ".join(headed))
        rest = self.rule(without([*triggers, *excludes]), terminal=True)
        must, stop = (_flag(fields, name, where) for name in ("at_least_one", "stop_after_first"))
        if stop:
            return self.rule(first if must else f"{once} | {rest}")
        return self.rule(f"{first if must else ''} {once}* {rest}")

    def tags_with_separator(self, fields: Mapping[str, Any], where: str, depth: int) -> str:
        separator = _string(fields["separator"], f"{where}.separator", empty=True)
        tags = [self.tag(tag, f"{where}.tags[{i}]", depth + 1) for i, tag in enumerate(self.tags(fields, where))]
        one = self.rule(" | ".join(tags))
        must, stop = (_flag(fields, name, where) for name in ("at_least_one", "stop_after_first"))
        found = one if stop else f"{one} ({_quoted(separator)} {one})*"
        return self.rule(found if must else f"({found})?")


_Write = Callable[[_Rules, Mapping[str, Any], str, int], str]
_FLAGS = ("at_least_one", "stop_after_first")
# type -> how it is written, its needed fields, its optional ones
FORMATS: Mapping[str, tuple[_Write, Sequence[str], Sequence[str]]] = {
    "const_string": (_Rules.const_string, ("value",), ()),
    "json_schema": (_Rules.json_schema, ("json_schema",), ("style",)),
    "regex": (_Rules.regex, ("pattern",), ()),
    "grammar": (_Rules.grammar, ("grammar",), ()),
    "any_text": (_Rules.any_text, (), ("excludes",)),
    "sequence": (_Rules.sequence, ("elements",), ()),
    "or": (_Rules.either, ("elements",), ()),
    "tag": (_Rules.tag, ("begin", "content", "end"), ()),
    "triggered_tags": (_Rules.triggered_tags, ("triggers", "tags"), (*_FLAGS, "excludes")),
    "tags_with_separator": (_Rules.tags_with_separator, ("tags", "separator"), _FLAGS),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "any_text"


def without(texts: Sequence[str]) -> str:
    """A terminal of Lark: any text that contains none of these."""
    if not texts:
        return f"/{_TEXT}/"
    return f"/{_TEXT}/ & ~/{_TEXT}({'|'.join(map(_pattern, texts))}){_TEXT}/"


def _string(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{where}: expected a text")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: expected a list that is not empty")
    return value


def _strings(value: Any, where: str, *, empty: bool = False) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list of texts")
    return [_string(item, where, empty=empty) for item in value]


def _flag(fields: Mapping[str, Any], name: str, where: str) -> bool:
    if not isinstance(fields.get(name, False), bool):
        raise ValueError(f"{where}.{name}: expected a boolean")
    return bool(fields.get(name, False))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """A pattern between slashes."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern) + "/"


def _pattern(text: str) -> str:
    """A pattern of exactly this text, between slashes."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
