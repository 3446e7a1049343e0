"""A pytest plugin for a process with the trap: no test leaves a configuration, and the counts are told at the end."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.amx_trap import KINDS

TRAP = ctypes.CDLL(None)
TRAP.amx_trap_count.restype = ctypes.c_uint64
TRAP.amx_trap_num_configured.restype = ctypes.c_int64


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    assert TRAP.amx_trap_num_configured() == 0, "a task has not released the tiles"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = {kind: TRAP.amx_trap_count(i) for i, kind in enumerate(KINDS)}
    terminalreporter.write_line("AMX: " + ", ".join(f"{kind} {count}" for kind, count in counts.items()))
