"""Chat templates: Jinja code from a checkpoint, which runs in a sandbox with a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmkit.errors import CheckpointError, RequestError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 16 << 20
MAX_RENDER_SECONDS = 5.0
MAX_RENDER_STEPS = 1 << 20  # numbers drawn from `range` and elements made by `*` in one rendering
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A model whose template has no such switch has one way to answer, and neither value changes it.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class _TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` in a template. Its message is meant for the author of the messages."""


class _OverBudget(jinja2.TemplateError):
    """A rendering that grows or takes too long."""


@dataclass
class _Budget:
    deadline: float
    steps: int = MAX_RENDER_STEPS
    chars: int = MAX_RENDERED_CHARS

    def spend(self, *, steps: int = 0, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0 or time.monotonic() > self.deadline:
            raise _OverBudget


_budget: ContextVar[_Budget] = ContextVar("_budget")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without access to Python's internals, and with limits on `range`, `*` and time.

    Every call, attribute access, item access and piece of output checks the clock. Two cases are not covered: a
    template that loops over its data without any of these, and one that builds a single huge value with a filter or
    `~`. Templates come with the checkpoint, which the operator chose; no request can bring one.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _tojson
        self.globals.pop("lipsum")
        self.globals |= {"range": _range, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            size = next((len(x) for x in (left, right) if isinstance(x, str | list | tuple)), 0)
            times = next((x for x in (left, right) if isinstance(x, int)), 0)
            _budget.get().spend(steps=size * max(times, 0))
        elif operator == "**" and (abs(left) > 1 << 16 or abs(right) > 16):
            raise _OverBudget
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.get().spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _budget.get().spend()
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        return super().call(__context, __obj, *args, **kwargs)


def _range(*args: int) -> range:
    numbers = range(*args)
    _budget.get().spend(steps=len(numbers))
    return numbers


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:256])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """`tojson` as transformers defines it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


# Errors that a template may raise on messages for which it was not written.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """A checkpoint's Jinja chat template. `parameters` are the variables a request may set."""

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        """Raises CheckpointError if `source` does not compile."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(f"chat template: {len(source)} characters, limit {MAX_TEMPLATE_CHARS}")
        environment = _Sandbox()
        self._named = dict(named_tokens or {})
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"chat template: does not compile: {error}") from None
        reserved = {"messages", "add_generation_prompt", "tools", "documents", *NAMED_TOKENS, *environment.globals}
        self.parameters = frozenset(names - reserved)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text. Raises RequestError if the template refuses the messages.

        A variable that the template does not have is refused, unless its value asks for nothing.
        """
        variables = {name: value for name, value in (variables or {}).items()
                     if name in self.parameters or not (value is None or name in THINKING_SWITCHES)}  # fmt: skip
        if unknown := sorted(variables.keys() - self.parameters):
            known = ", ".join(sorted(self.parameters)) or "none"
            message = f"{unknown[0][:64]!r} is not a variable of this model's chat template (it has: {known})"
            raise RequestError("unknown_parameter", message, "chat_template_kwargs")
        arguments = {**self._named, **variables, "messages": messages}
        budget = _Budget(time.monotonic() + MAX_RENDER_SECONDS)
        token = _budget.set(budget)
        parts = []
        try:
            for part in self._template.generate(arguments, add_generation_prompt=add_generation_prompt):
                budget.spend(chars=len(part))
                parts.append(part)
        except _TemplateRefusal as error:
            raise RequestError("invalid_request", f"chat template: {str(error)[:500]}", "messages") from None
        except (_OverBudget, MemoryError, RecursionError):
            raise RequestError("invalid_request", "chat template: rendering takes too long", "messages") from None
        except _RENDER_ERRORS:
            message = "the model's chat template does not accept these messages"
            raise RequestError("invalid_request", message, "messages") from None
        finally:
            _budget.reset(token)
        return "".join(parts)
