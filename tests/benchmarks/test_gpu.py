"""benchmarks.gpu without a GPU: every section runs on emulated kernels, so that none dies of a slip on the real one."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import carried
from benchmarks.gpu.__main__ import SECTIONS, Section
from benchmarks.gpu.context import Context, Row, read_rows
from benchmarks.gpu.figures import Figure, figures
from lmkit.kernels.cuda import module
from tests import emulator

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
