"""`lmkit bench` as a user meets it: tables, files, and one clear line for a mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.bench.metrics import Burst, Distribution, RequestRecord, summarize
from lmkit.bench.plot import check_plot, plot_latency, plot_requests
from lmkit.bench.schema import LatencyRun, OnlineRun, ThroughputRun
from lmkit.errors import UnsupportedError
from tests.bench.fake_server import BURSTS, FakeServer
from tests.cli.commands import mistake
from tests.cli.test_commands import lmkit, refused

pytestmark = pytest.mark.slow


def test_online(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with FakeServer() as server:
        options = ["--num-prompts", "3", "--input-len", "40", "--output-len", "6", "--tokenizer", "demo"]
        result = lmkit("bench", "online", server.url, *options, "--rate", "50,inf", "--concurrency", "2",
                       "--goodput", "ttft:9000", "--price-per-hour", "2",
                       "--json", str(file), "--requests")  # fmt: skip
    assert result.returncode == 0, result.stderr
    for text in ("50/s, 2 at once", "good req/s", "1M output tokens", "inter-token", "client: "):
        assert text in result.stdout
    document = json.loads(file.read_text())
    assert (document["schema"], document["benchmark"]) == ("lmkit.bench/1", "online")
    assert document["environment"]["packages"]["lmkit"]
    configuration = document["configuration"]
    assert (configuration["model"], configuration["workload"]["input_len"]) == ("plain", 40)
    assert [(run["rate"], run["concurrency"]) for run in document["runs"]] == [(50, 2), (None, 2)]
    run = document["runs"][1]
    assert run["summary"]["num_completed"] == 3
    assert run["summary"]["itl_ms"]["count"] == 15
    assert [n for _, n in run["requests"][0]["bursts"]] == list(BURSTS)
    assert msgspec.convert(document["runs"], list[OnlineRun])[0].label == "50/s, 2 at once"


def test_throughput_and_latency(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    engine = ["--max-batch-size", "2", "--kv-memory", "64M", "--json", str(file)]
    result = lmkit(
        "bench", "throughput", "demo", "--num-prompts", "3", "--input-len", "8", "--output-len", "3", *engine
    )
    assert "requests/s" in result.stdout, result.stderr
    document = json.loads(file.read_text())
    assert document["configuration"]["engine"]["max_batch_size"] == 2
    assert document["configuration"]["engine"]["kv_memory"] == 64 << 20
    assert document["runs"][0]["summary"]["output_tokens"] == 9
    assert "requests" not in document["runs"][0]
    result = lmkit("bench", "latency", "demo", "--batch-size", "1,2", "--input-len", "8", "--output-len", "3",
                   "--profile", *engine)  # fmt: skip
    assert "ms/token" in result.stdout, result.stderr
    assert "milliseconds of a decode step" in result.stdout
    document = json.loads(file.read_text())
    assert [run.batch_size for run in msgspec.convert(document["runs"], list[LatencyRun])] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("online", "http://127.0.0.1:9", "--tokenizer", "demo"), "127.0.0.1:9: Connection refused"),
        (("online", "localhost:8000"), "'localhost:8000' is not a URL: write http://localhost:8000"),
        (("online", "--rate", "0"), "--rate '0'"),
        (("online", "--concurrency", "two"), "--concurrency 'two'"),
        (("online", "--goodput", "ttft"), "--goodput 'ttft'"),
        (("online", "--ramp", "5", "http://127.0.0.1:9"), "--ramp needs"),
        (("online", "--extra-body", "[1]"), "--extra-body '[1]': expected a JSON object"),
        (("online", "--endpoint", "responses"), "--endpoint 'responses': expected chat or completions"),
        (("online", "--burstiness", "0"), "--burstiness 0.0: expected a number > 0.0"),
        (("online", "--duration", "nan"), "--duration nan: expected a number > 0.0"),
        (("online", "--requests"), "--json"),
        (("online", "--request-rate", "3"), "bench online: no option --request-rate: use --rate"),
        (("throughput", "demo", "--num-prompts", "0"), "--num-prompts '0': expected an integer of at least 1"),
        (("throughput", "demo", "--kv-dtype", "int5"), "--kv-dtype 'int5': expected auto, float32, "),
        (("throughput", "demo", "--dataset", "/none.json"), "/none.json"),
        (("throughput", "/none"), "/none: no such folder"),
        (("latency", "demo", "--batch-size", "1,x"), "--batch-size '1,x'"),
        (("latency", "demo", "--repeats", "0"), "--repeats '0': expected an integer of at least 1"),
        (("latency", "demo", "--json", "/none/out.json"), "/none/out.json"),
        (("latency", "demo", "--plot", "out.txt"), ".png"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    """In this process, which is faster; the one line that `main` makes of it is tested below."""
    assert message in mistake("bench", *arguments)


def test_a_batch_that_does_not_fit() -> None:
    assert "--max-batch-size" in refused("bench", "latency", "demo", "--batch-size", "8", "--max-batch-size", "4")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lmkit\[bench\]'"):
        check_plot(Path("x.png"))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw)))
    answered = RequestRecord(conversation=0, prompt_tokens=1, requested_tokens=3, scheduled=0, start=0, end=1,
                             bursts=[Burst(0.2, 1), Burst(0.4, 2)])  # fmt: skip
    failed = msgspec.structs.replace(answered, bursts=[], error="timeout")
    runs = [
        ThroughputRun(concurrency=n, summary=summarize(rs), steps=1, preemptions=0, skipped_turns=0, requests=rs)
        for n, rs in ((1, [answered]), (4, [answered, failed]), (None, [failed]))
    ]
    plot_requests(tmp_path / f"requests{suffix}", "title", runs)
    one = Distribution(1, 5.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0)
    shapes = [
        LatencyRun(batch_size=size, input_len=8, output_len=1 if decode is None else 4, repeats=1, prefill_ms=one,
                   prefill_tokens_per_s=10.0, decode_ms_per_token=decode, decode_tokens_per_s=None,
                   decode_step_ms=decode, total_ms=one)
        for size in (1, 2) for decode in (one, None)
    ]  # fmt: skip
    plot_latency(tmp_path / f"latency{suffix}", "title", shapes)
    assert all(file.stat().st_size > 5000 for file in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    for axes in (axes for figure in drawn for axes in figure.axes):
        assert axes.get_ylim()[0] == 0
        assert axes.get_xlim()[0] == 0 or axes.get_xlabel() == "run"  # runs have names
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        if axes.get_legend():  # beside the data, so it hides none
            assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
