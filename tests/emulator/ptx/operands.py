"""Operands of PTX as C++: a register is an unsigned integer with its bits, and an instruction reads them as a type."""

from __future__ import annotations

import re

from tests.emulator.ptx.syntax import Entry, Instruction, PtxError, Registers, elements

# In C++. A predicate is a bool.
TYPES = {
    f"{kind}{bits}": f"{name}{bits}" for kind, name in (("b", "u"), ("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)
}
TYPES |= {"f32": "float", "f64": "double", "pred": "bool", "f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}
BITS = {"pred": "bool", "b16": "u16", "b32": "u32", "b64": "u64", "f32": "u32", "f64": "u64"}  # of registers
SHARED = "shared_memory"  # the one variable of shared memory
SPECIAL = {"tid": "thread", "ntid": "block_size", "ctaid": "block", "nctaid": "grid_size"}
_ADDRESS = re.compile(r"\[\s*(%?[$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_NUMBER = re.compile(r"(-?)(0x[0-9a-fA-F]+|\d+)U?")


class Operands:
    """Those of one entry point. `arrays`: sums of wgmma, which stand in arrays of C++."""

    def __init__(self, entry: Entry, constants: dict[str, int]) -> None:
        self._local, self._constants = entry.local, constants
        self._params = {name: (i, type_) for i, (name, type_) in enumerate(entry.params)}
        self.arrays: dict[tuple[str, ...], str] = {}
        self._place: dict[str, str] = {}
        self._types: dict[str, str] = {}  # C++'s, of registers that are declared once, or alike
        for statement in entry.statements:
            if isinstance(statement, Registers):
                for name in statement.names:
                    kept = self._types.setdefault(name, BITS[statement.type])
                    self._types[name] = kept if kept == BITS[statement.type] else ""
        for statement in entry.statements:
            if isinstance(statement, Instruction) and statement.opcode.startswith("wgmma.mma_async"):
                self._array(elements(statement.operands[0]), statement.line)

    def _array(self, names: tuple[str, ...], line: int) -> None:
        if names in self.arrays:
            return
        array = self.arrays[names] = f"tuple{len(self.arrays)}"
        for i, name in enumerate(names):
            if name in self._place:
                raise PtxError(f"line {line}: the register {name} is in two tuples of wgmma")
            self._place[name] = f"{array}[{i}]"

    def declarations(self, registers: Registers) -> str:
        names = [self.register(name) for name in registers.names if name not in self._place]
        return f"{BITS[registers.type]} {', '.join(names)};" if names else ""

    def register(self, name: str) -> str:
        return self._place.get(name) or "r_" + name.lstrip("%")

    def value(self, operand: str, type_: str) -> str:
        """The operand as a C++ value of a PTX type."""
        name = TYPES[type_]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"get<{name}>(0x{operand[2:]}u)"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return f"get<{name}>(0x{operand[2:]}ull)"
        if number := _NUMBER.fullmatch(operand):
            return f"static_cast<{name}>({number[1]}{number[2]}{'ull' if int(number[2], 0) >> 63 else 'll'})"
        first, _, part = operand.lstrip("%").partition(".")
        if operand.startswith("%") and first in SPECIAL:
            return f"static_cast<{name}>(lm::current->{SPECIAL[first]}.{part})"
        if operand == "%globaltimer":
            return "lm::nanoseconds()"
        if operand == "%laneid":
            return f"static_cast<{name}>(LANE)"
        if (symbol := self._symbol(operand)) is not None:
            return f"static_cast<{name}>({symbol})"
        register, kept = self.register(operand), self._types.get(operand, "")
        if kept == name:  # no call: g++ takes most of its time for what a kernel calls
            return register
        if name == "float" and kept == "u32":
            return f"__builtin_bit_cast(float, {register})"
        return f"get<{name}>({register})"

    def _symbol(self, operand: str) -> str | None:
        if operand == SHARED:
            return "SHARED_BASE"
        if self._local is not None and operand == self._local[0]:
            return "reinterpret_cast<u64>(local)"
        if operand in self._constants:
            return f"reinterpret_cast<u64>(constants + {self._constants[operand]})"
        return None

    def put(self, operand: str, value: str, type_: str = "") -> str:
        """A statement that gives the register a C++ value, extended by its own type. `type_`: the value's, in PTX."""
        if operand == "_":
            return f"static_cast<void>({value});"
        register, kept = self.register(operand), self._types.get(operand, "")
        if type_ == "f32" and kept == "u32":
            return f"{register} = __builtin_bit_cast(u32, {value});"
        return f"put({register}, {value});" if type_ in ("", "f32", "f64") else f"{register} = {value};"

    def address(self, operand: str) -> str:
        """What stands in brackets, as u64."""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise PtxError(f"the address {operand} is not known")
        symbol = self._symbol(found[1])
        base = f"static_cast<u64>({self.register(found[1]) if symbol is None else symbol})"
        return f"{base} + {found[2]}ll" if found[2] else base

    def parameter(self, operand: str) -> tuple[str, str]:
        """The C++ name and PTX type of "[name]"."""
        name = operand.strip("[] ")
        if name not in self._params:
            raise PtxError(f"the parameter {operand} is not known")
        index, type_ = self._params[name]
        return f"param{index}", type_
