"""The bits of a weight are counted once, from the file, and every place that tells them tells the same figure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.config import EngineConfig
from lmkit.formats.known import remember
from lmkit.models.source import ModelSource
from lmkit.models.weight_bits import bits_of_folder, bits_of_linears, stored_bits
from lmkit.quant.run import prepare
from lmkit.turbo.engine.describe import describe_model
from tests.quant.helpers import recipe, tiny_checkpoint

G32 = {"group_size": 32}
SYM = G32 | {"symmetric": True}
# (sections of the recipe, bits of a weight): codes, and for 32 weights a float16 scale and perhaps a zero
CASES: list[tuple[dict[str, Any], float]] = [
    ({"format": "awq", "scheme": G32}, 4 + 20 / 32),
    ({"format": "gptq", "scheme": SYM}, 4 + 20 / 32),  # its zeros are always stored
    ({"format": "compressed-tensors", "scheme": G32}, 4 + 20 / 32),
    ({"format": "compressed-tensors", "scheme": SYM}, 4 + 16 / 32),
    ({"format": "compressed-tensors", "scheme": SYM | {"bits": 8}}, 8 + 16 / 32),
    ({"format": "compressed-tensors", "scheme": G32 | {"bits": 3}}, 3 + 19 / 32),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"), "qwen2")  # its q, k and v have biases


@pytest.mark.parametrize(("sections", "expected"), CASES)
def test_codes_scales_and_zeros_count(source: Path, tmp_path: Path, sections: dict[str, Any], expected: float) -> None:
    report = prepare(source, recipe(calibration={"dataset": "none"}, **sections)).run(tmp_path / "out")
    assert bits_of_folder(tmp_path / "out") == pytest.approx(expected)
    assert report.bits == pytest.approx(expected)
    assert [linear.bits for layer in report.layers for linear in layer.linears] == [pytest.approx(expected)] * 14


def test_one_figure_wherever_bits_are_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attn.*` stay dense, so that linears have several bits and sizes: a mean of linears is not one of weights."""
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "state"))
    asked = recipe(calibration={"dataset": "none"}, scheme=G32, ignore=["attn.*"])
    report = prepare(source, asked).run(tmp_path / "out")
    opened = ModelSource(tmp_path / "out")
    stored = stored_bits(opened.spec, opened.reader)
    attention = sum(bits for module, bits in stored.items() if ".self_attn." in module)
    mlp = opened.spec.num_weights - attention // 32
    figure = (attention + mlp * (4 + 20 / 32)) / opened.spec.num_weights
    assert bits_of_linears(opened.spec, opened.reader) == pytest.approx(figure)
    assert report.bits == pytest.approx(figure)
    assert [layer.bits for layer in report.layers] == [pytest.approx(figure)] * 2
    told = describe_model(str(tmp_path / "out"), EngineConfig())["weights"]["bits_per_linear_weight"]
    assert told == round(figure, 3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{figure:.4g}" in re.sub(r"<[^>]*>", " ", page)
    remember(tmp_path / "out")
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert [model["bits"] for model in listed if model["path"] == str(tmp_path / "out")] == [pytest.approx(figure)]
    assert f"{figure:.4g}" in CliRunner().invoke(app, ["list"]).stdout


def test_what_cannot_be_opened_has_no_figure(tmp_path: Path) -> None:
    assert bits_of_folder(tmp_path) is None
