"""What an engine finds again, on the device and below it: the same tokens come out, and less is computed."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lmkit.errors import ConfigError
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers import folder
from lmkit.turbo.request import Request, SamplingParams
from tests.turbo.engine.test_engine import engine_for, run, tokens

BLOCK_BYTES = 32 << 10  # of the demo, 8 tokens in bfloat16
FIRST, SECOND = list(range(100, 301)), list(range(500, 701))


def ask(engine: Engine, prompt: list[int], count: int = 12, **fields: Any) -> tuple[list[int], int]:
    """(tokens, how many of the prompt were cached)."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, seed=0)
    outputs = run(engine, [Request(request_id="r", prompt_ids=prompt, params=params, **fields)])["r"]
    assert outputs[-1].finish_reason == "length", outputs[-1].error
    return tokens(outputs), outputs[0].cached_tokens


def settle(engine: Engine) -> None:
    """Until all is saved."""
    end = time.monotonic() + 20
    while engine.stats().tiers["queued_saves"]:
        assert time.monotonic() < end
        time.sleep(0.002)


def always_load(engine: Engine) -> None:
    """However long it takes."""
    assert engine._tiers is not None
    engine._tiers.load_seconds = lambda keys: -1.0  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def answers(demo_model: Path) -> dict[str, list[int]]:
    """Of an engine that keeps nothing."""
    engine = engine_for(demo_model, prefix_cache=False)
    return {"first": ask(engine, FIRST)[0], "second": ask(engine, SECOND)[0]}


def test_a_prompt_its_answer_and_their_beginnings_are_found(demo_model: Path, answers: dict[str, list[int]]) -> None:
    engine, without = engine_for(demo_model), engine_for(demo_model, prefix_cache=False)
    answer = answers["first"]
    assert ask(engine, FIRST) == (answer, 0)
    assert ask(engine, FIRST) == (answer, 200)
    further = [*FIRST, *answer, 7, 8, 9]
    assert ask(engine, further) == (ask(without, further)[0], 201 + 11)  # the last token was sampled, never computed
    other = [*FIRST[:93], 11, 12]
    assert ask(engine, other) == (ask(without, other)[0], 93)
    assert ask(without, other) == (ask(without, other)[0], 0)
    stats = engine.stats()
    assert (stats.prefix_tokens, stats.prefix_hits) == (201 + 201 + 216 + 95, 200 + 212 + 93)
    assert (without.stats().prefix_hits, without.stats().blocks_cached) == (0, 0)


@pytest.mark.parametrize("fields", [{"tenant": "b"}, {"cache_salt": "b"}])
def test_others_find_nothing(demo_model: Path, tmp_path: Path, fields: dict[str, str]) -> None:
    engine = engine_for(demo_model, kv_disk_path=str(tmp_path))
    always_load(engine)
    answer, _ = ask(engine, FIRST)
    settle(engine)
    assert ask(engine, FIRST, **fields) == (answer, 0)
    assert ask(engine, FIRST, **fields) == (answer, 200)
    assert engine.stats().tier_hits == {}
    engine.close()


def test_a_lease_ends_without_requests(demo_model: Path) -> None:
    engine, now = engine_for(demo_model, session_lease=10), 0.0
    engine.scheduler._clock = lambda: now
    engine.add(Request(request_id="r", prompt_ids=FIRST, params=SamplingParams(seed=0), session_id="s"))
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert (stats.sessions, stats.blocks_used > 20) == (1, True)
    now = 11.0
    stats = engine.stats()
    assert (stats.sessions, stats.blocks_used, stats.blocks_cached > 20) == (0, 0, True)
    engine.check_integrity()


