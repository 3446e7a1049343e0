"""An entry point of PTX as C++ for the emulator: goto for branches, one statement for an instruction."""

from __future__ import annotations

import itertools

from tests.emulator.ptx.forms import expression
from tests.emulator.ptx.operands import TYPES, Operands
from tests.emulator.ptx.special import statements
from tests.emulator.ptx.syntax import Constant, Instruction, Label, PtxError, Registers, Scope, Statement, Text

_ENDS = "bra", "ret", "exit"


def translate(text: Text, name: str) -> str:
    """C++ with `<name>_apply`, `<name>_arguments`, `<name>_constants` and `<name>_executed`.

    Raises PtxError with the first instruction that is not known, and its line.
    """
    if name not in text.entries:
        raise PtxError(f"there is no entry point {name}, but {', '.join(text.entries)}")
    entry = text.entries[name]
    offsets, initial = _constants(text.constants)
    operands = Operands(entry, offsets)
    counts = block_sizes(entry.statements)
    numbers = itertools.accumulate(map(bool, counts))  # of basic blocks, from 1 on
    body = [
        _statement(each, operands, f"ran[{number - 1}] += {count}; " if count else "")
        for each, count, number in zip(entry.statements, counts, numbers, strict=True)
    ]
    declared = [line for line, each in zip(body, entry.statements, strict=True) if isinstance(each, Registers)]
    rest = [line for line, each in zip(body, entry.statements, strict=True) if not isinstance(each, Registers)]
    if any(isinstance(each, Scope) for each in entry.statements):  # registers of a scope stay in it
        split = next(i for i, each in enumerate(entry.statements) if not isinstance(each, Registers))
        declared, rest = body[:split], body[split:]
    params = [
        f"const {_unsigned(type_)} param{i} = *static_cast<{_unsigned(type_)}*>(args[{i}]);"
        for i, (_, type_) in enumerate(entry.params)
    ]
    arrays = [f"u32 {array}[{len(names)}];" for names, array in operands.arrays.items()]
    local = [] if entry.local is None else [f"alignas(16) u8 local[{entry.local[1]}];"]
    sizes = ", ".join(str(int(type_[1:]) // 8) for _, type_ in entry.params)
    return "\n".join(
        [
            '#include "ptx/ptx.h"',
            f"alignas(16) static const u8 constants[] = {{{initial}}};",
            f"static u64 ran[{max(sum(map(bool, counts)), 1)}];",
            f'extern "C" void {name}_apply(void** args) {{',
            *params,
            *arrays,
            *local,
            *declared,
            *rest,
            "}",
            f'extern "C" int {name}_arguments(int* sizes) {{',
            f"static const int all[] = {{{sizes}}};",
            f"for (int i = 0; sizes && i < {len(params)}; ++i) sizes[i] = all[i];",
            f"return {len(params)}; }}",
            f'extern "C" const void* {name}_constants(u64* bytes) {{ *bytes = sizeof constants; return constants; }}',
            f'extern "C" u64 {name}_executed(u64* each) {{ return executed(ran, each); }}\n',
        ]
    )


def _unsigned(type_: str) -> str:
    return TYPES[f"b{type_[1:]}"]


def _constants(constants: list[Constant]) -> tuple[dict[str, int], str]:
    """(offset of each, all bytes as C++ writes them)"""
    offsets, data = {}, bytearray()
    for each in constants:
        data += bytes(-len(data) % each.align)
        offsets[each.name] = len(data)
        data += each.values
    return offsets, ",".join(map(str, data or b"\0"))


def block_sizes(all_statements: list[Statement]) -> list[int]:
    """For each statement, how many instructions are counted at it: all of a basic block at its first one."""
    counts, first = [0] * len(all_statements), None
    for i, each in enumerate(all_statements):
        if isinstance(each, Label):
            first = None
        elif isinstance(each, Instruction):
            first = i if first is None else first
            counts[first] += 1
            if each.opcode.split(".")[0] in _ENDS:
                first = None
    return counts


def _statement(statement: Statement, operands: Operands, counted: str) -> str:
    match statement:
        case Label(name):
            return f"{name.lstrip('$')}:;"
        case Scope(opens):
            return "{" if opens else "}"
        case Registers():
            return operands.declarations(statement)
        case Instruction():
            return counted + _instruction(statement, operands)


def _instruction(instruction: Instruction, operands: Operands) -> str:
    opcode = instruction.opcode
    try:
        if opcode in ("ret", "exit"):
            code: str | None = "return;"
        elif opcode in ("bra", "bra.uni"):
            code = f"goto {instruction.operands[0].lstrip('$')};"
        else:
            code = expression(instruction, operands) or statements(instruction, operands)
    except PtxError as error:
        raise PtxError(f"line {instruction.line}: {opcode}: {error}") from None
    if code is None:
        raise PtxError(f"line {instruction.line}: the instruction {opcode} is not known")
    if not instruction.guard:
        return f"{{ {code} }}"
    sign, name = instruction.guard[0], instruction.guard.lstrip("!")
    return f"if ({'!' if sign == '!' else ''}{operands.register(name)}) {{ {code} }}"
