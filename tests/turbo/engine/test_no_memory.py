"""An allocation that finds no memory is one clear line, in a start and in a step."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.no_memory import finds_memory, missing_memory
from lmkit.turbo.request import Request, SamplingParams


def of_torch() -> None:
    torch.empty(1 << 50)


def of_numpy() -> None:
    np.zeros(1 << 55)


def of_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("allocate", [of_torch, of_numpy, of_the_system])
def test_allocations_without_memory(allocate: Callable[[], None]) -> None:
    says = r"the KV cache found no room in memory; lower kv_memory, .*llocate[^\n]*$"
    with pytest.raises(ConfigError, match=says), finds_memory("the KV cache"):
        allocate()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOENT, "gone"), ValueError("no")])
def test_other_errors_stay(error: Exception) -> None:
    assert missing_memory(error) == ""
    with pytest.raises(type(error)), finds_memory("the KV cache"):
        raise error


def test_a_step_without_memory_ends_its_requests_and_says_why(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(str(demo_model), EngineConfig(max_batch_size=2, kv_memory=8 << 20))
    monkeypatch.setattr(engine.runner, "collect", lambda ticket: of_torch())
    engine.add(Request(request_id="a", prompt_ids=[1, 2], params=SamplingParams()))
    outputs = []
    with caplog.at_level(logging.ERROR):
        while engine.has_work():
            outputs += engine.step()
    assert outputs[-1].error == "the engine found no memory while computing this request"
    assert "a step found no memory; use a smaller --kv-memory or --max-batch-size: can't allocate memory" in caplog.text
    assert "Traceback" not in caplog.text
    engine.close()
