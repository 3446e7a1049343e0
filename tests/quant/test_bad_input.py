"""What a quantization meets in bad checkpoints, recipes and folders: one clear line, or a result that is right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lmkit.errors import CheckpointError, LMKitError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize
from lmkit.quant.report.selfcheck import check_logits
from lmkit.quant.run import prepare
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

ROOT = Path(__file__).parents[2]
AWQ = recipe(SCALE, CLIP)
UP = "model.layers.1.mlp.up_proj.weight"


def altered(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """A tiny checkpoint with one tensor changed."""
    file = tiny_checkpoint(path) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[name] = change(tensors[name]).contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return path


def set_one(row: int, column: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[row, column] = value
        return tensor

    return change


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", [UP, "lm_head.weight", "model.embed_tokens.weight"])
def test_numbers_that_are_none_are_named_with_their_place(tmp_path: Path, name: str, value: str) -> None:
    path = altered(tmp_path / "source", name, set_one(7, 11, float(value)))
    with pytest.raises(CheckpointError, match=rf"{name} at \[7, 11\] is {value}, not a finite number"):
        prepare(path, AWQ).run(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def weights(path: Path, role: str) -> Tensor:
    weight = ModelSource(path).layer_weights(1)[role]
    return dequantize(weight) if isinstance(weight, QTensor) else weight


def test_dead_channels_stay_dead_and_do_no_harm(tmp_path: Path) -> None:
    """A hidden channel that no norm lets through, and a weight row of zeros."""

    def kill(tensor: Tensor) -> Tensor:
        tensor[5] = 0
        return tensor

    norm = altered(tmp_path / "norm", "model.layers.1.input_layernorm.weight", kill)
    row = altered(tmp_path / "row", UP, kill)
    for path in (norm, row):
        report = prepare(path, AWQ).run(path.with_suffix(".out"))
        assert all(0 <= layer.error < 0.2 for layer in report.layers)
    assert not weights(tmp_path / "row.out", "mlp.up")[5].any()
    assert float(weights(tmp_path / "norm.out", "norm.attn")[5]) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_of_one_sign_do_not_saturate(tmp_path: Path, sign: int) -> None:
    path = altered(tmp_path / "source", UP, lambda tensor: sign * (tensor.abs() + 0.5))
    prepare(path, recipe()).run(tmp_path / "out")
    original, stored = (weights(folder, "mlp.up") for folder in (path, tmp_path / "out"))
    step = original.abs().amax() / 15
    assert float((original - stored).abs().max()) <= 0.51 * step


def test_inputs_that_fill_no_group_stay_dense_with_the_reason(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source", hidden_size=256, intermediate_size=8)
    report = prepare(path, AWQ).run(tmp_path / "out")
    reasons = {linear.reason for layer in report.layers for linear in layer.linears if linear.reason}
    assert reasons == {"8 inputs are not a multiple of the group size 32"}
    load_model(tmp_path / "out")


LIMITED = """
import resource, sys
from lmkit.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
sys.argv = ["lmkit", "quantize", sys.argv[1], "-o", sys.argv[2], "--group-size", "32", "--num-samples", "8",
            "--seq-len", "32", "--no-eval", "--calibration", "demo"]
main()
"""


def test_a_disk_that_cannot_hold_the_result_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """Layers fit, the whole does not: a limit of the file size stands for a full disk, refused in the same way."""
    source, out = tiny_checkpoint(tmp_path / "source"), tmp_path / "out"
    command = [sys.executable, "-c", LIMITED, str(source), str(out)]
    failed = subprocess.run([*command, str(1 << 20)], cwd=ROOT, capture_output=True, check=False)
    shown = failed.stderr.decode()
    assert failed.returncode == 2, shown
    assert "cannot be written: File too large" in shown
    assert "2 of 2 layers are kept" in shown
    assert "Traceback" not in shown
    again = subprocess.run([*command, "-1"], cwd=ROOT, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr.decode()
    assert "2 of 2 layers are finished" in again.stderr.decode()
    load_model(out)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LMKitError, match=r"file/out: cannot be made"):
        prepare(tiny_checkpoint(tmp_path / "source"), AWQ).run(tmp_path / "file" / "out")


def test_a_result_that_reads_back_differently_is_refused(tmp_path: Path) -> None:
    source = ModelSource(tiny_checkpoint(tmp_path / "source"))
    damaged = altered(tmp_path / "damaged", UP, set_one(3, 4, 2.0))
    row = torch.arange(32)
    hidden = _hidden(source, row)
    assert check_logits(source.reader.path, source, row, hidden) < 1e-6
    rounded = hidden + 2e-3 * hidden.std() * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(CheckpointError, match="other logits"):
        check_logits(source.reader.path, source, row, rounded)
    assert check_logits(source.reader.path, source, row, rounded, torch.bfloat16) < 2e-2
    with pytest.raises(CheckpointError, match="other logits"):
        check_logits(damaged, source, row, hidden, torch.bfloat16)
    with pytest.raises(CheckpointError, match="gives other logits than it was made with"):
        check_logits(damaged, source, row, hidden)
    assert CheckpointReader(damaged).has(UP)


def _hidden(source: ModelSource, row: Tensor) -> Tensor:
    """After the last layer, float32, by the model as it is served."""
    from lmkit.kv_dtype import FLOAT32
    from lmkit.layers.batch import allocate_kv, whole_batch

    decoder, spec = load_model(source.reader.path, activations="exact"), source.spec
    batch, num_blocks = whole_batch([row.tolist()], 32)
    kinds = (FLOAT32, FLOAT32)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 32, layer.head_dim, kinds) for layer in spec.layers]
    delta, residual = decoder.hidden(batch, kv)
    return delta + residual
