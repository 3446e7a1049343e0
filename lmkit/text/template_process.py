"""Renders chat templates in a `Sandbox`.

A template is code of a checkpoint. Jinja's sandbox keeps it from Python's internals, but not from looping for ever or
from building a huge value. The process's limits do.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 16 << 20


class _TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` in a template. Its message is meant for the author of the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:256])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """`tojson` as transformers defines it: without HTML escapes. What a filter such as `map` gives is a list."""
    value = list(value) if isinstance(value, Generator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Environment(ImmutableSandboxedEnvironment):
    """Templates change nothing that they were given, but may append to lists, as some do: each rendering has copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr == "append") or super().is_safe_attribute(obj, attr, value)


def _sandbox() -> _Environment:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    environment.globals |= {"range": range, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _sandbox()
_DATE = "%d %b %Y"  # of date_string, without which Llama's templates name a day of 2024
# Errors that a template may raise on messages for which it was not written.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def answer(source: str, arguments: Mapping[str, Any] | None) -> tuple[str, Any]:
    """The reply to a request.

    ("variables", names that the template reads and that are not given to every template), if `arguments` is None
    ("invalid", why the template does not compile)
    ("text", the rendering)
    ("refused", the message of `raise_exception`)
    ("failed", what it lacked, or Python's word for it): the template does not accept these messages
    ("limit", ""): the rendering is too long or needs too much memory
    """
    try:
        template = _compiled(source)
        if arguments is None:
            names = meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
            return "variables", sorted(names - _ENVIRONMENT.globals.keys())
    except (*_RENDER_ERRORS, RecursionError, SyntaxError) as error:
        return "invalid", str(error)[:500]
    parts, num_chars = [], 0
    try:
        for part in template.generate({"date_string": _strftime_now(_DATE)} | dict(arguments)):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_RENDERED_CHARS:
                return "limit", ""
    except _TemplateRefusal as error:
        return "refused", str(error)[:500]
    except RecursionError:
        return "limit", ""
    except (jinja2.TemplateNotFound, SecurityError):  # nothing to tell: it reaches for what is inside
        return "failed", ""
    except _RENDER_ERRORS as error:
        return "failed", f": {str(error)[:200]}"
    return "text", "".join(parts)