def test_siblings_share_a_prompt_that_is_under_way(demo_model: Path) -> None:
    engine = engine_for(demo_model, max_step_tokens=64)
    params = [SamplingParams(max_tokens=4, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    outputs = run(
        engine, [Request(request_id=f"r{i}", prompt_ids=FIRST, params=params) for i, params in enumerate(params)]
    )
    assert [outputs[f"r{i}"][0].cached_tokens for i in range(4)] == [0, 200, 200, 200]
    assert engine.stats().prefix_hits == 600


def test_host_memory_has_what_the_device_had_no_room_for(demo_model: Path, answers: dict[str, list[int]]) -> None:
    small = {"kv_memory": 32 * BLOCK_BYTES}  # one of the two
    for host, hits in ((None, 0), (64 * BLOCK_BYTES, 1)):
        engine = engine_for(demo_model, kv_host_memory=host, **small)
        if host:
            always_load(engine)
        for _ in range(3):
            for name, prompt in (("first", FIRST), ("second", SECOND)):
                answer, cached = ask(engine, prompt)
                assert answer == answers[name]
                if host:
                    settle(engine)
        stats = engine.stats()
        assert stats.evicted_blocks > 40
        assert (stats.tier_hits.get("host", 0) > 4 * 100, cached >= 200 - 7) == (bool(hits), bool(hits))
        assert stats.tiers.get("failures", 0) == 0
        engine.close()


@pytest.mark.parametrize("host", [None, 64 * BLOCK_BYTES])
def test_a_new_engine_answers_from_disk(
    demo_model: Path, tmp_path: Path, host: int | None, answers: dict[str, list[int]]
) -> None:
    for start in range(3):
        engine = engine_for(demo_model, kv_disk_path=str(tmp_path), kv_host_memory=host)
        always_load(engine)
        assert ask(engine, FIRST) == (answers["first"], 200 if start else 0)
        assert engine.stats().tier_hits == ({"disk": 200} if start else {})
        assert engine.stats().prefix_hits == 0
        settle(engine)
        engine.close()


def test_what_computes_or_stores_differently_is_never_found(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    kv = str(tmp_path / "kv")

    def cached(**options: Any) -> int:
        engine = engine_for(model, kv_disk_path=kv, **options)
        always_load(engine)
        found = ask(engine, FIRST)[1]
        engine.close()
        return found

    kinds: list[dict[str, Any]] = [
        {}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"block_size": 16}, {"dtype": "float32"}, {"lm_head": "int8"}
    ]  # fmt: skip
    assert [cached(**options) for options in kinds] == [0] * len(kinds)
    assert all(cached(**options) >= 192 for options in kinds)
    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).view(-1)[5] += 1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert cached() == 0
    assert cached() == 200


@pytest.mark.parametrize("seconds", [10.0, 1e-9])
def test_it_loads_what_is_quicker_to_load(
    demo_model: Path, tmp_path: Path, seconds: float, answers: dict[str, list[int]]
) -> None:
    engine = engine_for(demo_model, kv_disk_path=str(tmp_path))
    ask(engine, FIRST)
    settle(engine)
    engine.close()
    engine = engine_for(demo_model, kv_disk_path=str(tmp_path))
    assert engine._tiers is not None
    engine._tiers._cost.per_block["disk"] = engine._tiers._cost.latency = seconds
    quick = seconds < 1
    assert ask(engine, FIRST) == (answers["first"], 200 if quick else 0)
    decisions = engine.stats().decisions
    assert decisions.get("loading: quicker than computing", 0) == quick
    assert decisions.get("computing: quicker than loading", 0) == (not quick)
    assert engine.stats().tier_hits == ({"disk": 200} if quick else {})
    engine.close()


def test_an_engine_that_cannot_be_made_leaves_the_folder(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "WAIT_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("lmkit.turbo.engine.loading.load_decoder", None)
        with pytest.raises(TypeError):
            engine_for(demo_model, kv_disk_path=str(tmp_path))
    gc.collect()
    engine_for(demo_model, kv_disk_path=str(tmp_path)).close()


def test_one_folder_serves_one_engine(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "WAIT_SECONDS", 0.0)
    engine = engine_for(demo_model, kv_disk_path=str(tmp_path))
    with pytest.raises(ConfigError, match="another engine"):
        engine_for(demo_model, kv_disk_path=str(tmp_path))
    other = engine_for(demo_model, kv_disk_path=str(tmp_path), kv_dtype="int8")  # has a folder of its own in there
    other.close()
    engine.close()
    engine_for(demo_model, kv_disk_path=str(tmp_path)).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_host_memory": 1 << 20, "prefix_cache": False}, "do not turn it off"),
        ({"kv_disk_path": "kv", "prefix_cache": False}, "do not turn it off"),
        ({"kv_disk_memory": 1 << 30}, "name that folder too"),
        ({"kv_host_memory": BLOCK_BYTES - 1}, "kv_host_memory 32767 holds no block of 32768 bytes"),
        ({"kv_disk_path": "kv", "kv_disk_memory": BLOCK_BYTES}, "kv_disk_memory 32768 holds no block of 36864 bytes"),
        ({"kv_disk_path": "file"}, "is a file"),
    ],
)
def test_tiers_that_cannot_be(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lmkit.turbo.engine.loading.load_decoder", None)  # it is said before any weight is loaded
    Path("file").touch()
    with pytest.raises(ConfigError, match=words):
        engine_for(demo_model, **options)


def test_where_the_kv_came_from_is_told_of_the_prompt_alone(demo_model: Path) -> None:
    """Known tokens of an answer that another engine began are found in the cache, too."""
    engine = engine_for(demo_model, kv_memory=4 << 20)

    def kv(prompt: list[int], known: list[int]) -> list[tuple[int, str]]:
        params = SamplingParams(max_tokens=len(known) + 2, ignore_eos=True, seed=0)
        request = Request(request_id="r", prompt_ids=prompt, known_ids=known, params=params, tells_kv=True)
        return run(engine, [request])["r"][0].kv

    known = SECOND[:40]
    assert kv(FIRST, []) == [(201, "computed")]
    assert kv(FIRST, known) == [(201, "cache")]
    assert kv(FIRST[:100], known) == [(100, "cache")]
    assert kv([*FIRST, *known], [7, 8]) == [(241, "cache")]
    assert kv([*FIRST, *known, 9], []) == [(241, "cache"), (242, "computed")]
