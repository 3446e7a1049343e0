"""What quantization costs publicly trained models: KL from the file's own weights on prose that no step has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.quant.data.calibration import parse_source
from lmkit.quant.recipe import load_recipe
from lmkit.quant.report.evaluate import encode_text, evaluate, window_prefix
from lmkit.quant.run import prepare
from tests.real.conftest import Record
from tests.real.packages import GEMMA3, SMOLLM2, Published

pytestmark = pytest.mark.exhaustive
NUM_TOKENS = 4096
# A row of the table -> a recipe, and the largest KL in nats a token of SmolLM2 and of Gemma 3.
RECIPES: dict[str, tuple[str, dict[Published, float]]] = {
    "KL, default recipe": ("loss_w4a16_g128", {SMOLLM2: 0.09, GEMMA3: 0.13}),
    "KL, AWQ recipe": ("awq_w4a16_g128", {SMOLLM2: 0.20, GEMMA3: 0.12}),
    "KL, RTN": ("rtn_w4a16_g128", {SMOLLM2: 0.45, GEMMA3: 0.80}),
    "KL, INT4 KV, calibrated": ("kv4", {SMOLLM2: 0.015, GEMMA3: 0.025}),  # heads of 256 share 16 levels
}
CACHES: dict[str, dict[Published, float]] = {
    "int8": {SMOLLM2: 0.003, GEMMA3: 0.008},  # keys of Gemma 3 have channels far above the others
    "int4": {SMOLLM2: 0.20, GEMMA3: 3.0},
}


def divergence(generator: Published, model: Path, text: Path, **options: Any) -> str:
    ids = encode_text(str(model), text, str(generator.path))
    options |= {"prefix": window_prefix(model), "limit": NUM_TOKENS}
    far = evaluate(str(model), ids, against=str(generator.path), **options).divergence
    assert far is not None
    return f"{far.kl_mean:.4f}"


@pytest.mark.parametrize("check", RECIPES)
def test_a_recipe_keeps_the_model(
    generator: Published, tmp_path: Path, prose: tuple[Path, Path], record: Record, check: str
) -> None:
    name, most = RECIPES[check]
    calibration = {"dataset": [parse_source(str(prose[0]))], "num_samples": 16, "seq_len": 512}
    prepare(str(generator.path), load_recipe(name, {"calibration": calibration})).run(tmp_path / "out")
    kl = divergence(generator, tmp_path / "out", prose[1])
    record(generator, check, kl)
    assert float(kl) <= most[generator]


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_without_calibration(generator: Published, prose: tuple[Path, Path], record: Record, kind: Any) -> None:
    """INT4 is the reason for calibrating."""
    kl = divergence(generator, generator.path, prose[1], kv_dtype=kind)
    record(generator, f"KL, {kind.upper()} KV as it is", kl)
    assert float(kl) <= CACHES[kind][generator]
