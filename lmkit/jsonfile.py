"""JSON of a checkpoint, read as untrusted: bounded size, UTF-8, one object, no repeated key, no NaN or Infinity.

transformers 4 writes Infinity as a limit that is none. It is read as transformers 5 writes it:
{"__float__": "Infinity"}.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, TypeVar

from lmkit.errors import CheckpointError
from lmkit.small_files import read

T = TypeVar("T")
UNLIMITED = ("time_step_limit",)  # keys of such limits


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. Raises CheckpointError, which begins with `where`, for anything else."""
    return _of_kind(dict, "object", _parse(data, where), where)


def parse_list(data: bytes, where: str) -> list[Any]:
    """The array in `data`, as `parse_json`."""
    return _of_kind(list, "array", _parse(data, where), where)


def _of_kind(kind: type[T], what: str, value: Any, where: str) -> T:
    if not isinstance(value, kind):
        raise CheckpointError(f"{where}: expected a JSON {what}, got {type(value).__name__}")
    return value


def _parse(data: bytes, where: str) -> Any:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_Constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:  # json.JSONDecodeError, and integers of thousands of digits
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None
    return value


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """The object in the file `path` of at most `limit` bytes."""
    return parse_json(read(path, limit), str(path))


def read_list(path: Path, limit: int) -> list[Any]:
    """The array in the file `path` of at most `limit` bytes."""
    return parse_list(read(path, limit), str(path))


def to_json(value: Any) -> bytes:
    """Indented JSON for files: ASCII, keys in the given order, a final newline."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    for key, item in pairs:
        if key in UNLIMITED and isinstance(item, list):
            value[key] = item = [{"__float__": str(x)} if x == "Infinity" else x for x in item]
        if bad := _not_a_number(item):
            raise ValueError(f"{reprlib.repr(key)}: {bad} is not a JSON number")
    if len(value) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {reprlib.repr(repeated)} is given twice")
    return value


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python's reader accepts."""


def _not_a_number(value: Any) -> _Constant | None:
    """`value`, or an item of this list, if it is a constant. Objects are checked when they are read."""
    if isinstance(value, list):
        return next(filter(None, map(_not_a_number, value)), None)
    return value if isinstance(value, _Constant) else None
