"""What /metrics says about the KV cache and the scheduler."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lmkit.serve.load_log import load_line
from lmkit.serve.metrics import HISTOGRAMS
from lmkit.turbo.request import EngineStats
from tests.serve.in_process import TEXT, TEXT_PATH, App, ScriptedEngine, StubEngine

NAME = re.compile(r"lmkit:\w+")

FIGURES = EngineStats(
    prefix_tokens=100,
    prefix_hits=60,
    tier_hits={"host": 7, "disk": 3},
    blocks_cached=12,
    evicted_blocks=5,
    sessions=2,
    blocks_total=8,
    blocks_backed=2,
    decisions={"admitted: best match": 4, "waits: no blocks": 1},
    draft_seconds_saved=-1.5,
    tiers={"host bytes": 4096},
)


def samples(figures: EngineStats) -> dict[str, float]:
    engine = ScriptedEngine()
    engine.figures = figures
    lines = App(engine).request("GET", "/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_the_cache() -> None:
    found = samples(FIGURES)
    label = '{model_name="model"}'
    for prefix in ("lmkit", "vllm"):
        assert found[f"{prefix}:prefix_cache_queries_total{label}"] == 100
        assert found[f"{prefix}:prefix_cache_hits_total{label}"] == 60
    assert found['lmkit:kv_tier_hits_total{model_name="model",tier="disk"}'] == 3
    assert found['lmkit:kv_tier_hits_total{model_name="model",tier="host"}'] == 7
    assert found['lmkit:kv_tiers{figure="host bytes",model_name="model"}'] == 4096
    assert found[f"lmkit:cached_blocks{label}"] == 12
    assert found[f"lmkit:evicted_blocks_total{label}"] == 5
    assert found[f"lmkit:sessions{label}"] == 2
    for metric, used, reserved in (("kv", 1024, 4096), ("engine", 0, 9000)):
        states = {"used": used, "reserved": reserved}
        name = f"lmkit:{metric}_memory_bytes"
        assert {state: found[f'{name}{{model_name="model",state="{state}"}}'] for state in states} == states
    config = next(name for name in found if name.startswith("vllm:cache_config_info{"))
    for label in ('block_size="16"', 'num_gpu_blocks="8"', 'kv_cache_size_tokens="128"'):
        assert label in config


def test_the_time_that_drafts_lost() -> None:
    assert samples(FIGURES)['lmkit:spec_decode_time_saved_seconds{model_name="model"}'] == -1.5


def test_the_scheduler_s_decisions() -> None:
    found = samples(FIGURES)
    name = "lmkit:scheduler_decisions_total"
    assert found[f'{name}{{decision="admitted",model_name="model",reason="best match"}}'] == 4
    assert found[f'{name}{{decision="waits",model_name="model",reason="no blocks"}}'] == 1


def test_nothing_is_said_before_anything_happened() -> None:
    names = {name.partition("{")[0] for name in samples(EngineStats())}
    assert not names & {"lmkit:kv_tier_hits_total", "lmkit:kv_tiers", "lmkit:scheduler_decisions_total"}
    engine = StubEngine()
    engine.info = None
    assert "vllm:cache_config_info{" not in App(engine).request("GET", "/metrics").text


# The names in the dashboards of vLLM's documentation.
VLLM_DASHBOARD = (
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum", "generation_tokens_total", "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "prompt_tokens_total",
    "request_decode_time_seconds_sum", "request_generation_tokens_bucket", "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_queue_time_seconds_sum", "request_success_total",
    "time_per_output_token_seconds_bucket", "time_to_first_token_seconds_bucket",
)  # fmt: skip


def after_a_request() -> str:
    app = App(ScriptedEngine())
    assert app.post(TEXT_PATH, TEXT).status_code == 200
    return app.request("GET", "/metrics").text


def test_lengths_and_times_are_observed_once_a_request_with_both_names() -> None:
    text = after_a_request()
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    label = '{model_name="model"}'
    for prefix in ("lmkit", "vllm"):
        for name in HISTOGRAMS:
            assert found[f"{prefix}:{name}_count{label}"] == 1, name
        assert found[f"{prefix}:request_generation_tokens_sum{label}"] == 2
        assert found[f"{prefix}:generation_tokens_total{label}"] == 2
    assert found['lmkit:requests_total{finish_reason="length",model_name="model"}'] == 1
    assert found['vllm:request_success_total{finished_reason="length",model_name="model"}'] == 1


def test_prometheus_reads_all_and_each_name_stands_once() -> None:
    families = list(text_string_to_metric_families(after_a_request()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples]
    assert len(series) == len(set(series))
    assert {f"vllm:{name}" for name in VLLM_DASHBOARD} <= {name for name, _ in series}


def test_the_board_for_grafana_asks_for_names_that_exist() -> None:
    board = json.loads((Path(__file__).parents[2] / "docs/deploy/grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(asked) > 15
    text = after_a_request()
    assert not {name for name in asked if not re.search(rf"^{name}[ {{]", text, re.M)}


def test_the_load_in_a_line() -> None:
    before = EngineStats(steps=10, prompt_tokens=100, generation_tokens=50)
    now = EngineStats(
        steps=30, prompt_tokens=1100, generation_tokens=550, num_running=3, blocks_used=1, blocks_total=4,
        prefix_tokens=1000, prefix_hits=600,
    )  # fmt: skip
    line = "3 running, 0 waiting, 100 prompt tokens/s, 50 tokens/s, 25% of the KV blocks in use"
    assert load_line(before, now, 10.0) == f"{line}, 60% of prompt tokens cached"
    assert load_line(now, now, 10.0) == ""
    after_a_start = EngineStats(steps=1, generation_tokens=20, num_running=1)
    assert load_line(now, after_a_start, 10.0).startswith("1 running, 0 waiting, 0 prompt tokens/s, 2 tokens/s")
    assert load_line(now, EngineStats(steps=30, num_waiting=2), 10.0).startswith("0 running, 2 waiting")
