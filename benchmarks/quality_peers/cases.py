"""The input of every tool, and the measurement of its result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.outliers import make_outliers
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.quant.data.calibration import load_calibration
from lmkit.quant.report.evaluate import EvalResult, encode_text, evaluate, window_prefix
from lmkit.quant.sections import BUNDLED_TEXT, CalibrationRecipe
from lmkit.text import Tokenizer

TOLERANCE = 1e-4  # of a logit, between the model as it is and with outliers
NOT_WEIGHTS = (".bias", ".g_idx", ".weight_shape")  # tensors of a linear that are the same for any number of bits
BLOCK = 32


@dataclass(frozen=True)
class Setting:
    """The amount of calibration and evaluation data."""

    num_rows: int
    seq_len: int
    eval_tokens: int
    group_size: int = 128
    dataset: str = BUNDLED_TEXT  # of the calibration rows
    text: str | None = None  # a file to evaluate on; None: the demo model's held-out text


def write_rows(folder: Path, setting: Setting, original: Path = DEMO_FOLDER) -> Path:
    """The calibration rows of lmkit's default recipe, as token ids for every tool."""
    recipe = CalibrationRecipe(dataset=setting.dataset, num_samples=setting.num_rows, seq_len=setting.seq_len)
    rows = load_calibration(recipe, Tokenizer.from_pretrained(original)).rows
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.json"
    path.write_text(json.dumps(rows.tolist()))
    return path


def make_model(folder: Path, factor: int, original: Path = DEMO_FOLDER) -> Path:
    """The model in float32 with outliers `factor` times as large, in `folder`. Its logits are checked."""
    path = folder / f"model-x{factor}"
    if not path.exists():
        partial = folder / f"model-x{factor}.partial"
        make_outliers(original, partial, factor)
        ids = encode_text(original)[:256]
        difference = float((logits(partial, ids) - logits(original, ids)).abs().max())
        assert difference < TOLERANCE, f"outliers x{factor} change a logit by {difference}"
        partial.rename(path)
    return path


@torch.inference_mode()
def logits(model: Path, token_ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary] of one sequence, with exact activations and float32 KV."""
    decoder = load_model(model, dtype="float32", activations="exact")
    spec = decoder.spec
    batch, num_blocks = whole_batch([token_ids], BLOCK)
    dtypes = (FLOAT32, FLOAT32)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, BLOCK, layer.head_dim, dtypes) for layer in spec.layers]
    return decoder.head(*decoder.hidden(batch, kv))


def evaluate_against(model: Path, original: Path, setting: Setting) -> EvalResult:
    """Evaluate on held-out text, with exact activations and float32 KV."""
    return evaluate(
        model,
        encode_text(original, None if setting.text is None else Path(setting.text)),
        against=original,
        kv_dtype="float32",
        activations="exact",
        prefix=window_prefix(original),
        seq_len=setting.seq_len,
        limit=setting.eval_tokens,
    )


def bits_per_weight(checkpoint: Path, original: Path = DEMO_FOLDER) -> float:
    """Bits that a checkpoint stores for a weight of its layers' linears: codes, scales and zeros."""
    spec = ModelSource(original).spec
    modules = {layer.module_name(i, role) for i, layer in enumerate(spec.layers) for role in layer.linears}
    with CheckpointReader(checkpoint) as reader:
        stored = sum(
            reader.info(name).nbytes
            for name in reader.names()
            if name.rpartition(".")[0] in modules and not name.endswith(NOT_WEIGHTS)
        )
    return 8 * stored / spec.num_weights
