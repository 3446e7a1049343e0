"""Section "numerics": the tests of kernels and of the engine, on the GPU; then some under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.context import Context

ROOT = Path(__file__).parents[2]
TESTS = ("tests/kernels/cuda", "tests/turbo/test_cuda_engine.py", "tests/test_gpu_numerics.py")
SANITIZED = ("memcheck", "racecheck")
SANITIZED_TESTS = ("tests/kernels/cuda/test_append.py", "tests/kernels/cuda/test_linear.py")
SANITIZER_SECONDS = 60


def run(context: Context) -> None:
    tests = [name for name in TESTS if (ROOT / name).exists()]
    if context.rehearsal:
        tests = ["tests/benchmarks/test_gpu_roofline.py"]
    with context.attempt("tests"):
        _pytest(context, "tests", tests, [], 0.9 * context.seconds)
    tool = shutil.which("compute-sanitizer")
    for check in SANITIZED:
        if tool is None or context.is_over:
            context.row(check, error="compute-sanitizer is not installed" if tool is None else "no time left")
            continue
        with context.attempt(check):
            command = [tool, "--tool", check, "--error-exitcode", "9", "--target-processes", "all"]
            _pytest(context, check, [*SANITIZED_TESTS, "-x"], command, SANITIZER_SECONDS)


def _pytest(context: Context, what: str, tests: list[str], prefix: list[str], seconds: float) -> None:
    """A row with the numbers of tests, and one for each that failed."""
    report = context.out / f"{what}.xml"
    marks = [] if context.rehearsal else ["-m", "gpu"]
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "120", f"--junitxml={report}", *marks]
    start = time.perf_counter()
    log = context.out / f"{what}.log"
    with log.open("w") as file:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False,
        )  # fmt: skip
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    for case in failed:
        context.row(f"{case.get('classname')}::{case.get('name')}", error=_first_line(case))
    context.row(
        what, passed=len(cases) - len(failed) - skipped, failed=len(failed), skipped=skipped, exit=done.returncode,
        seconds=time.perf_counter() - start, log=log.name,
    )  # fmt: skip


def _first_line(case: ElementTree.Element) -> str:
    problem = case.find("failure")
    problem = case.find("error") if problem is None else problem
    return "" if problem is None else str(problem.get("message")).partition("\n")[0][:300]
