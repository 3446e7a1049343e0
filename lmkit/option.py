"""What a command line says of a configuration's field. It stands in the field's annotation, and nowhere else."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, get_type_hints


class Option(NamedTuple):
    """`port: Annotated[int, Option("0 takes a free one.")] = 8000` is the option `--port`. Type, limits and default are
    the field's."""

    help: str
    group: str = ""  # the heading in the help of a command
    name: str = ""  # of the option, if not the field's: an option that is repeated is named for one of its values
    is_size: bool = False  # bytes, written as 2G
    is_switch: bool = False  # there is no --no-NAME
    metavar: str | None = None  # what stands for the value in the help
    any_case: bool = False  # of the letters of a choice


@functools.cache  # resolving annotations takes milliseconds, which every command would wait for at each option
def kinds(config: type, *, limits: bool = False) -> dict[str, Any]:
    """The types of a struct's fields, on request with their limits."""
    return get_type_hints(config, include_extras=limits)


@functools.cache
def options_of(config: type) -> dict[str, Option]:
    """The fields of a struct that are options, in their order. Those of its base come first."""
    found = {}
    for field, kind in kinds(config, limits=True).items():
        for note in getattr(kind, "__metadata__", ()):
            if isinstance(note, Option):
                found[field] = note
    return found
