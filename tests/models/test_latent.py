"""What latent attention does not have yet is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import UnsupportedError
from lmkit.models.source import ModelSource
from lmkit.quant.plan import make_plan
from lmkit.quant.recipe import load_recipe
from lmkit.turbo.engine.engine import Engine
from tests.quant.helpers import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "deepseek-v2-lite", num_key_value_heads=4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kv_dtype": "int8"}, "latent attention keeps its rows in 16 or 32 bits; use auto"),
        ({"tp": 2}, "tp=2: latent attention is not split over processes; use tp=1"),
    ],
)
def test_options_that_it_does_not_take(checkpoint: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError, match=line):
        Engine(str(checkpoint), EngineConfig(max_model_len=64, **options))


def test_it_is_not_quantized(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedError, match="models with latent attention are served but not quantized"):
        make_plan(ModelSource(checkpoint), load_recipe("rtn_w8a16"))
