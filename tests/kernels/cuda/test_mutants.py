"""The faults that mutants.py plants, and what it says of them."""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest

from lmkit.kernels.cuda.source import FOLDER
from tests.emulator import mutants
from tests.emulator.mutant_runs import collected
from tests.emulator.mutants import BACKENDS, SWAPS, TESTS, Mutant
from tests.kernels.cuda import toolchain


def test_each_changes_one_line_of_a_file_that_has_tests() -> None:
    found = mutants.mutants()
    assert len({each.name for each in found}) == len(found) > 200
    assert set(Counter(each.kind for each in found)) == set(SWAPS)
    for each in found:
        line = (FOLDER / each.file).read_text().splitlines()[each.line - 1]
        assert line.startswith(each.before)
        assert each.text != each.before
    assert set(TESTS) == {each.file for each in found} | {"kv.cuh", "gemm.cuh"}


def test_those_that_change_nothing_exist() -> None:
    for kind, pattern, why in mutants.EQUIVALENT:
        mine = [each for each in mutants.mutants() if each.kind == kind and pattern.search(each.name)]
        assert mine
        assert all(mutants.equivalent(each.name, each.kind) == why for each in mine)


def test_a_sample_has_every_kind() -> None:
    found = mutants.mutants()
    some = mutants.sampled(found, 60)
    assert len(set(some)) == 60
    assert {each.kind for each in some} == set(SWAPS)
    assert mutants.sampled(found, 30) == some[:30]


def test_the_table_counts_what_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"name": "a", "kind": "fence", "g++": "", "ptx": "a race"},
        {"name": "b", "kind": "fence", "g++": "wrong", "ptx": "wrong"},
        {"name": "c", "kind": "bound", "g++": "", "ptx": ""},
    ]
    monkeypatch.setattr(mutants, "EQUIVALENT", (("bound", re.compile("^c"), "nothing is there"),))
    table = mutants.table(rows)
    assert "| fence | 2 | 0 | 1 | 2 |" in table
    assert "| bound | 1 | 1 | 0 | 0 |" in table
    assert "| all | 3 | 1 | 1 | 2 |" in table


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(toolchain.missing_nvrtc() is not None or shutil.which("g++") is None, reason="needs NVRTC and g++")
def test_operands_of_ptx_are_seen_in_compiled_code_alone() -> None:
    (mutant,) = (each for each in mutants.mutants() if 'asm("cvt.rn.f16x2.f32' in each.before and swaps_halves(each))
    names, says = ("tests/kernels/cuda/test_emulation.py::test_half_types",), list[str]()
    collected(names, lambda tests: says.extend(tests.run(mutant, arch, names) for arch in BACKENDS.values()))
    assert [bool(said) for said in says] == [False, True]
    collected(names, lambda tests: says.append(tests.run(None, BACKENDS["ptx"], names)))
    assert says[-1] == ""


def swaps_halves(mutant: Mutant) -> bool:
    return '"f"(lo), "f"(hi)' in mutant.text
