"""A declared budget of memory is kept, and memory does not grow with the number of calibration rows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmkit.errors import ConfigError
from lmkit.models.source import ModelSource
from lmkit.quant import budget
from lmkit.quant.budget import check_evaluation, fit, size
from lmkit.quant.run import prepare
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
AWQ = recipe(SCALE | {"tokens": 2048}, CLIP, calibration={"num_samples": 64, "seq_len": 64})
# Arguments: source, output, rows, "tight" to be given no more than the smallest budget that is accepted.
MEASURED = """
import json, re, sys
from dataclasses import replace
from pathlib import Path
from lmkit.config import parse_bytes
from lmkit.errors import ConfigError
from lmkit.kernels.cpu import threads
from lmkit.quant.run import prepare
from tests.quant.helpers import recipe
threads.configure(1)
source, out, rows, mode = sys.argv[1:]
steps = {"step": "awq_scale", "tokens": 256, "grid": 1}, {"step": "awq_clip", "grid": 1}
asked = recipe(*steps, calibration={"num_samples": int(rows), "seq_len": 512})
allowed = None
if mode == "tight":
    try:
        prepare(source, asked, max_memory=1)
    except ConfigError as error:
        allowed = parse_bytes(re.search(r"at least (\\S+)$", str(error))[1], "test")
quantizer = prepare(source, asked, max_memory=allowed)
quantizer.budget = replace(quantizer.budget, batch_tokens=512)
quantizer.run(out)
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"peak": int(peak.split()[1]) << 10, "allowed": allowed}))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512, "num_hidden_layers": 1}
    return tiny_checkpoint(tmp_path_factory.mktemp("wide"), **sizes)


def measure(source: Path, out: Path, rows: int, mode: str) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURED, str(source), str(out), str(rows), mode]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_rows_and_stays_in_the_budget(wide: Path, tmp_path: Path) -> None:
    few = measure(wide, tmp_path / "few", 2, "free")["peak"]
    many = measure(wide, tmp_path / "many", 64, "tight")
    hidden_states = 64 * 512 * 512 * 4
    assert many["peak"] - few < hidden_states / 2
    assert many["peak"] <= many["allowed"]


def choices(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens of a batch, tokens of the sample) as the budget gets smaller and smaller."""
    monkeypatch.setattr(budget, "BASE_BYTES", 0)  # its share would leave nothing to choose for a small model
    found, allowed = [], fit(source, AWQ).memory_bytes
    while True:
        try:
            chosen = fit(source, AWQ, allowed)
        except ConfigError:
            return found
        assert chosen.memory_bytes <= allowed
        found.append((chosen.batch_tokens, chosen.recipe.sample_tokens))
        allowed = chosen.memory_bytes - 1


def test_batches_shrink_first_then_the_sample(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = choices(ModelSource(wide), monkeypatch)
    assert found[0] == (4096, 2048)
    assert found[-1] == (64, 256)
    assert found == sorted(found, reverse=True)
    assert all(tokens == 64 for tokens, sample in found if sample < 2048)


def test_a_budget_that_cannot_be_kept_is_refused_with_the_smallest_that_can(wide: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-memory 50MiB: quantizing .* takes at least \d+(\.\d+)?[GM]iB$"):
        prepare(wide, AWQ, max_memory=50 << 20)


def test_an_evaluation_beyond_the_budget_is_refused_before_any_work(wide: Path, tmp_path: Path) -> None:
    quantizer = prepare(wide, AWQ)
    quantizer.budget = replace(quantizer.budget, max_memory=200 << 20)
    with pytest.raises(ConfigError, match=r"--max-memory 200MiB: the evaluation holds both models, .*; use --no-eval"):
        quantizer.run(tmp_path / "out", eval_ids=[1, 2, 3])
    assert list(tmp_path.iterdir()) == []
    check_evaluation(quantizer.source, replace(quantizer.budget, max_memory=8 << 30))


def test_sizes_round_up() -> None:
    assert size(3 << 30) == "3GiB"
    assert size((3 << 30) + 1) == "3.01GiB"
    assert size(1 << 20) == "1MiB"
