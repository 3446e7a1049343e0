"""Section "numerics": the tests of kernels and of the engine on the GPU, then some of them under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.context import Context

ROOT = Path(__file__).parents[2]
OTHERS = (
    "tests/turbo/engine/test_cuda_engine.py",
    "tests/turbo/engine/test_cuda_experts.py",
    "tests/turbo/engine/test_cuda_ranks.py",
    "tests/test_gpu_numerics.py",
)
SANITIZED = ("memcheck", "racecheck")
SANITIZED_TESTS = ("tests/kernels/cuda/test_append.py", "tests/kernels/cuda/test_linear.py")
SANITIZER_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def run(context: Context) -> None:
    """Run each file of tests in a process, several at a time: a test spends most of its time compiling kernels."""
    start = time.perf_counter()
    files = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/kernels/cuda/test_*.py"))]
    files += [name for name in OTHERS if (ROOT / name).exists()]
    if context.rehearsal:
        files = ["tests/benchmarks/test_gpu_roofline.py"]
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        outcomes = list(pool.map(lambda file: _file(context, file), files))
    passed, failed, skipped = (sum(values) for values in zip(*map(_counts, outcomes), strict=True))
    context.row("tests", passed=passed, failed=failed, skipped=skipped, seconds=time.perf_counter() - start)
    tool = None if context.rehearsal else shutil.which("compute-sanitizer")
    for check in SANITIZED:
        if tool is None or context.is_over:
            context.row(check, error="compute-sanitizer is not installed" if tool is None else "no time left")
            continue
        with context.attempt(check):
            command = [tool, "--tool", check, "--error-exitcode", "9", "--target-processes", "all"]
            found = _pytest(context, check, [*SANITIZED_TESTS, "-x"], command, min(SANITIZER_SECONDS, context.left))
            context.row(check, passed=found.passed, failed=found.failed, skipped=found.skipped)


def _counts(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.passed, outcome.failed, outcome.skipped


def _file(context: Context, file: str) -> Outcome:
    """Run one file. A file that cannot be run to its end counts as a failure and gets a row that says why."""
    with context.attempt(file):
        found = _pytest(context, Path(file).stem, [file], [], context.left)
        context.row(file, passed=found.passed, failed=found.failed, skipped=found.skipped)
        return found
    return Outcome(failed=1)


def _pytest(context: Context, what: str, tests: list[str], prefix: list[str], seconds: float) -> Outcome:
    """Run pytest and write a row for each test that failed."""
    report, log = context.out / f"{what}.xml", context.out / f"{what}.log"
    report.unlink(missing_ok=True)
    marks = [] if context.rehearsal else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}", *marks, *tests]
    try:
        with log.open("w") as file:
            done = subprocess.run(
                [*prefix, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
    except subprocess.TimeoutExpired:
        return _so_far(context, what, log.read_text(), seconds)
    if not report.exists():
        raise RuntimeError(f"pytest ended with status {done.returncode}; see {log.name}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if _problem(case) is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    for case in failed:
        problem = _problem(case)
        message = "" if problem is None else str(problem.get("message")).partition("\n")[0][:300]
        context.row(f"{case.get('classname')}::{case.get('name')}", error=message)
    return Outcome(len(cases) - len(failed) - skipped, len(failed), skipped)


def _so_far(context: Context, what: str, log: str, seconds: float) -> Outcome:
    """What pytest -v has said of tests before its time was up, which counts as one more failure."""
    said = re.findall(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", log, re.MULTILINE)
    counts = Counter(result for _, result in said)
    for name, result in said:
        if result in ("FAILED", "ERROR"):
            context.row(name, error=f"{result.lower()}; see {what}.log")
    under_way = re.findall(r"^(\S+::\S+) *$", log, re.MULTILINE)[-1:]
    context.row(what, error=f"stopped after {seconds:.0f} s", after=len(said), at=under_way)
    return Outcome(counts["PASSED"], counts["FAILED"] + counts["ERROR"] + 1, counts["SKIPPED"])


def _problem(case: ElementTree.Element) -> ElementTree.Element | None:
    failure = case.find("failure")
    return case.find("error") if failure is None else failure
