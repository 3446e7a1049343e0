"""A hook's process: `python -m lmkit.serve.hooks.worker NAME`. It ends when its standard input does.

    first line out:  {"before": true, "after": false, "timeout": 5.0, ...} or {"error": why it cannot be used}
    then for each line in, ["before" or "after", call], a line out: {"value": what the hook returned} or {"error": ...}

An error names the exception's type and place, but has no message, because that may quote a prompt. What the hook prints
goes to stderr.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from importlib.metadata import entry_points
from typing import Any

import msgspec

GROUP = "lmkit.hooks"  # of entry points
STAGES = ("before", "after")
DEFAULTS = {"timeout": 5.0, "on_failure": "refuse", "sees": "whole", "processes": 4}


def load(name: str) -> Any:
    """The hook `module:object`, or that of an entry point. A class is called without arguments."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        (entry,) = entry_points(group=GROUP, name=name) or (None,)
        found = entry.load() if entry is not None else importlib.import_module(name)
    return found() if inspect.isclass(found) else found


def described(hook: Any) -> dict[str, Any]:
    """The stages that the hook has, and its settings."""
    stages = {stage: callable(getattr(hook, stage, None)) for stage in STAGES}
    return stages | {name: getattr(hook, name, default) for name, default in DEFAULTS.items()}


def place(error: BaseException) -> str:
    """The exception's type and the line of the hook that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    return type(error).__name__ + where


def main() -> None:
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)

        def reply(value: dict[str, Any]) -> None:
            out.write(msgspec.json.encode(value) + b"\n")
            out.flush()

        sys.path.insert(0, os.getcwd())
        try:
            hook = load(sys.argv[1])
            reply(described(hook))
        except Exception as error:  # noqa: BLE001 - code of the operator
            reply({"error": f"{type(error).__name__}: {error}"[:500]})
            return
        for line in sys.stdin.buffer:
            stage, call = msgspec.json.decode(line)
            try:
                reply({"value": getattr(hook, stage)(call)})
            except Exception as error:  # noqa: BLE001 - code of the operator
                reply({"error": place(error)})


if __name__ == "__main__":
    main()
