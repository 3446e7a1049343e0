"""The comparison with other engines: its bookkeeping, its table, and one run of lmkit alone on a tiny model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from benchmarks import cpu_peers
from benchmarks.ceilings import Ceilings, Meter
from benchmarks.cpu_peers import SIZES
from benchmarks.peers import report
from benchmarks.peers.catalog import ENGINES, POINTS, EngineKind, at_levels
from benchmarks.peers.client import parse_pythons
from benchmarks.peers.limits import possible
from benchmarks.peers.lmkit_engine import LmkitEngine, prepare
from benchmarks.peers.protocol import Facts, Options, answer
from benchmarks.peers.safetensors_numpy import tensors
from benchmarks.peers.samples import Sample, Samples
from benchmarks.random_llama import LLAMA_1B, Shape, make_checkpoint
from benchmarks.report import AboveCeiling, share
from lmkit.errors import ConfigError

pytestmark = pytest.mark.slow
CEILINGS = Ceilings(bytes_per_s=20e9, int4_ops=500e9, int8_ops=200e9, bfloat16_ops=300e9, float_ops=200e9)


class StillMeter(Meter):
    """Measures nothing."""

    def __init__(self) -> None: ...

    def measure(self, seconds: float = 0.0) -> tuple[Ceilings, dict[str, float]]:
        return CEILINGS, {}


ROOT = Path(__file__).resolve().parents[2]
ALL, KINDS = list(POINTS.values()), list(ENGINES.values())


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """lmkit at 30 at b1 (one measurement dropped), llama.cpp at 20 and transformers at 25 there; vLLM is missing."""
    samples = Samples(tmp_path / "samples.json", {"rounds": 3}, ceilings=[asdict(CEILINGS)])
    for rate, others, limit in ((30, 0.0, 200), (31, 0.01, 100), (90, 0.5, 100), (10, 0.02, 100)):
        samples.add("lmkit", "b1", Sample(rate, others, 2.0, limit))
    samples.add("llama.cpp", "b1", Sample(20, 0.0, 2.0))
    samples.add("transformers", "b1", Sample(5, 0.9, 2.0))
    samples.add("transformers", "b1", Sample(25, 0.1, 2.0))
    samples.facts = {name: asdict(Facts("", "", 100_000_000)) for name in ("lmkit", "llama.cpp", "transformers")}
    samples.missing["vllm"] = "not installed"
    return samples


def test_disturbed_measurements_are_dropped(samples: Samples) -> None:
    assert samples.rate("lmkit", "b1") == 30
    assert not samples.disturbed("lmkit", "b1")
    assert samples.num_dropped() == 3
    assert samples.rate("transformers", "b1") == 25  # the least disturbed: none is clean
    assert samples.disturbed("transformers", "b1")
    assert samples.rate("lmkit", "b4") is None
    assert samples.seconds("lmkit", "b1") == 8


def test_a_run_is_taken_up_with_equal_settings_only(samples: Samples) -> None:
    samples.save()
    again = Samples.open(samples.path, {"rounds": 3}, fresh=False)
    assert again.taken == samples.taken
    assert again.best_ceilings() == CEILINGS
    assert not Samples.open(samples.path, {"rounds": 2}, fresh=False).taken
    assert not Samples.open(samples.path, {"rounds": 3}, fresh=True).taken


def test_ratio_is_to_the_fastest_peer(samples: Samples) -> None:
    assert report.ratio(samples, "lmkit", POINTS["b1"]) == 30 / 25
    assert report.ratio(samples, "lmkit", POINTS["b4"]) is None


def test_table_names_a_missing_peer(samples: Samples) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.table(samples, KINDS, ALL, LLAMA_1B, threads=2))
    lines = {line.split("│")[1].strip(): line for line in captured.get().splitlines() if "│" in line}
    assert "not installed" in lines["vllm"]
    assert "30.0" in lines["lmkit"]
    assert "3.0 (15%)" in lines["lmkit"]  # 30 times 0.1 GB, of 20 GB/s
    assert "25.0*" in lines["transformers"]
    assert "1.20x" in lines["lmkit / best peer"]


def test_a_figure_above_its_ceiling_fails(samples: Samples) -> None:
    limit = possible(CEILINGS, LLAMA_1B, Facts("", "", 100_000_000), POINTS["b64"])
    samples.add("lmkit", "b64", Sample(1.34 * limit, 0.0, 2.0, limit))
    with pytest.raises(AboveCeiling, match="lmkit, b64 is 134% of what is possible"):
        report.rows(samples, LLAMA_1B)
    samples.ceilings.insert(0, asdict(replace(CEILINGS, int4_ops=1.4 * CEILINGS.int4_ops)))  # the best reading counts
    shares = {(row["engine"], row["point"]): row["of_possible"] for row in report.rows(samples, LLAMA_1B)}
    assert shares["lmkit", "b64"] == pytest.approx(1.34 / 1.4)
    assert share(104, 100, "a clock that varies") == 1.04


def test_what_is_possible() -> None:
    """b1 reads all weights for a token. 64 sequences multiply. A 2k context is read in the storage of its KV."""
    facts = Facts("", "", weight_bytes=10**9)
    assert possible(CEILINGS, LLAMA_1B, facts, POINTS["b1"]) == pytest.approx(20, rel=0.01)
    assert possible(CEILINGS, LLAMA_1B, facts, POINTS["b64"]) == pytest.approx(500e9 / 2 / LLAMA_1B.num_linear)
    slow = replace(CEILINGS, bytes_per_s=1e9)
    kv = 16 * 2048 * LLAMA_1B.kv_token_values
    for size in (1.0, 2.0):
        read = 10**9 + kv * size
        assert possible(slow, LLAMA_1B, replace(facts, kv_bytes=size), POINTS["b16-2k"]) == pytest.approx(16e9 / read)
    # The last layer of a prompt needs K and V of each token, and the rest of the last token alone.
    needed = LLAMA_1B.num_linear * 15 // 16 + 2 * 512 * 2048
    assert possible(CEILINGS, LLAMA_1B, facts, POINTS["prefill512"]) == pytest.approx(500e9 / 2 / needed)


def test_what_is_possible_with_experts() -> None:
    """A step reads the experts that its tokens choose, and multiplies with those of each token."""
    shape = Shape(64, 96, 2, 4, 2, 16, 512, experts=8, experts_per_token=2)
    expert, attention = 3 * 64 * 96, 2 * 64 * 64 + 2 * 64 * 32
    assert shape.num_linear == 2 * (attention + 8 * expert)
    assert shape.num_active == 2 * (attention + 2 * expert)
    assert shape.share_read(1) == pytest.approx(shape.num_active / shape.num_linear)
    assert shape.share_read(2) == pytest.approx(2 * (attention + 8 * expert * (1 - 0.75**2)) / shape.num_linear)
    facts = Facts("", "", weight_bytes=10**9)
    assert possible(CEILINGS, shape, facts, POINTS["b1"]) == pytest.approx(20 / shape.share_read(1), rel=0.01)
    with_head = replace(facts, weight_bytes=2 * 10**9, head_bytes=10**9)
    assert possible(CEILINGS, shape, with_head, POINTS["b1"]) == pytest.approx(20 / (1 + shape.share_read(1)), rel=0.01)


def test_every_prompt_is_computed(tmp_path: Path) -> None:
    """A point's prompts are measured several times: an engine must not find them in its prefix cache."""
    make_checkpoint(tmp_path / "checkpoint", Shape(64, 96, 2, 4, 2, 16, 512, 128))
    prepare(tmp_path / "checkpoint", tmp_path / "awq")
    engine = LmkitEngine(Options(tmp_path / "awq", 1, 4, 128, 512))
    for number in range(3):
        answer(engine, {"do": "prefill", "batch": 1, "prompt_len": 100}, 512, number)
    engine.engine.close()
    stats = engine.engine.stats()
    assert stats.prefix_hits < 10
    assert stats.prompt_tokens == 300


