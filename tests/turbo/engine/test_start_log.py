"""What an engine says when it starts: what a user needs, in that order, on a terminal of 80 columns."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkit import log
from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine

SMALL = {"max_batch_size": 2, "max_step_tokens": 32}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger("lmkit")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


def started(capsys: pytest.CaptureFixture[str], model: Path, level: str = "INFO", **options: int | str) -> list[str]:
    log.setup(level, process="engine")
    engine = Engine(str(model), EngineConfig(**(SMALL | options)))  # type: ignore[arg-type]
    engine.close()
    return capsys.readouterr().err.splitlines()


def test_the_lines_of_a_start(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    lines = started(capsys, demo_model, max_model_len=4096)
    assert max(map(len, lines)) <= 80, "\n".join(lines)
    texts = [line.partition(" I engine: ")[2] for line in lines if " I engine: " in line]
    kinds = [text.partition(":")[0] for text in texts if not text.startswith(("compiling", "packing", "weights"))]
    assert kinds == ["device", "model", "KV cache", "context", "memory"]
    assert "model: Llama, dense weights of 16.00 bits, bfloat16" in texts
    assert "context: 4,096 tokens" in texts


def test_a_context_that_is_cut_is_a_warning(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    lines = started(capsys, demo_model, "WARNING", kv_memory=1 << 20)
    (cut,) = [line for line in lines if "context" in line]
    assert " W engine: the context is cut to 256 of the model's 4,096 tokens" in cut
    assert "a full context needs 16.0 MiB; set kv_memory 16M" in cut


def test_int4_keys_without_calibration_are_a_warning(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    lines = started(capsys, demo_model, "WARNING", kv_dtype="int4")
    (line,) = [line for line in lines if "int4 KV is not calibrated" in line]
    assert f"`lmkit quantize {demo_model} -o OUT --weights none --kv-bits 4 --calibration TEXT`" in line
    assert not started(capsys, demo_model, "WARNING", kv_dtype="int8")


def test_details_for_programs(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    lines = started(capsys, demo_model, "DEBUG", max_model_len=64)
    (plan,) = [line.partition("memory plan in bytes: ")[2] for line in lines if "memory plan in bytes" in line]
    assert json.loads(plan)["kv"] == 2 * 64 * 4096
    assert any(" D engine lmkit.turbo.engine.loading: " in line for line in lines)
