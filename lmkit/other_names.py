"""Names that other tools have for what lmkit has. An error that refuses such a name tells ours.

They stand in data/other_names.toml, in tables: for a class by its name, for the options of a command by the command,
for commands in `lmkit`, for fields of an HTTP body in `request`. No torch here.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

FILE = Path(__file__).parent / "data" / "other_names.toml"


@functools.cache  # read at the first mistake: no command waits for it
def _file() -> dict[str, dict[str, str]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def names(table: str) -> Mapping[str, str]:
    """The advice for each name of a table; none for a table that is not there."""
    tables = _file()
    inherited = names(tables["inherits"][table]) if table in tables["inherits"] else {}
    own = {
        name: tables["shared"].get(advice, advice)
        for several, advice in tables.get(table, {}).items()
        for name in several.split(", ")
    }
    return {**inherited, **own}


def missing(value: object, name: str) -> AttributeError:
    """The error of `value.name` where there is no such attribute."""
    kind = type(value)
    ours = [own for own in [*dir(kind), *getattr(kind, "__annotations__", ())] if not own.startswith("_")]
    return AttributeError(f"{kind.__name__} has no {name}{hint(name, ours, kind.__name__)}")


def hint(name: str, ours: Iterable[str] = (), table: str = "") -> str:
    """`: use seed` or `; did you mean seed?` to end an error that refuses `name`, or an empty text."""
    if advice := names(table).get(name):
        return f": {advice}"
    close = get_close_matches(name, list(ours), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def is_misspelt(name: str, ours: Iterable[str]) -> bool:
    """Whether a name is nearly one of ours. In so short a distance nobody has another field."""
    return len(name) < 64 and bool(get_close_matches(name, list(ours), n=1, cutoff=0.9))
