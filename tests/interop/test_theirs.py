"""Checkpoints of other tools give the logits that those tools compute themselves; make_fixtures.py made them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.interop.logits import exact_logits
from tests.interop.make_fixtures import FOLDER

# How far apart logits of standard deviation 1.4 may be: what computes in float16 there is further from float32.
TOLERANCES = {"auto-round": 1e-2, "gptqmodel": 5e-2}
MADE = sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", MADE)
def test_their_checkpoint_gives_their_logits(name: str) -> None:
    expected = load_file(FOLDER / name / "expected.safetensors")
    found = exact_logits(FOLDER / name, expected["token_ids"].tolist())
    tolerance = next((value for prefix, value in TOLERANCES.items() if name.startswith(prefix)), 1e-3)
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=tolerance)


def test_fixtures_are_small() -> None:
    assert MADE
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 1 << 20
