"""What /metrics says about the KV cache and the scheduler."""

from __future__ import annotations

from lmkit.turbo.request import EngineStats
from tests.serve.in_process import App, ScriptedEngine, StubEngine

FIGURES = EngineStats(
    prefix_tokens=100,
    prefix_hits=60,
    tier_hits={"host": 7, "disk": 3},
    blocks_cached=12,
    evicted_blocks=5,
    sessions=2,
    decisions={"admitted: best match": 4, "waits: no blocks": 1},
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
    assert found['vllm:cache_config_info{block_size="16",model_name="model",num_gpu_blocks="8"}'] == 1


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
