"""The estimate of a run's time. Speeds and times were measured together, so nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.random_llama import Shape, config
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models.registry import load_spec
from lmkit.models.spec import ModelSpec
from lmkit.quant.plan import estimate
from lmkit.quant.recipe import load_recipe
from lmkit.quant.steps.base import Speed

# Two virtual cores of an AMD EPYC Zen 5 (AVX512-BF16) without other work.
SPEED = Speed(short=7.3e11, full=1.85e11, engine=6.7e11, rounding=7.5e8, calls=4.8e5)
DEMO = load_spec(json.loads((DEMO_FOLDER / "config.json").read_text()))
TWO_LAYERS = load_spec(config(Shape(layers=2)))


@pytest.mark.parametrize(
    ("spec", "name", "seconds"),
    [
        (DEMO, "awq_w4a16_g128", 11.2),
        (DEMO, "loss_w4a16_g128", 25.0),
        (DEMO, "awq_rtn_w4a16_g128", 6.8),
        (DEMO, "gptq_w4a16_g128", 8.2),
        (DEMO, "refined_w4a16_g128", 24.7),
        (DEMO, "mixed_4.5", 20.4),
        (TWO_LAYERS, "awq_w4a16_g128", 109),
        (TWO_LAYERS, "awq_rtn_w4a16_g128", 60.7),
        (TWO_LAYERS, "gptq_w4a16_g128", 75.7),
        (TWO_LAYERS, "rtn_w4a16_g128", 20.4),
    ],
)
def test_the_estimate_is_near_the_time_that_a_run_took(spec: ModelSpec, name: str, seconds: float) -> None:
    found = sum(estimate(spec, load_recipe(name), SPEED).values())
    assert found == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("name", ["awq_w4a16_g128", "signround_w4a16_g128", "smoothquant_w8a8", "refined_w4a16_g128"])
def test_a_machine_twice_as_fast_takes_half_the_time(name: str) -> None:
    twice = Speed(*(2 * rate for rate in (SPEED.short, SPEED.full, SPEED.engine, SPEED.rounding, SPEED.calls)))
    slow, fast = (estimate(DEMO, load_recipe(name), speed) for speed in (SPEED, twice))
    assert fast == pytest.approx({phase: seconds / 2 for phase, seconds in slow.items()})


@pytest.mark.parametrize("rate", ["short", "rounding", "calls"])
def test_every_rate_counts(rate: str) -> None:
    slow = replace(SPEED, **{rate: getattr(SPEED, rate) / 10})
    recipe = load_recipe("awq_w4a16_g128")
    assert estimate(DEMO, recipe, slow)["layers"] > 1.1 * estimate(DEMO, recipe, SPEED)["layers"]