def test_plot(samples: Samples, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(samples, KINDS, ALL, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    # A plot names engines and points in words.
    assert [point.label for point in ALL[2:5]] == ["prompt\nof 8000", "1 sequence", "4 sequences"]
    assert ENGINES["openvino"].label == "OpenVINO GenAI"


def test_the_legend_hides_no_bar(samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw)))
    for kind in KINDS:
        samples.add(kind.name, "b4", Sample(100, 0.0, 2.0))
    report.plot(samples, KINDS, ALL, tmp_path / "plot.png")
    (axes,) = drawn[0].axes
    assert axes.get_ylim()[0] == 0
    legend, picture = axes.get_legend().get_window_extent(), drawn[0].bbox
    assert not legend.overlaps(axes.get_window_extent())
    texts = [*axes.texts, *axes.get_xticklabels()]
    for extent in (legend, *(text.get_window_extent() for text in texts)):  # nothing is cut
        assert picture.x0 <= extent.x0 < extent.x1 <= picture.x1
        assert picture.y0 <= extent.y0 < extent.y1 <= picture.y1


def test_levels_are_engines_of_their_own() -> None:
    kinds = at_levels([ENGINES["lmkit"], ENGINES["vllm"]], ["avx2", "portable"])
    assert [(kind.name, kind.isa) for kind in kinds] == [
        ("lmkit", ""), ("lmkit@avx2", "avx2"), ("lmkit@portable", "portable"), ("vllm", "")
    ]  # fmt: skip
    assert len({kind.label for kind in kinds}) == 4
    assert {kind.form for kind in kinds[:3]} == {"lmkit-awq"}


