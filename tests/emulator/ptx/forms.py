"""Instructions that are one expression of C++, each form as PTX spells it. What matches no form is not known.

A row is (opcodes, type of the result, expression). `opcodes` is a regular expression, in which the group `t` is the
type of operands, and of the result where none is given. {a} is the first operand behind the result, {a:u32} the same
as another type, {a:text} as it is written; {R} and {T} are C++'s names of the types. With the group `ftz` operands and
results that are subnormal become zeros. Functions stand in ptx.h.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.emulator.ptx.operands import TYPES, Operands
from tests.emulator.ptx.syntax import Instruction

FTZ = r"(?P<ftz>\.ftz)?"
INTEGER, FLOAT, SIZED = "(?P<t>[su](16|32|64))", "(?P<t>f32|f64)", "(?P<t>b(16|32|64))"
PAIR = "(?P<t>f16x2|bf16x2)"
COMPARED = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
# Unordered comparisons are true for NaN: the opposite, negated.
OPPOSITE = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}

FORMS: tuple[tuple[str, str, str], ...] = (
    (f"add\\.{INTEGER}", "", "{a} + {b}"),
    (f"sub\\.{INTEGER}", "", "{a} - {b}"),
    ("mul\\.lo\\." + INTEGER, "", "static_cast<u64>({a}) * static_cast<u64>({b})"),
    ("mad\\.lo\\." + INTEGER, "", "static_cast<u64>({a}) * static_cast<u64>({b}) + static_cast<u64>({c})"),
    *(
        (rf"mul\.wide\.(?P<t>{k}{n})", f"{k}{2 * n}", "static_cast<{R}>({a}) * static_cast<{R}>({b})")
        for k in "su"
        for n in (16, 32)
    ),
    *(
        (
            rf"mad\.wide\.(?P<t>{k}{n})",
            f"{k}{2 * n}",
            f"static_cast<{{R}}>({{a}}) * static_cast<{{R}}>({{b}}) + {{c:{k}{2 * n}}}",
        )
        for k in "su"
        for n in (16, 32)
    ),
    ("mul\\.hi\\.(?P<t>s(16|32|64))", "", "static_cast<__int128>({a}) * {b} >> 8 * sizeof({T})"),
    ("mul\\.hi\\.(?P<t>u(16|32|64))", "", "static_cast<unsigned __int128>({a}) * {b} >> 8 * sizeof({T})"),
    (f"div\\.{INTEGER}", "", "{a} / not_zero({b}, {line})"),
    (f"rem\\.{INTEGER}", "", "{a} % not_zero({b}, {line})"),
    (f"add(\\.rn)?{FTZ}\\.{FLOAT}", "", "{a} + {b}"),
    (f"sub(\\.rn)?{FTZ}\\.{FLOAT}", "", "{a} - {b}"),
    (f"mul(\\.rn)?{FTZ}\\.{FLOAT}", "", "{a} * {b}"),
    (f"fma\\.rn{FTZ}\\.{FLOAT}", "", "std::fma({a}, {b}, {c})"),
    (f"fma\\.rm{FTZ}\\.(?P<t>f32)", "", "fma_down({a}, {b}, {c})"),
    (f"add\\.rz{FTZ}\\.(?P<t>f32)", "", "add_to_zero({a}, {b})"),
    (f"div\\.(rn|approx|full){FTZ}\\.{FLOAT}", "", "{a} / {b}"),
    (f"rcp\\.(rn|approx){FTZ}\\.{FLOAT}", "", "1 / {a}"),
    (f"sqrt\\.(rn|approx){FTZ}\\.{FLOAT}", "", "std::sqrt({a})"),
    (f"rsqrt\\.approx{FTZ}\\.{FLOAT}", "", "1 / std::sqrt({a})"),
    (f"ex2\\.approx{FTZ}\\.(?P<t>f32)", "", "exp2f({a})"),
    (f"lg2\\.approx{FTZ}\\.(?P<t>f32)", "", "log2f({a})"),
    (f"abs{FTZ}\\.{FLOAT}", "", "std::fabs({a})"),
    ("abs\\.(?P<t>s(16|32|64))", "", "{a} < 0 ? 0 - {a} : {a}"),
    (f"neg{FTZ}\\.{FLOAT}", "", "-{a}"),
    ("neg\\.(?P<t>s(16|32|64))", "", "0 - {a}"),
    (f"copysign\\.{FLOAT}", "", "std::copysign({b}, {a})"),
    (f"min{FTZ}\\.{FLOAT}", "", "std::fmin({a}, {b})"),
    (f"max{FTZ}\\.{FLOAT}", "", "std::fmax({a}, {b})"),
    (f"min\\.{INTEGER}", "", "{a} < {b} ? {a} : {b}"),
    (f"max\\.{INTEGER}", "", "{a} > {b} ? {a} : {b}"),
    ("and\\.(?P<t>pred|b16|b32|b64)", "", "{a} & {b}"),
    ("or\\.(?P<t>pred|b16|b32|b64)", "", "{a} | {b}"),
    ("xor\\.(?P<t>pred|b16|b32|b64)", "", "{a} ^ {b}"),
    (f"not\\.{SIZED}", "", "~{a}"),
    ("not\\.(?P<t>pred)", "", "!{a}"),
    (f"shl\\.{SIZED}", "", "shift_left({a}, {b:u32})"),
    ("shr\\.(?P<t>[sub](16|32|64))", "", "shift_right({a}, {b:u32})"),
    ("shf\\.l\\.wrap\\.(?P<t>b32)", "", "funnel_left({a}, {b}, {c:u32} & 31)"),
    ("shf\\.r\\.wrap\\.(?P<t>b32)", "", "funnel_right({a}, {b}, {c:u32} & 31)"),
    ("lop3\\.(?P<t>b32)", "", "lop3<{e:text}>({a}, {b}, {c})"),
    ("prmt\\.(?P<t>b32)", "", "prmt({a}, {b}, {c})"),
    ("bfi\\.(?P<t>b32|b64)", "", "insert_bits({a}, {b}, {c:u32}, {e:u32})"),
    ("bfe\\.(?P<t>u32|u64)", "", "extract_bits({a}, {b:u32}, {c:u32})"),
    ("popc\\.(?P<t>b32|b64)", "u32", "__builtin_popcountll({a})"),
    ("brev\\.(?P<t>b32)", "", "reverse_bits({a})"),
    ("clz\\.(?P<t>b32)", "u32", "{a} ? __builtin_clz({a}) : 32"),
    ("bfind\\.shiftamt\\.(?P<t>u32)", "", "{a} ? __builtin_clz({a}) : ~0u"),
    ("selp\\.(?P<t>[subf](16|32|64))", "", "{c:pred} ? {a} : {b}"),
    *((rf"setp\.{c}\.(?P<t>[sub](16|32|64))", "pred", f"{{a}} {sign} {{b}}") for c, sign in COMPARED.items()),
    *((rf"setp\.{c}{FTZ}\.{FLOAT}", "pred", f"{{a}} {COMPARED[c]} {{b}}") for c in ("eq", "lt", "le", "gt", "ge")),
    *((rf"setp\.{c}{FTZ}\.{FLOAT}", "pred", f"!({{a}} {sign} {{b}})") for c, sign in OPPOSITE.items()),
    (rf"setp\.ne{FTZ}\.{FLOAT}", "pred", "{a} < {b} || {a} > {b}"),
    (rf"setp\.equ{FTZ}\.{FLOAT}", "pred", "!({a} < {b} || {a} > {b})"),
    (rf"setp\.nan{FTZ}\.{FLOAT}", "pred", "{a} != {a} || {b} != {b}"),
    (rf"setp\.num{FTZ}\.{FLOAT}", "pred", "{a} == {a} && {b} == {b}"),
    # pairs of 16-bit numbers
    (f"(?P<o>add|sub|mul)(\\.rn)?\\.{PAIR}", "", "{H}::{o}({a}, {b})"),
    (f"fma\\.rn\\.{PAIR}", "", "{H}::fma({a}, {b}, {c})"),
    # conversions
    ("cvt\\.(?P<d>[su](8|16|32|64))\\.(?P<t>[su](8|16|32|64))", "", "static_cast<{R}>({a})"),
    ("cvt\\.rn(\\.ftz)?\\.(?P<d>f32|f64)\\.(?P<t>[su](8|16|32|64))", "", "static_cast<{R}>({a})"),
    (f"cvt\\.rni{FTZ}\\.(?P<d>[su](8|16|32|64))\\.{FLOAT}", "", "to_integer<{R}>(std::nearbyint({a}))"),
    (f"cvt\\.rzi{FTZ}\\.(?P<d>[su](8|16|32|64))\\.{FLOAT}", "", "to_integer<{R}>(std::trunc({a}))"),
    (f"cvt\\.rmi{FTZ}\\.(?P<d>[su](8|16|32|64))\\.{FLOAT}", "", "to_integer<{R}>(std::floor({a}))"),
    (f"cvt\\.rpi{FTZ}\\.(?P<d>[su](8|16|32|64))\\.{FLOAT}", "", "to_integer<{R}>(std::ceil({a}))"),
    ("cvt\\.rpi\\.(?P<d>f32|f64)\\.(?P<t>f32|f64)", "", "std::ceil({a})"),
    ("cvt\\.rmi\\.(?P<d>f32|f64)\\.(?P<t>f32|f64)", "", "std::floor({a})"),
    (f"cvt{FTZ}\\.(?P<d>f64)\\.(?P<t>f32)", "", "static_cast<double>({a})"),
    (f"cvt\\.rn{FTZ}\\.(?P<d>f32)\\.(?P<t>f64)", "", "static_cast<float>({a})"),
    (f"cvt{FTZ}\\.sat\\.(?P<d>f32)\\.(?P<t>f32)", "", "saturate({a})"),
    ("cvt\\.(?P<d>f32)\\.(?P<t>f16)", "", "F16::to_float({a})"),
    ("cvt\\.(?P<d>f32)\\.(?P<t>bf16)", "", "BF16::to_float({a})"),
    ("cvt\\.rn\\.(?P<d>f16|bf16)\\.(?P<t>f32)", "", "{H}::from_float({a})"),
    ("cvt\\.rn\\.(?P<d>f16x2|bf16x2)\\.(?P<t>f32)", "", "{H}::pack({b}, {a})"),  # the first one is the upper half
)
_COMPILED = [(re.compile(pattern), result, expression) for pattern, result, expression in FORMS]


@dataclass(frozen=True)
class _Value:
    """An operand in an expression."""

    operands: Operands
    operand: str
    type: str
    flushed: bool

    def __format__(self, spec: str) -> str:
        if spec == "text":
            return self.operand
        value = self.operands.value(self.operand, spec or self.type)
        return f"flush({value})" if self.flushed else value


def expression(instruction: Instruction, operands: Operands) -> str | None:
    """The C++ of an instruction that FORMS has, or None."""
    for pattern, result, text in _COMPILED:
        found = pattern.fullmatch(instruction.opcode)
        if found is None:
            continue
        groups = found.groupdict()
        type_ = groups["t"]
        result = result or groups.get("d") or type_
        flushed = bool(groups.get("ftz"))
        values = {
            name: _Value(operands, operand, type_, flushed and type_ == "f32")
            for name, operand in zip("abce", instruction.operands[1:], strict=False)
        }
        half = "BF16" if "bf16" in result + type_ else "F16"
        names = {"R": TYPES[result], "T": TYPES[type_], "H": half, "o": groups.get("o"), "line": instruction.line}
        value = f"static_cast<{TYPES[result]}>({text.format(**values, **names)})"
        value = f"flush({value})" if flushed and result == "f32" else value
        return operands.put(instruction.operands[0], value, result)
    return None
