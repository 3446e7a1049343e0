"""`refine` lowers the divergence of a whole model, changes no code, and goes on after a kill as if there were none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import CheckpointError, ConfigError
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.refine import tuning
from lmkit.quant.refine.parameters import TunedLayer, no_changes
from lmkit.quant.run import prepare
from tests.quant.helpers import RTN, recipe, tiny_checkpoint
from tests.quant.killed import child, digest

REFINE = {"step": "refine", "epochs": 6, "batch": 2, "rate": 0.01}
TEXT = {"num_samples": 6, "seq_len": 48}


def refining(**sections: Any) -> Any:
    return recipe(RTN, REFINE, rounder=None, **({"calibration": TEXT} | sections))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", pytest.param("qwen3-moe", marks=pytest.mark.exhaustive)])
def test_it_lowers_the_divergence_and_changes_no_code(tmp_path: Path, family: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", family)
    text = TEXT | ({"num_samples": 24} if family == "qwen3-moe" else {})  # each expert sees a part
    found = prepare(source, refining(calibration=text)).run(tmp_path / "refined").refined
    assert found is not None
    assert found.kl < 0.98 * found.kl_before
    assert found.held_out_tokens == 48
    prepare(source, recipe(calibration=text)).run(tmp_path / "plain")
    refined, plain = (ModelSource(tmp_path / name).layer_weights(1) for name in ("refined", "plain"))
    changed = set()
    for role, weight in plain.items():
        other = refined[role]
        if isinstance(weight, QTensor):
            assert isinstance(other, QTensor)
            assert torch.equal(weight.codes, other.codes)
            assert torch.equal(weight.zeros, other.zeros)
            changed |= {"scales"} if not torch.equal(weight.scales, other.scales) else set()
        elif not torch.equal(weight, other):  # type: ignore[arg-type]
            changed.add("bias" if role.endswith(".bias") else "norm" if "norm" in role else role)
    assert changed == {"scales", "norm"} | ({"bias"} if family == "qwen2" else set())


def test_gradients_are_those_of_the_changes(tmp_path: Path) -> None:
    source = ModelSource(tiny_checkpoint(tmp_path / "source", "qwen2"))
    prepare(source.reader.path, recipe(calibration=TEXT)).run(tmp_path / "out")
    weights = ModelSource(tmp_path / "out").layer_weights(0, torch.float32)
    changes = no_changes(weights)
    wanted = {role: torch.randn(change.shape) for role, change in changes.items()}

    def loss(step: float) -> float:
        changed = {role: step * wanted[role] for role in changes}
        leaves = TunedLayer(weights, changed, lambda role, vector: vector).leaves()
        return sum(float(leaves[role].detach().double().pow(3).sum()) for role in changes)

    layer = TunedLayer(weights, changes, lambda role, vector: vector)
    leaves = layer.leaves()
    sum(leaves[role].pow(3).sum() for role in changes).backward()  # type: ignore[union-attr]
    slope = sum(float((found * wanted[role]).sum()) for role, found in layer.gradients(leaves).items())
    assert (loss(0.01) - loss(-0.01)) / 0.02 == pytest.approx(slope, rel=0.02)  # scales are float16


def test_what_does_not_help_on_held_out_rows_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    monkeypatch.setattr(tuning.Tuning, "_step", lambda *arguments: None)
    found = prepare(source, refining()).run(tmp_path / "refined").refined
    assert found is not None
    assert found.fallback == "tuning found nothing better for the held-out rows"
    prepare(source, recipe(calibration=TEXT)).run(tmp_path / "plain")
    assert weights_of(tmp_path / "refined") == weights_of(tmp_path / "plain")


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_small_batches_of_tokens_add_up(tmp_path: Path, family: str) -> None:
    """Also where attention reads the cache, which has gradients, too."""
    source = tiny_checkpoint(tmp_path / "source", family)
    quantizer = prepare(source, refining())
    whole = quantizer.run(tmp_path / "whole").refined
    quantizer.budget = quantizer.budget.__class__(**(vars(quantizer.budget) | {"batch_tokens": 48}))
    parts = quantizer.run(tmp_path / "parts").refined
    assert whole is not None
    assert parts is not None
    assert parts.kl == pytest.approx(whole.kl, rel=0.02)


def killed_at(quantizer: Any, out: Path, step: int) -> int:
    """Run in a child. SIGKILL ends it before a step of the tuning."""

    def progress(what: str, done: int, total: int) -> None:
        if what == "refine" and done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return child(lambda: quantizer.run(out, progress=progress) and None)


def test_killed_runs_go_on_from_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SNAPSHOT_SECONDS", 0.0)
    quantizer, out = prepare(tiny_checkpoint(tmp_path / "source"), refining()), tmp_path / "out"
    run: Callable[[Path], int] = lambda path: child(lambda: quantizer.run(path) and None)  # noqa: E731
    assert run(tmp_path / "whole") == 0
    for step in (0, 5, 17):
        assert os.WTERMSIG(killed_at(quantizer, out, step)) == signal.SIGKILL
        kept = sorted(path.name for path in WorkFolder.beside(out).path.glob("refine-*"))
        assert kept == ([f"refine-{step:06d}.safetensors"] if step else [])
    file = WorkFolder.beside(out).path / "refine-000017.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    with pytest.raises(CheckpointError, match=r"refine-000017.safetensors: its bytes have changed .*--restart"):
        quantizer.run(out)
    file.write_bytes(data)
    assert run(out) == 0
    assert digest(out) == digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("steps", "sections", "reason"),
    [
        ([REFINE, RTN], {}, "`steps` are .* then refine"),
        ([RTN, REFINE | {"epochs": 0}], {}, "epochs"),
        ([RTN, REFINE], {"calibration": {"dataset": "none"}}, "refine needs text"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(steps: list[Any], sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        recipe(*steps, rounder=None, **sections)


def test_the_estimate_has_its_time_and_memory(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    plain, tuned = prepare(source, recipe()), prepare(source, refining())
    assert tuned.plan.seconds["refine"] > 0
    assert "refine" not in plain.plan.seconds
    assert tuned.budget.memory_bytes > plain.budget.memory_bytes
    assert tuned.budget.disk_bytes > plain.budget.disk_bytes
