"""The layers of each stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmkit.errors import UnsupportedError
from lmkit.models.resolved import resolved
from lmkit.models.spec import ModelSpec
from lmkit.models.stage import Stage


@pytest.fixture(scope="module")
def spec(demo_model: Path) -> ModelSpec:
    with resolved(demo_model) as model:
        return model.spec


@pytest.mark.parametrize("count", range(1, 9))
def test_stages_hold_every_layer_once_in_order(spec: ModelSpec, count: int) -> None:
    parts = Stage(0, count).cut(spec)
    assert [layer for part in parts for layer in part] == list(range(8))
    assert len(parts) == count
    assert all(parts)


def test_the_first_stage_has_fewer_layers_for_the_head(spec: ModelSpec) -> None:
    assert [len(part) for part in Stage(0, 2).cut(replace(spec, vocab_size=1))] == [4, 4]
    large = replace(spec, vocab_size=4 * spec.layers[0].active_weights // spec.hidden_size)
    assert [len(part) for part in Stage(0, 2).cut(large)] == [2, 6]


def test_more_stages_than_layers_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError, match="pp=9: the model has 8 layers, and a stage needs one"):
        Stage(3, 9).layers(spec)


def test_a_stage_plans_the_weights_of_the_largest(demo_model: Path) -> None:
    with resolved(demo_model) as whole, resolved(demo_model, stage=Stage(0, 2)) as half:
        assert whole.weight_bytes() / 2 < half.weight_bytes() < 0.7 * whole.weight_bytes()
