"""benchmarks.gpu without a GPU: every section runs on emulated kernels, so that none dies of a slip on the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import carried, numerics
from benchmarks.gpu.__main__ import SECTIONS, Section
from benchmarks.gpu.context import Context, Row, read_rows
from benchmarks.gpu.figures import Figure, figures
from benchmarks.gpu.roofline import H200, Peak
from lmkit.kernels.cuda import module
from tests import emulator
from tests.benchmarks import faulty_gpu

pytestmark = pytest.mark.slow
PEERS = ("torch tinygemm", "vLLM Marlin", "TurboMind")  # need a GPU
EXPECTED = {  # rows of each section
    "smoke": {"as by default", "overlap=off", "launcher=off", "prefetch=off", "mixed=off", "argmax=off"},
    "machine": {"GPU", "copy bandwidth", "read bandwidth", "bfloat16 matmul", "kernel in a graph"},
    "build": {"all"},
    "gemm": {"tuning", "int8 inputs", "cuBLAS bfloat16", *PEERS},
    "attention": {"decode", "prefill", "latent prompt"},
    "small": {"rms_norm", "gated_activation", "embedding", "draw"},
    "experts": {"sparse layer", "sparse layer, int8 inputs"},
    "engine": {
        "tiny Llama w4 int8 KV",
        "tiny Llama w4 int8 KV b2: kernels of a step",
        "tiny Llama decode b2",
        "tiny Llama prefill",
    },
    "switches": {
        "as by default: decode b2",
        "mixed=off: arrival",
        "copies=on: decode b2",
        "INT8 head: decode b2",
        "int8 activations: decode b2",
    },
    "transformers": {"tiny Llama decode b2"},
    "quantize": {"demo"},
    "numerics": {"tests"},
}
UNAVAILABLE = (*PEERS, "memcheck", "racecheck")
COMMANDS = (  # of the first hour on a machine that allows ten minutes each
    "smoke,machine", "numerics", "build,gemm,attention,experts", "engine,switches", "transformers,small,quantize",
)  # fmt: skip
FAULT_AFTER = {"machine": 2, "gemm": 2, "attention": 2, "engine": 2, "switches": 2}  # rows before a fault; others: 1
ROOT = Path(command.__file__).parents[2]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install()
    yield tmp_path
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


@pytest.mark.exhaustive
def test_every_section_in_a_rehearsal(out: Path) -> None:
    for section in SECTIONS:
        context = Context(out, "cpu", seconds=1000, name=section.name)
        import_module(f"benchmarks.gpu.{section.module}").run(context)
        rows = read_rows(context.file(section.name))
        assert {row["what"] for row in rows} >= EXPECTED[section.name]
        assert not [row for row in rows if "error" in row and row["what"] not in UNAVAILABLE]
    command.summarize(out, ["machine"], 1.0)
    results = json.loads((out / "results.json").read_text())
    assert results["machine"]["gpu"]["name"].startswith("none")
    assert {row["section"] for row in results["rows"]} == set(EXPECTED)
    kernels = {row["kernel"] for row in results["rows"] if "kernel" in row}
    assert "reference" not in kernels
    assert "Llama-3-8B decode b1" in (out / "table.txt").read_text()
    assert {path.name for path in out.glob("*.png")} >= {"gemm.png", "attention.png"}


def test_carried_modules_are_those_that_the_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "two-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_carried.py", "here = True\n")
        wheel.writestr("msgspec/__init__.py", "raise ImportError\n")
        wheel.writestr("two-1.0.dist-info/METADATA", "")
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert carried.use(tmp_path / "wheels") == ["only_carried"]
    assert import_module("only_carried").here
    assert os.environ["PYTHONPATH"] == os.pathsep.join(("before", sys.path[-1]))
    assert carried.use(tmp_path / "nothing") == []


def _arguments(out: Path) -> Namespace:
    return Namespace(out=out, device="cpu")


def test_a_section_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(tmp_path), "--device", "cpu"])
    command.run_process(Section("nothing", "nothing", 60), _arguments(tmp_path), 60)
    (row,) = read_rows(tmp_path / "nothing.jsonl")
    assert "exit status 1" in row["error"]


def test_a_section_that_takes_too_long_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(tmp_path), "--device", "cpu"])
    monkeypatch.setattr(command, "LEAST_SECONDS", 0.0)
    command.run_process(Section("gemm", "gemm", 60), _arguments(tmp_path), 0.1)
    assert "stopped after" in read_rows(tmp_path / "gemm.jsonl")[-1]["error"]
    monkeypatch.setattr(command, "LEAST_SECONDS", 5.0)
    command.run_process(Section("gemm", "gemm", 60), _arguments(tmp_path), 4.0)
    assert [row["error"] for row in read_rows(tmp_path / "gemm.jsonl")] == ["no time left"]


def test_an_attempt_keeps_what_went_before(tmp_path: Path) -> None:
    context = Context(tmp_path, "cpu", name="mine")
    context.row("first", value=1)
    with context.attempt("second", m=3):
        raise ValueError("of no use")
    first, second = read_rows(context.file("mine"))
    assert first == {"section": "mine", "what": "first", "value": 1}
    assert (second["m"], second["error"]) == (3, "ValueError: of no use")
    assert read_rows(tmp_path / "another.jsonl") == []


def test_rates_that_could_not_be_measured_are_those_of_an_h200(tmp_path: Path) -> None:
    context = Context(tmp_path, "cpu", name="machine")
    assert context.peak() == H200
    context.row("read bandwidth", value=2e12)
    with context.attempt("bfloat16 matmul"):
        raise RuntimeError("no such product")
    with context.file("machine").open("a") as file:
        file.write('{"section": "machine", "wh')
    assert context.peak() == Peak(2e12, H200.flops)


def test_tests_that_take_too_long_leave_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a.py::test_one PASSED [ 1%]\na.py::test_two[b c] FAILED [ 2%]\na.py::test_three \n"

    def slow(command: list[str], *, stdout: Any, **options: Any) -> Any:
        stdout.write(text)
        raise subprocess.TimeoutExpired(command, 7)

    monkeypatch.setattr(subprocess, "run", slow)
    context = Context(tmp_path, "cpu", name="numerics", seconds=7 / 0.93)
    assert numerics._file(context, "tests/a.py") == numerics.Outcome(passed=1, failed=2)
    two, whole, of_file = read_rows(context.file("numerics"))
    assert (two["what"], two["error"]) == ("a.py::test_two[b c]", "failed; see a.log")
    assert (whole["error"], whole["after"], whole["at"]) == ("stopped after 7 s", 2, ["a.py::test_three"])
    assert (of_file["what"], of_file["passed"], of_file["failed"]) == ("tests/a.py", 1, 2)


def test_caches_lie_in_the_folder_and_all_is_packed_after_each_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMKIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", "elsewhere")
    out = tmp_path / "out"
    assert command.caches(out) == {"LMKIT_CACHE_DIR": str(out / "cache")}
    given: list[dict[str, str]] = []

    def ended(argv: list[str], file: Any, seconds: float, env: dict[str, str]) -> int:
        given.append(env)
        folder = Path(env["LMKIT_CACHE_DIR"]) / "gemm"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "H200.json").write_text("{}")
        assert len(given) < 2, "this ends the command"
        return 0

    monkeypatch.setattr(command, "ended", ended)
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(out), "--device", "cpu", "--only", "gemm,small"])
    with pytest.raises(AssertionError):
        command.main()
    with tarfile.open(tmp_path / "out.tar.gz") as file:
        assert "out/cache/gemm/H200.json" in file.getnames()


def test_the_sections_of_each_command_fit_ten_minutes_and_what_travels_40_mib() -> None:
    seconds = {section.name: section.seconds for section in SECTIONS}
    assert sorted(name for names in COMMANDS for name in names.split(",")) == sorted(seconds)
    for names in COMMANDS:
        first = 0.0 if "machine" in names else seconds["machine"]
        assert first + sum(seconds[name] for name in names.split(",")) < 60 * 8.8 - 30, names
    assert all(names in (ROOT / "docs/notes/gpu.md").read_text() for names in COMMANDS)
    if not (ROOT / ".git").exists():
        pytest.skip("which files travel is known in a checkout only")
    packed = subprocess.run(["git", "archive", "--format=tar.gz", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    assert len(packed.stdout) < 40 << 20


def test_no_process_of_a_section_goes_on_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.txt"
    code = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    with log.open("w") as file:
        argv = [sys.executable, "-c", f"{code} print(child.pid, flush=True); child.wait()"]
        assert command.ended(argv, file, 3.0, dict(os.environ)) is None
    status = Path(f"/proc/{int(log.read_text())}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":  # until init has seen its end
        time.sleep(0.01)


FAULTS = [(each.name, kind) for each in SECTIONS for kind in ("raises", "dies")]
USUAL = "machine", "dies"  # takes a few seconds


@pytest.mark.parametrize(
    ("name", "kind"), [each if each == USUAL else pytest.param(*each, marks=pytest.mark.exhaustive) for each in FAULTS]
)
def test_a_fault_in_a_section_loses_nothing_of_what_was_measured(
    out: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = FAULT_AFTER.get(name, 1)
    _rehearse(out, [name], {name: f"{kind}@{after}"}, monkeypatch)
    rows = read_rows(out / "run" / f"{name}.jsonl")
    assert len([row for row in rows if "error" not in row]) >= after - (kind == "raises")
    assert [row for row in rows if "error" in row]
    with tarfile.open(out / "run.tar.gz") as file:
        assert {f"run/{end}" for end in (f"{name}.jsonl", f"{name}.txt", "results.json", "table.txt")} <= set(
            file.getnames()
        )
    assert json.loads((out / "run" / "results.json").read_text())["machine"]["sections"] == [name]


def test_sections_behind_a_fault_go_on_unless_the_engine_does_not_work(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(section: Section, arguments: Namespace, seconds: float) -> int:
        ran.append(section.name)
        return section.name in broken

    monkeypatch.setattr(command, "run_process", failed)
    ran, broken = list[str](), {"machine", "gemm"}
    _rehearse(out, ["smoke", "machine", "gemm", "small"], {}, monkeypatch)
    assert ran == ["smoke", "machine", "gemm", "small"]
    ran, broken = [], {"smoke"}
    _rehearse(out, ["smoke", "machine", "gemm", "small"], {}, monkeypatch)
    assert ran == ["smoke"]


def _rehearse(out: Path, names: list[str], faults: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command for some sections, with faults."""
    monkeypatch.setattr(command, "PROGRAM", "tests.benchmarks.faulty_gpu")
    monkeypatch.setenv(faulty_gpu.VARIABLE, ",".join(":".join(fault) for fault in faults.items()))
    arguments = ["--out", str(out / "run"), "--device", "cpu", "--only", ",".join(names), "--minutes", "60"]
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", *arguments])
    command.main()


