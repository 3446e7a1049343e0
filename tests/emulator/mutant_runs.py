"""Runs the mutants: which of them does each emulator catch?

    python -m tests.emulator.mutant_runs [--sample 40] [--out build/mutants.jsonl]

Of the tests of its file (mutants.TESTS) a mutant runs those that execute its line, the shortest first, on the source
text through g++ and on NVRTC's code, and is caught if one fails. Which lines a test executes is found once, from
compiled code that knows its source. `--sample` takes so many, evenly over files and kinds; all are some hundred. The
file of results is extended: a run that was stopped goes on, with the mutants that have no line yet.

Tests are collected once. Each run of some is a process that is forked from the one that has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from lmkit.kernels.cuda import source
from tests import emulator
from tests.emulator.mutants import BACKENDS, TESTS, Mutant, equivalent, is_read_by_gxx, mutants, sampled, table
from tests.emulator.ptx.backend import PtxBackend
from tests.kernels.cuda import toolchain

Place = list[str | int]  # a file and a line of it

CPU_SECONDS = 400  # of a run: a kernel that loops for ever is caught


class Tests:
    """Tests that pytest has collected. `work` is called with them instead of running them."""

    def __init__(self, work: Callable[[Tests], None]) -> None:
        self._work = work
        self._items: dict[str, list[pytest.Item]] = {}  # by name, with and without parameters

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            for name in {item.nodeid, item.nodeid.partition("[")[0]}:
                self._items.setdefault(name, []).append(item)
        self._work(self)
        return True

    def run(self, mutant: Mutant | None, arch: str | None, names: Iterable[str]) -> str:
        """What tests say about a mutant: "" if all pass. In a process of its own."""
        return _of_child(lambda: self._in_child(mutant, arch, names)[-400:])

    def covered(self, name: str) -> tuple[str, list[Place]]:
        """What a test says without a mutant, and the lines of kernels that it executes."""

        def work() -> str:
            PtxBackend.covered = set()
            says = self._in_child(None, BACKENDS["ptx"], [name])
            return json.dumps([says[-400:], sorted(PtxBackend.covered)])

        says, lines = json.loads(_of_child(work))
        return says, lines

    def _in_child(self, mutant: Mutant | None, arch: str | None, names: Iterable[str]) -> str:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))
        emulator.run_compiled(arch)
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        try:
            if mutant is not None:
                _change_sources(mutant, folder / "csrc")
            return self._failure([item for name in names for item in self._items[name]], arch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _failure(self, items: list[pytest.Item], arch: str | None) -> str:
        """What the first test that fails says."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.option.ptx = arch and f"sm_{arch}"
            for report in runtestprotocol(item, log=False, nextitem=after):
                if report.failed:
                    found = re.search(r"^E  +(.*)", report.longreprtext, re.MULTILINE)
                    return found[1] if found else report.longreprtext
        return ""


def collected(names: Iterable[str], work: Callable[[Tests], None]) -> None:
    """Collect tests, and call `work` with them. Raises SystemExit if there is no such test."""
    code = pytest.main(["-qs", "-n0", "-p", "no:cacheprovider", "--no-header", *names], plugins=[Tests(work)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(int(code))


def _of_child(work: Callable[[], str]) -> str:
    """What `work` returns in a process of its own, or the signal that ended it. Raises AssertionError if it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        code = 1
        try:
            with open(writer, "w") as pipe:
                pipe.write(work())
            code = 0
        finally:  # nothing that the parent does is done here, too
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    assert status == 0, "what a process was to do failed"
    return said


def _change_sources(mutant: Mutant, folder: Path) -> None:
    """From now on this process has sources with a mutant."""
    shutil.copytree(source.FOLDER, folder)
    lines = (folder / mutant.file).read_text().splitlines()
    lines[mutant.line - 1] = mutant.text
    (folder / mutant.file).write_text("\n".join(lines) + "\n")
    source.FOLDER = folder
    source.kernel_source.cache_clear()


class Coverage:
    """Which lines of kernels each test executes, and its seconds. A test is run when that is asked for, and what it
    executes is kept in `path`, by the kernels' sources."""

    def __init__(self, path: Path, tests: Tests) -> None:
        texts = [each.read_text() for each in sorted(source.FOLDER.iterdir())]
        self._tests, self._path = tests, path
        self._key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        kept = json.loads(path.read_text()) if path.exists() else {}
        self._of: dict[str, tuple[float, list[Place]]] = kept.get(self._key, {})

    def tests(self, mutant: Mutant) -> list[str]:
        """Of its file's tests those that execute its line, the shortest first. If none does, as where a line leaves no
        instruction, all."""
        mine = sorted(TESTS[mutant.file], key=lambda test: self._executed(test)[0])
        return [test for test in mine if [mutant.file, mutant.line] in self._executed(test)[1]] or mine

    def _executed(self, test: str) -> tuple[float, list[Place]]:
        """Raises SystemExit if the test fails without a mutant."""
        if test not in self._of:
            begin = time.monotonic()
            says, lines = self._tests.covered(test)
            if says:
                raise SystemExit(f"{test} fails: {says}")
            self._of[test] = time.monotonic() - begin, lines
            self._path.write_text(json.dumps({self._key: self._of}))
        return self._of[test]


def _run_all(tests: Tests, chosen: list[Mutant], path: Path, end: float) -> None:
    """Run the mutants that have no line in the file of results, until it is `end`."""
    coverage = Coverage(path.with_suffix(".coverage.json"), tests)
    done = {row["name"] for row in _rows(path)}
    with path.open("a") as out:
        for mutant in (each for each in chosen if each.name not in done):
            if time.monotonic() > end:
                break
            says, begin = dict.fromkeys(BACKENDS, ""), time.monotonic()
            if not equivalent(mutant.name, mutant.kind):
                names = coverage.tests(mutant)
                for name, arch in BACKENDS.items():
                    if arch or is_read_by_gxx(mutant):
                        says[name] = tests.run(mutant, arch, names)
            row = {"name": mutant.name, "kind": mutant.kind, **says, "seconds": round(time.monotonic() - begin, 1)}
            out.write(json.dumps(row) + "\n")
            out.flush()
            said = "".join(f"    {name}: {what or 'passes'}\n" for name, what in says.items())
            sys.stdout.write(f"{mutant.name}\n{said}")
            sys.stdout.flush()


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="so many; 0: all")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.jsonl"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so long")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    cache = tempfile.TemporaryDirectory(prefix="mutants-")
    os.environ["LMKIT_CACHE_DIR"] = cache.name
    toolchain.missing_nvrtc()  # loads it, for all processes
    PtxBackend.optimized = "-O0"  # a kernel of a mutant runs a few times only
    found = mutants()
    chosen = sampled(found, given.sample) if given.sample else found
    given.out.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(test for each in TESTS.values() for test in each)
    collected(names, lambda tests: _run_all(tests, chosen, given.out, end))
    rows = _rows(given.out)
    sys.stdout.write(f"{len(found)} mutants in all, {len(rows)} have run\n{table(rows)}\n")
    for row in rows:
        if not row["ptx"]:
            why = equivalent(row["name"], row["kind"]) or "a test is missing"
            sys.stdout.write(f"survives: {row['name']}; {why}\n")


if __name__ == "__main__":
    main()
