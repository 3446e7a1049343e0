"""A grammar in Lark's syntax as a regular expression."""

from __future__ import annotations

import re

import pytest

from lmkit.text.lark_pattern import pattern_of

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: delete_hunk | update_hunk  // two of three
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF -> context
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""


def matches(grammar: str, text: str) -> bool:
    pattern = pattern_of(grammar)
    assert pattern is not None
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern).replace("(?:)", "")
    return re.fullmatch(python, text) is not None


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a" | "b"', ["a", "b"], ["", "ab"]),
        ('start: X ~ 2..3 Y?\nX: "a"i\nY: /[0-9]\\/+/', ["aA", "AAA1//"], ["a", "aa1"]),
        ('start: A [B] C*\nA: "ü\\n" // c\nB: "("\nC: INT\n%import common (INT, WS)', ["ü\n(1", "ü\n"], ["("]),
        ('?start: one\n    | two\none.2: "1"\ntwo: "2" "2"', ["1", "22"], ["2"]),
        (PATCH, ["*** Begin Patch\n*** Update File: a\n@@ f\n-a\n+b\n*** End Patch\n",
                 "*** Begin Patch\n*** Delete File: a\n*** End Patch"],
         ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Delete File: \n*** End Patch"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    assert all(matches(grammar, text) for text in good)
    assert not any(matches(grammar, text) for text in bad)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"', "start: ((((", 'start: "a" )', "start: other", 'a: "b"', "",
        "%ignore WS\nstart: A",
        'start: "a".."z"', 'start: "a"\nstart: "b"', 'start: ("a" ~ 2', "start: " + "(" * 999, 'start: "\\x"',
        f"start: {'a ' * 8}\n" + "".join(f"{x}: {f'{y} ' * 6}\n" for x, y in ("ab", "bc", "cd", "de")) + 'e: "eeee"',
        'start: "' + "a" * 20_000 + '"',
        "start: a0" + "".join(f"|a{i}" for i in range(999)) + f"\nb: {'x ' * 1000}\nx: /[0-9]/"
        + "".join(f"\na{i}: b" for i in range(999)),
    ],
)  # fmt: skip
def test_what_no_expression_says(grammar: str) -> None:
    assert pattern_of(grammar) is None