def test_a_failed_engine_starts_in_its_next_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one runs the engine, measured as if it were the first. The reason of the first failure is kept."""
    monkeypatch.delenv("LMKIT_CPU_ISA", raising=False)
    monkeypatch.setattr(cpu_peers, "PEERS", "tests.benchmarks")
    crashing = tmp_path / "python"
    crashing.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nkill -SEGV $$\n')
    crashing.chmod(0o755)
    (tmp_path / "checkpoint").touch()
    kind = EngineKind("fake", "fake_engine", (), None, "fake")
    samples = Samples(tmp_path / "samples.json", {})
    bench = cpu_peers.Bench(SIZES["tiny"], 1, 1, tmp_path, samples, StillMeter(), CEILINGS)
    with contextlib.closing(bench):
        bench.start([kind], {"fake": [str(crashing), sys.executable]})
        bench.run([POINTS["b4"]])
        assert samples.rate("fake", "b4")
        assert "killed by SIGSEGV" in samples.facts["fake"]["settings"]
        assert not samples.missing
        process = bench.engines["fake"].process
        assert process
        process.usage().kill()
        bench.run([POINTS["b16"]])
    assert samples.missing["fake"].startswith("failed: killed by SIGKILL")
    assert samples.rate("fake", "b4")  # what was measured stays


def test_options_are_checked() -> None:
    assert cpu_peers.parse_engines("vllm,lmkit") == ["lmkit", "vllm"]
    assert cpu_peers.parse_engines(None) == list(ENGINES)
    with pytest.raises(ConfigError, match="no engine tgi"):
        cpu_peers.parse_engines("lmkit,tgi")
    assert cpu_peers.parse_levels(None) == []
    assert cpu_peers.parse_levels("portable") == ["portable"]
    with pytest.raises(ConfigError, match="no level sse"):
        cpu_peers.parse_levels("sse")
    assert [point.name for point in cpu_peers.parse_points("b4,prefill512")] == ["prefill512", "b4"]
    two = f"{sys.executable},{sys.executable}"
    assert parse_pythons([f"vllm={two}"], ENGINES) == {"vllm": [sys.executable] * 2}
    for wrong in ("vllm", "vllm=/no/such/python", f"vllm={sys.executable},/no/such", f"tgi={sys.executable}"):
        with pytest.raises(ConfigError, match="--peer"):
            parse_pythons([wrong], ENGINES)


@pytest.mark.exhaustive
def test_lmkit_alone(tmp_path: Path) -> None:
    """The command on a tiny model: one row for each point, and the peer whose Python cannot run is named."""
    no_python = tmp_path / "python"
    no_python.write_text("#!/bin/sh\nexit 1\n")
    no_python.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.cpu_peers", "--size", "tiny", "--rounds", "1", "--threads", "2"]
    command += ["--engines", "lmkit,llama.cpp", "--peer", f"llama.cpp={no_python}"]
    command += ["--workdir", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not installed" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    # lmkit's KV cache is bfloat16 here, so it has no figure at the point for 8 bits.
    measured = [("lmkit", point.name) for point in ALL if not point.small_kv]
    assert [(row["engine"], row["point"]) for row in document["rows"]] == measured
    assert all(0 < row["of_possible"] < 1 for row in document["rows"])
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    assert document["machine"]["missing"] == {"llama.cpp": "not installed"}
    assert "no prefix cache" in document["machine"]["engines"]["lmkit"]["settings"]
    assert not list((tmp_path / "work").rglob("samples.json"))  # a complete run leaves nothing to take up


def test_random_checkpoint_is_what_transformers_reads(tmp_path: Path) -> None:
    shape = Shape(64, 96, 2, 4, 2, 16, 512, 128)
    make_checkpoint(tmp_path / "model", shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "model")) <= 512
    stored = dict(tensors(tmp_path / "model"))
    state = model.state_dict()
    assert stored.keys() == state.keys()
    for name, values in stored.items():
        assert torch.equal(torch.from_numpy(values), state[name].float())
