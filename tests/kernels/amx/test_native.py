"""The native AMX code of the kernels, in a process with the trap. It gives the bits of the emulation."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import amx_trap

RUNS = {  # files, the tests in them, instructions that must have run
    "tile file": ("tests/kernels/amx/test_tile_file.py", "dot or shapes", ("dot int8", "dot bf16", "zero")),
    "quantized": (
        "tests/kernels/amx/test_quantized.py tests/kernels/test_oracle.py tests/kernels/test_invariance.py",
        "(bits and (1300 or 500)) or (cpu.amx and (w4a8 or w8a8)) or (linear_rows and (w4a8 or w8a8))",
        ("dot int8", "release"),
    ),
    "exact activations": (
        "tests/kernels/amx/test_dense.py tests/kernels/test_oracle.py",
        "rounded or (span and (bfloat16 or 128)) or (cpu.amx and 110x1100 and bfloat16)",
        ("dot bf16", "release"),
    ),
    "attention": (
        "tests/kernels/test_oracle.py",
        "cpu.amx-paged_attention and (bfloat16-80-0 or int8-128-0)",
        ("dot int8", "dot bf16", "release"),
    ),
}


LONG = pytest.param("quantized", marks=pytest.mark.exhaustive)  # its instructions run in the others, too


@pytest.mark.slow
@pytest.mark.parametrize("name", [LONG if name == "quantized" else name for name in RUNS])
def test_under_the_trap(name: str) -> None:
    if (reason := amx_trap.refused()) is not None:
        pytest.skip(reason)
    files, chosen, instructions = RUNS[name]
    options = ("-p", "no:faulthandler", "-p", "no:cacheprovider", "-p", "tests.amx_trap.plugin", "-q", "-k", chosen)
    command = [sys.executable, "-m", "pytest", *options, *files.split()]
    done = subprocess.run(command, env=amx_trap.variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = dict(re.findall(r"(?:AMX: |, )([a-z0-9 ]+) (\d+)", done.stdout))
    assert all(int(counts[kind]) for kind in instructions), counts
