"""The shapes in which a caller may give prompts, and the checks of a call's other arguments."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from lmkit import other_names
from lmkit.api.generation import GenerationConfig
from lmkit.errors import ConfigError, RequestError

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Prompt = str | Message | Sequence[Message]  # a text, a lone message, or a conversation
Tools = Sequence[Mapping[str, Any]]  # as in OpenAI's API: {"type": "function", "function": {...}}
F = TypeVar("F", bound=Callable[..., Any])


class CallOptions(TypedDict, total=False):
    """What a call of a pipeline takes beside its prompts. `Pipeline.__call__` says what each does."""

    do_preprocess: bool
    priority: int
    timeout: float | None
    adapter_name: str
    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    separate_reasoning: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


def prompt_list(prompts: Any) -> tuple[list[str | list[Any]], bool]:
    """The prompts, each a text or a list of messages, and whether the caller gave a single one.

    A list or another iterable whose first item is a message is one conversation. Raises RequestError for other types.
    """
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, "prompts")], True
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise _not_a_prompt("prompts", prompts, ", or a list of prompts")
    items = list(prompts)
    if items and isinstance(items[0], Mapping):
        return [items], True
    return [_prompt(item, f"prompts[{index}]") for index, item in enumerate(items)], False


def _prompt(prompt: Any, where: str) -> str | list[Any]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return [prompt]
    if isinstance(prompt, list | tuple):
        return list(prompt)
    raise _not_a_prompt(where, prompt)


def _not_a_prompt(where: str, given: Any, more: str = "") -> RequestError:
    expected = "expected text, a message {'role': ..., 'content': ...} or a list of messages"
    return RequestError("invalid_request", f"{where}: {expected}{more}; got {_named(given)}", where)


def check_call(priority: Any, timeout: Any, adapter_name: Any) -> None:
    """Raise ConfigError unless these arguments of a call can be used."""
    if not isinstance(adapter_name, str):
        raise ConfigError(f"adapter_name={adapter_name!r}: expected the name of an adapter")
    if type(priority) is not int:
        raise ConfigError(f"priority={priority!r}: expected an integer; lower is sooner")
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < math.inf):
        raise ConfigError(f"timeout={timeout!r}: expected a number of seconds, more than 0")


def id_rows(inputs: Any, encode: Callable[[str], list[int]], least: int, why: str) -> list[list[int]]:
    """Token ids of each text or list of ids. Raises RequestError for other types and for fewer than `least` tokens."""
    one = isinstance(inputs, str) or (isinstance(inputs, Sequence) and bool(inputs) and type(inputs[0]) is int)
    if not isinstance(inputs, Iterable):
        raise RequestError("invalid_request", f"inputs: expected texts or lists of token ids, got {_named(inputs)}")
    rows = []
    for index, item in enumerate([inputs] if one else inputs):
        row = encode(item) if isinstance(item, str) else item
        if not (isinstance(row, list | tuple) and all(type(token) is int for token in row)):
            raise RequestError("invalid_request", f"inputs[{index}]: expected text or token ids, got {_named(item)}")
        if len(row) < least:
            raise RequestError("invalid_request", f"inputs[{index}]: {why}")
        rows.append(list(row))
    return rows


def names_ours(call: F) -> F:
    """Make `call` refuse an unknown keyword with a ConfigError that names ours."""
    known = [*inspect.signature(call).parameters]
    opens = "model" in known  # then further keywords are fields of EngineConfig, which checks them
    if "options" in known and not opens:
        known += CallOptions.__annotations__
    table = "pipeline" if opens else "call"
    shown = call.__qualname__.removesuffix(".__call__").removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: Any, **named: Any) -> Any:
        for name in named.keys() & other_names.names(table).keys() if opens else named.keys() - set(known):
            advice = other_names.hint(name, known, table)
            if name in GenerationConfig.__struct_fields__:
                advice = f": use gen_config=GenerationConfig({name}=...)"
            raise ConfigError(f"{shown} has no argument {name}{advice}")
        return call(*args, **named)

    return checked  # type: ignore[return-value]


def _named(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}" if value is not None else "None"
