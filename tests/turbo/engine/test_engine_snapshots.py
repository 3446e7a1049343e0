"""Engines of models with recurrent states: a cached prefix, a preemption and chunks change no bit of an answer."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kv_dtype import FLOAT32
from lmkit.models import load_spec
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.memory import RECORD_BYTES
from lmkit.turbo.kv.block_log import BlockStored
from lmkit.turbo.kv.publisher import fold, recorded
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.scheduling.allowance import Allowance
from lmkit.turbo.scheduling.planner import Planner, Step
from lmkit.turbo.scheduling.scheduler import Scheduler
from lmkit.turbo.scheduling.speculation import Speculation
from lmkit.turbo.sequence import Sequence
from tests.models import tiny
from tests.turbo.kv.test_kv_events import expected_hash

SIZES: dict[str, Any] = {"block_size": 4, "max_step_tokens": 16, "max_model_len": 64, "kv_dtype": "float32"}


# Attention and a recurrent block in one layer.
SLOW = pytest.param("falcon-h1", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5-recurrent", "lfm2", "mamba2", SLOW])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp(request.param)
    tiny.make(path, request.param)
    return load_model(path)


def requests(rng: random.Random, count: int, **options: Any) -> list[Request]:
    """Prompts that go on from others' prompts, at any token."""
    texts: list[list[int]] = [[]]
    made = []
    for number in range(count):
        known = rng.choice(texts)
        prompt = known[: rng.randint(0, len(known))] + [rng.randrange(199) for _ in range(rng.choice([1, 3, 15]))]
        texts.append(prompt := prompt[:45])
        chosen = {"max_tokens": rng.choice([1, 5, 14]), "temperature": rng.choice([0.0, 1.0])} | options
        params = SamplingParams(seed=number, logprobs=1, ignore_eos=True, **chosen)
        made += [
            Request(request_id=f"{number}.{i}", prompt_ids=prompt, params=params) for i in range(rng.choice([1, 1, 3]))
        ]
    return made


def answers(engine: Engine, made: list[Request], rng: random.Random) -> dict[str, list[Any]]:
    """The answers, with requests that come a few at a time."""
    found: dict[str, list[Any]] = {}
    coming = list(made)
    while coming or engine.has_work():
        for request in (taken := coming[: rng.randint(0, 4)]):
            engine.add(request)
        del coming[: len(taken)]
        for output in engine.step():
            assert output.finish_reason != "error"
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs, strict=True))
        engine.check_integrity()
    return found


def block_bytes(decoder: Decoder) -> int:
    return 4 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in decoder.spec.layers) or RECORD_BYTES


