"""A pytest plugin for runs with --ptx: says at the end which kernels ran, and which instructions their PTX has."""

from __future__ import annotations

import pytest

from tests.emulator.ptx.backend import PtxBackend
from tests.emulator.ptx.syntax import Instruction, parse


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    opcodes: set[str] = set()
    for _, name, text in PtxBackend.loaded:
        statements = parse(text).entries[name].statements
        opcodes |= {each.opcode for each in statements if isinstance(each, Instruction)}
    terminalreporter.write_line(f"sources: {' '.join(sorted({source for source, _, _ in PtxBackend.loaded}))}")
    terminalreporter.write_line(f"opcodes: {' '.join(sorted(opcodes))}")
