"""What a command line says of a configuration's field. It stands in the field's annotation, and nowhere else."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar, get_type_hints

N = TypeVar("N")


class Option(NamedTuple):
    """`port: Annotated[int, Option("0 takes a free one.")] = 8000` is the option `--port`. Type, limits and default are
    the field's."""

    help: str
    group: str = ""  # the heading in the help of a command
    name: str = ""  # of the option, if not the field's: an option that is repeated is named for one of its values
    is_size: bool = False  # bytes, written as 2G
    is_time: bool = False  # seconds, written as 20m
    is_switch: bool = False  # there is no --no-NAME
    metavar: str | None = None  # what stands for the value in the help
    any_case: bool = False  # of the letters of a choice


class Note(NamedTuple):
    """What documents say of a field that stands in files, and is no option."""

    help: str


@functools.cache  # resolving annotations takes milliseconds, which every command would wait for at each option
def kinds(config: type, *, limits: bool = False) -> dict[str, Any]:
    """The types of a struct's fields, on request with their limits."""
    return get_type_hints(config, include_extras=limits)


@functools.cache
def options_of(config: type) -> dict[str, Option]:
    """The fields of a struct that are options, in their order. Those of its base come first."""
    return notes_of(config, Option)


def notes_of(config: type, kind: type[N]) -> dict[str, N]:
    """{field: what its annotation says in a value of `kind`} of the fields that have one."""
    notes = {field: getattr(annotation, "__metadata__", ()) for field, annotation in kinds(config, limits=True).items()}
    return {field: note for field, found in notes.items() for note in found if isinstance(note, kind)}
