"""A merged checkpoint has the weights of W + scale B A, and gives the tokens that the adapter gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_llama import make_awq
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.merge import merge, merged_beside
from tests.models import peft_folder, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.make(tmp_path / "base", "qwen3").to(dtype)
    model.save_pretrained(tmp_path / "base")
    shapes = dict(list(peft_folder.linears(model).items())[::2])
    added = peft_folder.write(tmp_path / "a", shapes, 1)
    assert merge(tmp_path / "base", tmp_path / "a", tmp_path / "merged") == len(shapes)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        delta = added.get(name.removesuffix(".weight"))
        want = tensor if delta is None else (tensor.float() + delta).to(dtype)
        torch.testing.assert_close(after[name], want, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_merged_folder_stays_for_a_run_that_resumes(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "base", "llama")
    peft_folder.write(tmp_path / "a", peft_folder.linears(model), 1)
    merge(tmp_path / "base", tmp_path / "a", tmp_path / "want")
    seen = list[tuple[str, int]]()

    def run(*, is_killed: bool) -> None:
        with merged_beside(tmp_path / "out", str(tmp_path / "base"), tmp_path / "a") as folder:
            file = Path(folder) / "model.safetensors"
            assert file.read_bytes() == (tmp_path / "want" / "model.safetensors").read_bytes()
            seen.append((folder, file.stat().st_mtime_ns))
            if is_killed:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(is_killed=True)
    run(is_killed=False)
    assert seen[0] == seen[1]
    assert not list(tmp_path.glob(".out*"))
    with merged_beside(tmp_path / "out", "base", None) as unmerged:
        assert unmerged == "base"


def test_what_cannot_be_merged(tmp_path: Path, demo_model: Path) -> None:
    tiny.make(tmp_path / "base", "llama")
    peft_folder.write(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (48, 47)}, 1)
    with pytest.raises(CheckpointError, match="the model has"):
        merge(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    make_awq(demo_model, tmp_path / "q", group=64)
    peft_folder.write(tmp_path / "b", {"model.layers.0.self_attn.q_proj": (256, 256)}, 1)
    with pytest.raises(UnsupportedError, match="is quantized: merge into the original"):
        merge(tmp_path / "q", tmp_path / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists()
