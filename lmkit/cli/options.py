"""Shared options of several commands, as one parameter that holds them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Maker = Callable[..., Any]


def takes(**makers: Maker) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a command: `makers[name]` makes its parameter `name` from options that the user sees."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in _parameters(command) if p.name not in makers]
        shared = {name: _parameters(maker) for name, maker in makers.items()}

        def run(**given: Any) -> None:
            made = {name: makers[name](**{p.name: given.pop(p.name) for p in ps}) for name, ps in shared.items()}
            command(**given, **made)

        every = [*own, *(p for parameters in shared.values() for p in parameters)]
        run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in every])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameters(function: Maker) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())
