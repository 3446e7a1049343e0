"""An INT8 head: its codes, when a quantized checkpoint asks for it, and that an engine then has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmkit.errors import CheckpointError
from lmkit.models.head import ASKED_HEAD, rounded_head
from lmkit.models.resolved import resolved
from lmkit.models.source import ModelSource
from lmkit.qtensor import dequantize
from lmkit.quant.recipe import load_recipe
from lmkit.quant.report.head_storage import LARGEST_KL, choose_head, head_line, int8_kl
from tests.models.tiny import make


def written(path: Path, **config: str) -> Path:
    """A tiny model with tied embeddings, and more in its config.json."""
    make(path, "llama", tie_word_embeddings=True)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_weights_from_codes_get_the_same_codes() -> None:
    """Those of Q8_0, whose largest code in a group is 127 or -127."""
    codes = torch.randint(-127, 128, (40, 96))
    codes[:, ::32] = 127
    weight = (codes.view(40, 3, 32) * ((torch.rand(40, 3, 1) + 0.1) / 50).half().float()).half().flatten(1)
    rounded = rounded_head(weight)
    assert torch.equal(rounded.codes.int() - 128, codes.int())
    assert float((dequantize(rounded) - weight.float()).abs().max()) <= 2e-3 * float(weight.float().abs().max())
    assert dequantize(rounded_head(weight[:, :50])).shape == (40, 50)


def test_the_kl_is_that_of_both_logits(tmp_path: Path) -> None:
    source = ModelSource(written(tmp_path))
    hidden = torch.randn(5, source.spec.hidden_size)
    head = source.head(torch.float32)
    exact = head.head(hidden.clone(), None).double().log_softmax(-1)
    weight = head.lm_head.weights["lm_head"]
    assert isinstance(weight, torch.Tensor)
    head.lm_head.weights["lm_head"] = rounded_head(weight)
    rounded = head.head(hidden.clone(), None).double().log_softmax(-1)
    expected = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    assert int8_kl(source, hidden) == pytest.approx(expected, rel=1e-2, abs=1e-9)


def test_int8_is_chosen_where_it_changes_next_to_nothing(tmp_path: Path) -> None:
    source = ModelSource(written(tmp_path))
    hidden = torch.randn(5, source.spec.hidden_size)
    found = choose_head(source, "auto", hidden)
    assert found.kl is not None
    assert found.storage == ("int8" if found.kl <= LARGEST_KL else "stored")
    assert choose_head(source, "auto", None).storage == choose_head(source, "stored", hidden).storage == "stored"
    assert choose_head(source, "int8", None).config == {ASKED_HEAD: "int8"}
    assert head_line(found).startswith(f"head: {found.storage}; in INT8 its KL is ")


def test_a_recipe_that_keeps_the_weights_keeps_the_head() -> None:
    assert load_recipe("kv4").asked_head == "stored"
    assert load_recipe("kv4", {"lm_head": "int8"}).asked_head == "int8"
    assert load_recipe("awq_w4a16_g128").asked_head == "auto"


@pytest.mark.parametrize(("option", "storage"), [("auto", "int8"), ("stored", "stored"), ("int8", "int8")])
def test_an_engine_does_what_the_checkpoint_asks_for(tmp_path: Path, option: str, storage: str) -> None:
    path = written(tmp_path, **{ASKED_HEAD: "int8"})
    with resolved(path, lm_head=option) as model:
        assert model.packing.lm_head == storage
        assert model.head_activations == ("split" if storage == "int8" else "int8")


def test_another_storage_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, **{ASKED_HEAD: "int2"})
    with pytest.raises(CheckpointError, match="lm_head_storage is 'int2', not int8 or stored"), resolved(path):
        pass
