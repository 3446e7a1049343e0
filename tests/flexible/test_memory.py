"""Memory is planned for what is loaded, and experts shrink with the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.families.tiny import save_tiny
from lmkit.models.flexible.caches import tensors_in
from lmkit.models.resolved import resolved
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare

GRID = {"format": "compressed-tensors", "scheme": {"group_size": 32, "smaller_groups": False}}


def resident(module: nn.Module) -> int:
    """Bytes of the tensors that a loaded module has."""
    seen = (each for part in module.modules() for each in tensors_in(vars(part)) if each.device.type != "meta")
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in seen}.values())


@pytest.mark.parametrize("how", ["as stored", "int4 on loading", "a quantized checkpoint"])
@pytest.mark.parametrize("model_type", ["gpt2", "flex_olmo"])
def test_planned_bytes_are_those_of_the_loaded_module(tmp_path: Path, model_type: str, how: str) -> None:
    save_tiny(model_type, tmp_path / "source")
    folder, options = tmp_path / "source", dict[str, Any](model_impl="flexible", dtype="float32")
    if how == "int4 on loading":
        options["quantize"] = "int4"
    elif how == "a quantized checkpoint":
        folder = tmp_path / "out"
        prepare(tmp_path / "source", load_recipe("rtn_w4a16_g128", GRID)).run(folder)
    with resolved(folder, **options) as model:
        found = resident(model.source.decoder(model.packing).module)
        assert model.weight_bytes() == pytest.approx(found, rel=0.1)