def test_snapshots_change_no_bit(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_pace", lambda *_: None)  # measured times would decide the chunks and so the hits
    rng = random.Random(3)
    made = requests(rng, 30)
    plain = Engine.of(decoder, EngineConfig(**SIZES | {"max_step_tokens": 64}, max_batch_size=1, prefix_cache=False))
    expected = answers(plain, made, rng)
    plain.close()
    engine = Engine.of(decoder, EngineConfig(**SIZES, max_batch_size=5, kv_memory=18 * block_bytes(decoder)))
    for _ in range(2):
        assert answers(engine, made, rng) == expected
    stats = engine.stats()
    engine.close()
    assert stats.preemptions > 3
    assert stats.prefix_hits > 0.3 * stats.prefix_tokens
    assert stats.snapshots_total == 80
    assert 0 < stats.snapshots_used <= 80


def test_what_is_computed_ahead_goes_on_within_a_block(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state stands after its last token, wherever that is. Two requests begin there at once."""
    monkeypatch.setattr(Allowance, "covers", lambda *_: True)  # whatever a step takes here
    rng = random.Random(6)
    plain = Engine.of(decoder, EngineConfig(**SIZES | {"max_step_tokens": 64}, max_batch_size=1, prefix_cache=False))
    engine = Engine.of(decoder, EngineConfig(**SIZES, max_batch_size=2))
    for known in (8, 9, 11, 22):
        prompt = [rng.randrange(199) for _ in range(known)]
        params = SamplingParams(max_tokens=0)
        answers(engine, [Request(request_id="ahead", prompt_ids=prompt, params=params, is_ahead=True)], rng)
        before, params = engine.stats().prefix_hits, SamplingParams(max_tokens=5, temperature=0.0, logprobs=1)
        made = [
            Request(request_id=name, prompt_ids=[*prompt, end], params=params) for name, end in (("a", 1), ("b", 2))
        ]
        assert answers(engine, made, rng) == answers(plain, made, rng)
        assert engine.stats().prefix_hits - before == 2 * known
    plain.close()
    engine.close()


def test_events_say_how_much_is_found(decoder: Decoder) -> None:
    """What a router reads off the events is what the next request finds, whatever snapshots have left."""
    rng, known = random.Random(4), dict[tuple[int, int], BlockStored]()
    engine = Engine.of(decoder, EngineConfig(**SIZES, max_batch_size=1, kv_memory=100 * block_bytes(decoder)))
    kv, limits = engine.scheduler.kv, engine.scheduler.limits.kv
    events, found = recorded(kv.caches, limits, kv.snapshots), 0
    assert limits.num_snapshots == 16
    for request in requests(rng, 30):
        fold(known, events)
        events.clear()
        ends = range(4, len(request.prompt_ids), 4)
        hashes = [expected_hash(("", ""), request.prompt_ids[:end], 4) for end in ends]
        there = [{c for c in (0, 1) if (c, name) in known} for name in hashes]
        blocks = next((i for i, classes in enumerate(there) if 0 not in classes), len(there))
        reusable = max((end for end, classes in zip(ends[:blocks], there, strict=False) if 1 in classes), default=0)
        engine.add(request)
        outputs: list[StepOutput] = []
        while engine.has_work():
            outputs += engine.step()
        assert outputs[0].cached_tokens == reusable
        found += reusable
    engine.close()
    assert found > 100
    assert kv.snapshots is not None
    assert kv.snapshots.num_evicted


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tiers_change_no_bit(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves the device's cache is found below it, with the states. A disk keeps both over a restart."""
    monkeypatch.setattr(Scheduler, "_pace", lambda *_: None)
    path, rng = tmp_path / "model", random.Random(5)
    tiny.make(path, "qwen3-next")
    shutil.copyfile(DEMO_FOLDER / "tokenizer.json", path / "tokenizer.json")
    made = requests(rng, 16)
    options = SIZES | {"device": "cpu", "packed_cache": False}
    plain = Engine(str(path), EngineConfig(**options | {"max_step_tokens": 64}, max_batch_size=1, prefix_cache=False))
    expected = answers(plain, made, rng)
    plain.close()
    spec = load_spec(json.loads((path / "config.json").read_text()))
    block = 4 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in spec.layers)
    assert spec.state_bytes > 2 * block  # a state has several parts
    below = {"kv_host_memory": 2000 * block} if tier == "host" else {"kv_disk_path": str(tmp_path / "disk")}
    config = EngineConfig(**options, max_batch_size=5, kv_memory=18 * block, **below)
    for rounds in (2, 1) if tier == "disk" else (2,):
        engine = Engine(str(path), config)
        assert engine._tiers is not None
        engine._tiers.load_seconds = lambda keys: -1.0  # type: ignore[method-assign]
        for _ in range(rounds):
            assert answers(engine, made, rng) == expected
            while engine.stats().tiers["queued_saves"]:
                time.sleep(0.001)
        hits = engine.stats().tier_hits
        engine.close()
        assert hits.get(tier, 0) > 50


@pytest.mark.parametrize(
    ("family", "cached"), [("qwen3-next", True), ("qwen3.5", False), ("lfm2", True), ("mamba2", True)]
)
def test_drafts_change_no_bit(family: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft leaves nothing in a state, and the states take every right one: in all chunks, with snapshots in
    the middle of draft tokens, after preemptions, with penalties."""
    tiny.make(tmp_path, family)
    decoder, rng = load_model(tmp_path), random.Random(8)
    made = requests(rng, 10, max_tokens=18, repetition_penalty=1.3, frequency_penalty=0.5)
    plain = Engine.of(decoder, EngineConfig(**SIZES | {"max_step_tokens": 64}, max_batch_size=1, prefix_cache=False))
    expected = answers(plain, made, rng)
    plain.close()

    def draft(sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            answer = [token for token, _ in expected.get(seq.request_id, [])][seq.num_outputs :][: rng.randint(0, 7)]
            if not seq.num_pending:
                seq.propose([token if rng.random() < 0.8 else (token + 1) % 199 for token in answer])

    def schedule(self: Scheduler) -> StepPlan | None:
        draft(self._slots.running.values())
        return make_plan(self)

    def add_decodes(self: Planner, step: Step, decoding: list[Sequence], spare: int) -> None:
        add(self, step, decoding, 9)  # draft tokens also beside prompts

    def awaits_tokens(self: Scheduler, speculation: Speculation) -> bool:
        drafted = any(seq.num_drafted for seq in self._slots.running.values())
        return drafted or (bool(self._under_way) and rng.random() < 0.6)

    make_plan, add = Scheduler.schedule, Planner._add_decodes
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Planner, "_add_decodes", add_decodes)
    monkeypatch.setattr(Scheduler, "_awaits_tokens", awaits_tokens)
    options: dict[str, Any] = (
        {"kv_memory": 18 * block_bytes(decoder), "overlap": False} if cached else {"prefix_cache": False}
    )
    config = EngineConfig(**SIZES, max_batch_size=5, speculate="ngram", max_draft_tokens=7, **options)
    engine = Engine.of(decoder, config)
    assert answers(engine, made, rng) == expected
    assert answers(engine, made, rng) == expected
    stats = engine.stats()
    engine.close()
    assert 40 < stats.accepted_tokens < 0.9 * stats.draft_tokens
    assert bool(stats.preemptions) == bool(stats.prefix_hits) == cached