def _gemm_row(what: str, shape: str, seconds: float) -> Row:
    return {"section": "gemm", "what": what, "shape": shape, "m": 1, "seconds": seconds, "of_bandwidth": 1 / seconds}


def _named(rows: list[dict[str, Any]], name: str) -> Figure:
    return next(figure for figure in figures(rows) if figure.name == name)


def test_figures_are_of_the_worst_shape() -> None:
    rows = [
        _gemm_row("lmkit cuda float16", shape, 1.1 + i / 10) for i, shape in enumerate(("qkv", "o", "gate+up", "down"))
    ]
    assert _named(rows[:3], "W4A16 GEMM M=1").value is None  # a shape is missing
    rows += [_gemm_row("torch tinygemm", "qkv", 2.2), _gemm_row("torch tinygemm", "o", 1.8)]
    rows += [{"section": "gemm", "what": "TurboMind", "error": "does not load"}]
    figure = _named(rows, "W4A16 GEMM M=1")
    assert figure.value == pytest.approx(1 / 1.4)
    assert not figure.is_reached  # below 0.8
    assert "1.50x torch tinygemm" in figure.note


def test_figures_of_models() -> None:
    def decode(section: str, batch: int, rate: float, storage: str) -> Row:
        what = f"Llama-3-8B decode b{batch}"
        return {"section": section, "what": what, "storage": storage, "tokens_per_s": rate, "bound": 2 * rate}

    rows = [
        decode("engine", 1, 600, "w4"), decode("engine", 1, 200, "bfloat16"), decode("engine", 64, 9000, "w4"),
        decode("transformers", 64, 1000, "-"),
    ]  # fmt: skip
    first = _named(rows, "Llama-3-8B decode b1")
    assert (first.value, first.share, first.is_reached) == (600, 0.5, True)
    assert "TensorRT-LLM" in first.note
    assert _named(rows, "W4A16 over our bfloat16, b1").value == 3
    assert _named(rows, "over transformers, b64").is_reached is False
    assert _named(rows, "Llama-3-8B decode b256").value is None
    tests = {"section": "numerics", "what": "tests", "passed": 3, "failed": 1, "skipped": 2}
    assert _named([tests], "numerics: tests").value == 0.75
