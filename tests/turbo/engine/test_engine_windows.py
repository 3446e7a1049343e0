"""A real model whose layers look back differently: its layers' blocks leave at different times, its tokens are those of
an engine that keeps everything in one group."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kv_dtype import KV_DTYPES, kv_dtype
from lmkit.models.decoder import Decoder
from lmkit.models.kv_layout import KVClass, KVLayout
from lmkit.models.loader import load_model
from lmkit.turbo.engine import memory
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from tests.models import tiny
from tests.turbo.engine.test_engine import propose_drafts, run

WINDOW, LAYERS = 20, ["sliding_attention", "sliding_attention", "full_attention"] * 2
SMALL: dict[str, Any] = {
    "device": "cpu", "activations": "exact", "packed_cache": False, "block_size": 4, "max_batch_size": 3,
    "max_step_tokens": 24, "max_model_len": 160,
}  # fmt: skip
SHARED = [(7 * i + 3) % 190 for i in range(90)]
PROMPTS = [SHARED[:70], [5, 6, 7], SHARED[:60] + [9] * 20, SHARED[:13], [11] * 50 + SHARED[:30]]
BLOCK = 4 * 2 * 2 * 2  # rows of 8 elements: tokens, layers of a group, heads, K and V


def make(path: Path, window: int = WINDOW, **sizes: Any) -> Path:
    shape = {"num_hidden_layers": 6, "layer_types": LAYERS, "sliding_window": window, "max_position_embeddings": 256}
    tiny.make(path, "qwen2-window", **(shape | sizes))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_model(checkpoint, activations="exact")


def engine_of(decoder: Decoder, **options: Any) -> Engine:
    return Engine.of(decoder, EngineConfig(**(SMALL | options)))


def in_one_group(decoder: Decoder, **options: Any) -> Engine:
    """As if all layers saw everything: nothing leaves, nothing is found again, prompts are computed as a whole."""
    one = KVLayout((KVClass(),), (tuple(range(6)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "layout_of", lambda *args: one)
        return engine_of(decoder, prefix_cache=False, max_batch_size=1, max_step_tokens=160, **options)


def requests(prompts: list[list[int]] = PROMPTS, name: str = "") -> list[Request]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5, logprobs=2)
    return [Request(request_id=f"{name}{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]


def answers(outputs: dict[str, list[StepOutput]]) -> list[Any]:
    """Tokens and the exact log-probabilities, of each request."""
    return [[(x.token_id, x.logprob, x.top) for output in parts for x in output.logprobs] for parts in outputs.values()]


@pytest.mark.parametrize("kind", sorted(KV_DTYPES))
def test_chunks_cache_and_preemption_change_no_bit(decoder: Decoder, kind: str) -> None:
    want = answers(run(in_one_group(decoder, kv_dtype=kind), requests()))
    block_bytes = BLOCK * kv_dtype(kind).row_bytes(8)
    engine = engine_of(decoder, kv_dtype=kind, kv_memory=100 * block_bytes, max_model_len=130)
    assert engine.scheduler.limits.kv.classes == (KVClass(), KVClass(WINDOW, 0, 2))
    assert engine.scheduler.limits.kv.num_blocks == 100
    assert answers(run(engine, requests())) == want
    assert answers(run(engine, requests(name="again"))) == want
    stats = engine.stats()
    assert stats.prefix_hits > 100
    assert stats.preemptions > 0, "the pool is too large to tell"
    engine.close()


def test_a_window_longer_than_every_sequence(tmp_path: Path) -> None:
    decoder = load_model(make(tmp_path, window=200), activations="exact")
    want = answers(run(in_one_group(decoder), requests()))
    engine = engine_of(decoder)
    assert answers(run(engine, requests())) == answers(run(engine, requests(name="again"))) == want
    assert engine.stats().prefix_hits > 200


def test_sinks_stay_in_sight(checkpoint: Path) -> None:
    decoder = load_model(checkpoint, activations="exact", attention_sinks=6)
    want = answers(run(in_one_group(decoder), requests()))
    engine = engine_of(decoder, attention_sinks=6)
    assert engine.scheduler.limits.kv.classes[1].sinks == 6
    assert answers(run(engine, requests())) == answers(run(engine, requests(name="again"))) == want


def test_drafts_change_no_bit(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = answers(run(in_one_group(decoder), requests()))
    engine = engine_of(decoder, overlap=False)
    lengths = propose_drafts(engine, {str(i): [x[0] for x in a] for i, a in enumerate(alone)}, monkeypatch)
    assert answers(run(engine, requests())) == alone
    assert sum(lengths) > 20


@pytest.mark.parametrize("disk", [False, True])
def test_blocks_of_every_group_come_back_from_a_tier(checkpoint: Path, tmp_path: Path, disk: bool) -> None:
    below = {"kv_disk_path": str(tmp_path)} if disk else {"kv_host_memory": 1 << 22}
    block_bytes = BLOCK * kv_dtype("float32").row_bytes(8)
    small = {"kv_memory": 100 * block_bytes, "max_model_len": 130, "kv_dtype": "float32"}
    engine = Engine(str(checkpoint), EngineConfig(**(SMALL | small | below)))
    assert engine._tiers is not None
    engine._tiers.load_seconds = lambda keys: -1.0  # type: ignore[method-assign]
    found = []
    for turn in range(2):
        for number, prompt in enumerate((SHARED[:80], SHARED[80:][::-1] + SHARED[:60])):  # the pool holds one of them
            found.append(run(engine, [Request(request_id="r", prompt_ids=prompt, params=requests()[0].params)])["r"])
            deadline = time.monotonic() + 20
            while engine.stats().tiers["queued_saves"] and time.monotonic() < deadline:
                time.sleep(0.002)
            assert (found[-1][0].cached_tokens > 40) == (turn == 1), number
    assert answers({"r": found[0]}) == answers({"r": found[2]})
    assert answers({"r": found[1]}) == answers({"r": found[3]})
    assert sum(engine.stats().tier_hits.values()) > 40
    engine.close()
