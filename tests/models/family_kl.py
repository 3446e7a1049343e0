"""The table of docs/families.md that says what 4 bits cost: `python -m tests.models.family_kl [ROW ...]`. With rows it
measures these, and those that the table lacks.

Trained models are quantized as a user would do it. The other rows are tiny random models, in groups of 32: they show
that every part of a family is calibrated and rounded, and no figure of a real model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from lmkit.errors import LMKitError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.recipe import Recipe, load_recipe
from lmkit.quant.report import evaluate as evaluation
from lmkit.quant.run import prepare
from tests.models.family_table import PAGE, written
from tests.quant.helpers import tiny_checkpoint
from tests.test_readme import ROWS

HEADER = "| model, after `awq_w4a16_g128` | KL, nats a token | standard error |"
DATA = Path(__file__).resolve().parents[1] / "data"
TRAINED = {
    "trained: demo (Llama)": DEMO_FOLDER,
    "trained: Qwen3-MoE": DATA / "qwen3_moe",
    "trained: Qwen3.5": DATA / "qwen3_5",
}
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def short(recipe: Recipe) -> Recipe:
    """The recipe in groups of 32, with 16 rows of 128 tokens: what tiny models have room for."""
    scheme = msgspec.structs.replace(recipe.scheme, group_size=32)
    calibration = msgspec.structs.replace(recipe.calibration, num_samples=16, seq_len=128)
    return msgspec.structs.replace(recipe, scheme=scheme, calibration=calibration)


def cells(source: Path, recipe: Recipe, seq_len: int) -> list[str]:
    """KL on held-out text and its standard error, or that the model is refused."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            prepare(source, recipe).run(out)
        except LMKitError:
            return ["refused", ""]
        ids = evaluation.encode_text(out, None, source)
        prefix = evaluation.window_prefix(out)
        far = evaluation.evaluate(out, ids, against=source, prefix=prefix, seq_len=seq_len, limit=8192).divergence
    assert far is not None
    return [f"{far.kl_mean:.5f}", f"{far.kl_stderr:.5f}"]


def measured(name: str) -> str:
    """The row of a model."""
    recipe = load_recipe("awq_w4a16_g128")
    if name in TRAINED:
        return f"| {name} | {' | '.join(cells(TRAINED[name], recipe, 512))} |"
    with tempfile.TemporaryDirectory() as folder:
        source = tiny_checkpoint(Path(folder), ROWS[name][1], **SHAPE)
        return f"| {name} | {' | '.join(cells(source, short(recipe), 128))} |"


def table(old: str, names: list[str]) -> str:
    """The table, with these rows measured anew. A row that `old` lacks is measured, too."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()[2:]}
    rows = [measured(name) if name in names or name not in known else known[name] for name in (*TRAINED, *ROWS)]
    return "\n".join([HEADER, "|---" * HEADER.count(" |") + "|", *rows]) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text()
    old = written(page, HEADER)
    PAGE.write_text(page.replace(old, table(old, sys.argv[1:] or [*TRAINED, *ROWS])))
