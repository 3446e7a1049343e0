"""A prompt that one engine computes while another fetches its blocks: the same tokens, whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers import awaited
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from tests.turbo.engine.test_engine import engine_for, tokens
from tests.turbo.engine.test_engine_cache import FIRST
from tests.turbo.engine.test_engine_peer import ANSWERS, SHORT, answer, hybrid, key, patient  # noqa: F401 - fixtures
from tests.turbo.kv.test_tiers_filling import part_arrives

PROMPT = FIRST  # 201 tokens: several steps
Pair = tuple[Engine, Engine, str]


@pytest.fixture
def pair(demo_model: Path, key: str) -> Iterator[Pair]:  # noqa: F811
    """An engine that computes prompts in steps of 32 tokens, one that decodes, and the address of the first."""
    keep = {"kv_key_file": key, "kv_dtype": "int8"}
    prefill = engine_for(demo_model, kv_host_memory=64 << 20, kv_listen="127.0.0.1:0", max_step_tokens=32, **keep)
    decode = engine_for(demo_model, kv_peer="named", **keep)
    yield prefill, decode, f"127.0.0.1:{prefill.info.kv_port}"
    decode.close()
    prefill.close()


def ask(pair: Pair, params: dict[str, Any], *, steps: int = 1000, prompt_ids: list[int] = PROMPT) -> list[StepOutput]:
    """The outputs of the decode engine. The other one begins first, and ends its block server after so many steps."""
    prefill, decode, address = pair
    prompt = SamplingParams(max_tokens=0, seed=0)
    prefill.add(Request(request_id="p", prompt_ids=prompt_ids, params=prompt, gives_kv=True))
    prefill.step()
    wanted = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    decode.add(Request(request_id="d", prompt_ids=prompt_ids, params=wanted, kv_from=address))
    outputs: list[StepOutput] = []
    while decode.has_work():
        outputs += decode.step()
        if prefill.has_work() and steps > 0:
            prefill.step()
        steps -= 1
        if not steps and prefill._block_server is not None:
            prefill._block_server.close()
    return outputs


@pytest.mark.parametrize("params", ANSWERS.values(), ids=ANSWERS)
def test_blocks_come_while_the_prompt_is_computed(pair: Pair, demo_model: Path, params: dict[str, Any]) -> None:
    prefill, decode, _ = pair
    tiers, arrived = decode._tiers, []
    assert tiers is not None
    assert tiers._awaited is not None
    place = tiers._awaited._place

    def placed(*args: Any) -> None:
        place(*args)
        arrived.append(prefill.has_work())

    tiers._awaited._place = placed
    outputs = ask(pair, params)
    assert tokens(outputs) == answer(engine_for(demo_model, kv_dtype="int8"), PROMPT, **params)[0]
    full = (len(PROMPT) - 1) // 8 * 8
    assert outputs[0].cached_tokens == full
    assert decode.stats().tier_hits == {"peer": full}
    assert decode.stats().tiers["failures"] == 0
    assert arrived.count(True) > len(arrived) // 2  # before the other engine was done
    for engine in (prefill, decode):
        engine.check_integrity()


@pytest.mark.parametrize("params", ANSWERS.values(), ids=ANSWERS)
def test_layers_come_while_others_are_computed(
    pair: Pair, demo_model: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step goes on when the other engine has a part of its blocks."""
    prefill, decode, _ = pair
    assert prefill._tiers is not None
    assert prefill._tiers.filling is not None
    has_part, layers = part_arrives(monkeypatch), list[int]()
    filling, advance = prefill._tiers.filling, prefill._tiers.filling.advance

    def advanced(layer: int) -> None:
        advance(layer)
        layers.append(layer)
        if layers.count(0) == 2 and layer == 0:
            assert has_part.wait(20)

    monkeypatch.setattr(filling, "advance", advanced)
    outputs = ask(pair, params)
    assert tokens(outputs) == answer(engine_for(demo_model, kv_dtype="int8"), PROMPT, **params)[0]
    assert decode.stats().tier_hits == {"peer": (len(PROMPT) - 1) // 8 * 8}


def test_blocks_that_the_tiers_have_lost_are_given_again(pair: Pair, demo_model: Path) -> None:
    prefill, decode, _ = pair
    answer(prefill, PROMPT, count=1)
    while prefill.stats().tiers["queued_saves"]:
        time.sleep(0.01)
    assert prefill._tiers is not None
    assert prefill._tiers._host is not None
    prefill._tiers._host._blocks.clear()
    ask(pair, {})
    assert decode.stats().tier_hits == {"peer": (len(PROMPT) - 1) // 8 * 8}


@pytest.mark.usefixtures("patient")
def test_states_come_after_their_blocks(hybrid: Path, key: str) -> None:  # noqa: F811
    """Also those that the tiers have lost, for a second prompt of the same beginning. Blocks without their state, which
    are all that comes before a server ends, are computed again."""
    prompt, other, whole = list(range(100, 161)), list(range(60, 121)), engine_for(hybrid, **SHORT, prefix_cache=False)
    keep = {"kv_key_file": key, "max_step_tokens": 24} | SHORT
    prefill = engine_for(hybrid, kv_host_memory=64 << 20, kv_listen="127.0.0.1:0", **keep)
    assert prefill._tiers is not None
    assert prefill._tiers._host is not None
    address = f"127.0.0.1:{prefill.info.kv_port}"
    for ids, steps, found in ((prompt, 1000, 56), (prompt, 1000, 56), (other, 2, 0)):
        decode = engine_for(hybrid, kv_peer="named", **keep)
        outputs = ask((prefill, decode, address), {}, steps=steps, prompt_ids=ids)
        assert (tokens(outputs), outputs[0].cached_tokens) == (answer(whole, ids)[0], found)
        assert decode.stats().tier_hits.get("peer", 0) == found
        assert decode.stats().tiers["failures"] == (not found)
        for engine in (prefill, decode):
            engine.check_integrity()
        decode.close()
        prefill._tiers._host.clear()
    prefill.close()


def test_an_engine_that_is_lost_on_the_way_means_computing(pair: Pair, demo_model: Path) -> None:
    outputs = ask(pair, {"seed": 3, "temperature": 1.0}, steps=2)
    expected = answer(engine_for(demo_model, kv_dtype="int8"), PROMPT, seed=3, temperature=1.0)[0]
    assert tokens(outputs) == expected
    assert 0 < outputs[0].cached_tokens < 200
    assert pair[1].stats().tiers["failures"] == 1


@pytest.mark.parametrize("source", ["nobody computes it", "127.0.0.1:1", "nonsense"])
def test_a_prompt_that_nobody_computes_is_computed(
    pair: Pair, demo_model: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(awaited, "FIRST_SECONDS", 0.05)
    _, decode, address = pair
    source = address if "nobody" in source else source
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    decode.add(Request(request_id="d", prompt_ids=PROMPT, params=params, kv_from=source))
    outputs: list[StepOutput] = []
    while decode.has_work():
        outputs += decode.step()
    assert tokens(outputs) == answer(engine_for(demo_model, kv_dtype="int8"), PROMPT)[0]
    assert outputs[0].cached_tokens == 0


def test_an_aborted_request_waits_no_longer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "FIRST_SECONDS", 60.0)
    monkeypatch.setattr("lmkit.turbo.scheduling.planner.PATIENCE", (60.0, 4.0))
    _, decode, address = pair
    params = SamplingParams(max_tokens=12)
    decode.add(Request(request_id="d", prompt_ids=PROMPT, params=params, kv_from=address))
    decode.step()
    decode.abort("d")
    started = time.monotonic()
    while any(decode.scheduler._slots) and time.monotonic() - started < 30:
        decode.step()
        time.sleep(0.01)
    assert not any(decode.scheduler._slots)
    decode.check_integrity()
