"""What torch computes between kernels is repeated on new values; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmkit.config import EngineConfig
from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.workspace import Workspace, empty
from lmkit.kernels.ops import Norm
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.runners.recording import NotCapturableError, recording
from tests.flexible import tiny
from tests.models.test_engine_tokens import greedy

SIZES: dict[str, Any] = {"block_size": 8, "max_batch_size": 2, "max_step_tokens": 16, "max_model_len": 64}


def captured(compute: Callable[[Tensor], Any], x: Tensor, workspace: Workspace) -> tuple[threads.Program, Any]:
    with torch.inference_mode(), workspace.active(), threads.capturing() as program, recording(workspace):
        return program, compute(x)


def in_place(x: Tensor) -> Tensor:
    y = torch.zeros(4, 6)
    y += x
    y[1:3].mul_(2)
    return y


COMPUTES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + 1,
    "of itself": lambda x: x * x + x,
    "half": lambda x: x.half(),
    "columns": lambda x: x[:, 1:].contiguous(),
    "turned": lambda x: x.T.relu(),
    "rows": lambda x: x[torch.tensor([1, 0])],
    "in place": in_place,
    "two": lambda x: x.topk(2),
    "joined": lambda x: torch.cat([x, -x], -1),
    "linear": lambda x: nn.functional.linear(x, torch.ones(3, 6), torch.ones(3)),
    "norm": lambda x: nn.functional.layer_norm(x, (6,)),
    "reshaped": lambda x: x.T.reshape(-1, 3),
    "nothing": lambda x: x[:0] + 1,
    "scaled": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_an_operation_is_repeated_on_new_values(name: str) -> None:
    compute, x = COMPUTES[name], torch.randn(4, 6)
    program, found = captured(compute, x, Workspace(1 << 20))
    first = torch.utils._pytree.tree_leaves(found)
    for _ in range(2):
        x.copy_(torch.randn(4, 6))
        with torch.inference_mode():
            program.launch()
            want = torch.utils._pytree.tree_leaves(compute(x))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(first, want, strict=True))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.rand(3) + x[0, :3],
        lambda x: nn.functional.dropout(x),
        lambda x: range(x.sum().int()),
    ],
)
def test_what_reads_values_or_draws_is_refused(compute: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NotCapturableError):
        captured(compute, torch.ones(4, 6), Workspace(1 << 20))


def test_results_share_the_memory_of_steps_with_kernels() -> None:
    """A piece is taken anew once nothing in the module holds it, and launches still find what they read."""
    workspace = Workspace(4096)  # room for a few of the tensors at a time
    norm, weight = ops.rms_norm.select("cpu"), torch.ones(32)

    def compute(x: Tensor) -> Tensor:
        for _ in range(40):
            y = empty(2, 32).copy_(x)
            x = norm(y, Norm(weight, 1e-6)) * 3 + x
        return x

    x = torch.randn(2, 32)
    program, found = captured(compute, x, workspace)
    assert not program.kept
    x.copy_(torch.randn(2, 32))
    with torch.inference_mode():
        program.launch()
        assert torch.equal(found, compute(x))


def engine_of(folder: Path) -> Engine:
    return Engine.of(load_model(folder, model_impl="flexible"), EngineConfig(**SIZES))


def test_nothing_is_launched_once_a_step_was_wrong(tmp_path: Path) -> None:
    """The step that came last is remembered beside the others."""
    tiny.make(tmp_path, "stablelm")
    engine = engine_of(tmp_path)
    want = greedy(engine, [[5, 6, 7]], 12)
    captured = engine.runner._captured
    assert captured._latest is not None
    inputs = captured._latest[0]
    captured._give_up("a step was wrong")
    assert captured(inputs) is None
    assert greedy(engine, [[5, 6, 7]], 12) == want
    engine.close()


@pytest.mark.parametrize("name", ["stablelm", "gpt2", "olmoe", "jamba", "bloom"])
def test_which_architectures_have_captured_steps(tmp_path: Path, name: str) -> None:
    """Those whose sequences are computed together."""
    tiny.make(tmp_path, name)
    engine = engine_of(tmp_path)
    prompts = [[5, 6, 7, 8], [9, 10]]
    answers = [greedy(engine, prompts, 12) for _ in range(2)]
    steps = engine.runner._captured._captured.values()
    engine.close()
    assert answers[0] == answers[1]
    assert any(step is not None and step.proven for step in steps) == (name in tiny.PAGED)


def test_a_value_of_a_step_that_a_module_takes_for_a_constant_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps then stay as they are, and so do their tokens."""
    tiny.make(tmp_path, "stablelm")
    engine = engine_of(tmp_path)
    want = greedy(engine, [[5, 6, 7]], 12)
    engine.close()
    calls, plain = iter(range(10**6)), FlexibleDecoder.logits
    monkeypatch.setattr(FlexibleDecoder, "logits", lambda *args: plain(*args) * (1 + next(calls) / 1000))  # order stays
    engine = engine_of(tmp_path)
    assert greedy(engine, [[5, 6, 7]], 12) == want
    assert not engine.runner._captured._is_capturable
    assert not engine.runner._captured._captured
    engine.close()
