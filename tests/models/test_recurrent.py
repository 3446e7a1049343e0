"""Models with recurrent states: what they refuse, what the memory plan says, and states that do not depend on cuts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from tests.kernels.cases import geometry
from tests.models import tiny

SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_batch_size": 3, "max_step_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-next")
    tiny.make(path, "qwen3-next")
    return path


def test_a_model_without_attention_has_no_tiers(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3.5-recurrent")
    with pytest.raises(ConfigError, match="leave out kv_host_memory"):
        Engine(str(tmp_path), EngineConfig(**SIZES, kv_host_memory=1 << 20))


def test_the_plan_has_a_state_for_each_sequence_of_the_batch(folder: Path) -> None:
    engine = Engine.of(load_model(folder), EngineConfig(**SIZES))
    layers = engine.info.memory["states"] // (3 * 4 * ((2 * 2 * 8 + 6 * 12) * 3 + 6 * 8 * 12))
    engine.close()
    assert layers == 3  # of five


def test_states_do_not_depend_on_how_a_sequence_is_cut() -> None:
    torch.manual_seed(2)
    weights = DeltaWeights(torch.randn(2 * 8 * 2 + 24, 4), torch.randn(4), torch.randn(4), torch.randn(6), 1e-6)
    y, gates, table = torch.randn(23, 2 * (2 * 8 + 2 * 12)), torch.randn(23, 8), torch.zeros(1, 1).int()

    def rows(start: int) -> torch.Tensor:
        return torch.tensor([[1, 1 if start else -1, -1, 0, 0, 0]]).int()

    found = []
    for cuts in ((0, 23), (0, 1, 2, 9, 22, 23)):
        states = RecurrentStates(torch.ones(2, 56, 3), torch.ones(2, 4, 8, 6), torch.ones(2, 0, 64))
        parts = [
            ops.gated_delta.named("cpu")(
                y[a:b].contiguous(), gates[a:b], weights, states, rows(a), geometry([0, b - a], [b], table)
            )
            for a, b in pairwise(cuts)
        ]
        found.append((torch.cat([part.clone() for part in parts]), states.conv, states.matrix))
        assert bool((states.matrix[0] == 1).all())  # another sequence's
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)
