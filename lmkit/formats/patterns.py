"""Regular expressions for modules in a checkpoint's configuration. They are written here, and read as untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_LENGTH, MAX_REPEATS = 65536, 4


def pattern_problem(pattern: str) -> str | None:
    """The reason why a regular expression of a checkpoint is refused; None if it is accepted.

    A hostile expression can take for ever on a short name. Without a repeated group, and with few repetitions, the time
    is bounded by a small power of the name's length.
    """
    if len(pattern) > MAX_LENGTH:
        return f"the pattern {pattern[:40]!r}... is longer than {MAX_LENGTH} characters"
    plain = re.sub(r"\\.", "x", pattern)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > MAX_REPEATS:
        return f"the pattern {pattern[:80]!r} repeats a group or has more than {MAX_REPEATS} repetitions"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{pattern[:80]!r} is not a regular expression: {error}"
    return None


def names_pattern(modules: Iterable[str]) -> list[str]:
    r"""Regular expressions that match exactly these modules. Modules that differ only in the layer's number share one.

    ["model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj"] -> [r"model\.layers\.(0|7)\.mlp\.up_proj$"]
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    plain = []
    for module in modules:
        if match := re.match(r"(\D*\.)(\d+)(\..*)", module):
            numbers.setdefault((match[1], match[3]), []).append(match[2])
        else:
            plain.append(re.escape(module) + "$")
    return plain + [
        f"{re.escape(before)}({'|'.join(sorted(found, key=int))}){re.escape(after)}$"
        for (before, after), found in numbers.items()
    ]
