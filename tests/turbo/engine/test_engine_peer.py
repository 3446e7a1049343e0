"""Prompts that one engine computes and another goes on from: the same tokens as one engine, whatever becomes of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers import awaited, peer
from lmkit.turbo.kv.tiers.keys import block_keys, root_key, state_keys
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling import planner
from tests.models import tiny
from tests.turbo.engine.test_engine import SMALL, engine_for, run, tokens
from tests.turbo.engine.test_engine_cache import FIRST, SECOND, always_load, settle

PREFILL = """
import sys, time
from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import SamplingParams, Request

engine = Engine(sys.argv[1], EngineConfig(**OPTIONS))
engine.add(Request(request_id="r", prompt_ids=PROMPT, params=SamplingParams(max_tokens=1, seed=0)))
while engine.has_work():
    engine.step()
while engine.stats().tiers["queued_saves"]:
    time.sleep(0.01)
print(engine._block_server.address[1], flush=True)
time.sleep(600)
"""
SHORT = {"max_model_len": 96}  # of the tiny models
ANSWERS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 7}}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "kv.key"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 2)
    return str(path)


def answer(engine: Engine, prompt: list[int], count: int = 12, **params: Any) -> tuple[list[int], int]:
    """(tokens, how many of the prompt were found)."""
    wanted = SamplingParams(max_tokens=count, ignore_eos=True, **params)
    outputs = run(engine, [Request(request_id="r", prompt_ids=prompt, params=wanted)])["r"]
    assert outputs[-1].finish_reason == "length", outputs[-1].error
    return tokens(outputs), outputs[0].cached_tokens


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.exhaustive), "int4"])
def test_a_decode_engine_answers_as_one_engine_does(demo_model: Path, key: str, kv_dtype: Any) -> None:
    whole = engine_for(demo_model, kv_dtype=kv_dtype, prefix_cache=False)
    prefill = engine_for(
        demo_model, kv_dtype=kv_dtype, kv_host_memory=64 << 20, kv_listen="127.0.0.1:0", kv_key_file=key
    )
    assert prefill._block_server is not None
    port = prefill._block_server.address[1]
    for prompt in (FIRST, SECOND):
        answer(prefill, prompt, count=1)
    settle(prefill)
    for name, params in ANSWERS.items():
        decode = engine_for(demo_model, kv_dtype=kv_dtype, kv_peer=f"127.0.0.1:{port}", kv_key_file=key)
        always_load(decode)
        for prompt in (FIRST, SECOND):
            assert answer(decode, prompt, **params) == (answer(whole, prompt, **params)[0], 200), name
        assert decode.stats().tier_hits == {"peer": 400}
        assert decode.stats().tiers["failures"] == 0
        decode.check_integrity()
        decode.close()
    prefill.close()


@pytest.fixture(scope="module", params=["qwen3-next", "granite-hybrid", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of attention beside the gated delta rule, Mamba-2 or short convolutions."""
    path = tmp_path_factory.mktemp(request.param)
    tiny.make(path, request.param)
    shutil.copyfile(DEMO_FOLDER / "tokenizer.json", path / "tokenizer.json")
    return path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a slow peer."""
    for name, module in (("ASK_SECONDS", peer), ("BLOCK_SECONDS", peer), ("FIRST_SECONDS", awaited)):
        monkeypatch.setattr(module, name, 60.0)
    monkeypatch.setattr(awaited, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(planner, "PATIENCE", (60.0, 4.0))


@pytest.mark.usefixtures("patient")
def test_a_prefix_with_states_is_found_at_another_engine(hybrid: Path, key: str) -> None:
    """Up to the other engine's snapshot. A damaged part of the state is a miss, and no block is used without it."""
    prompt = list(range(100, 161))
    whole = engine_for(hybrid, **SHORT, prefix_cache=False)
    prefill = engine_for(hybrid, **SHORT, kv_host_memory=64 << 20, kv_listen="127.0.0.1:0", kv_key_file=key)
    answer(prefill, prompt, count=1)
    settle(prefill)
    wanted, address = answer(whole, prompt)[0], f"127.0.0.1:{prefill.info.kv_port}"
    assert prefill._tiers is not None
    assert prefill._tiers._host is not None
    blocks: list[bytes] = []
    block_keys(root_key(prefill.scheduler.kv._kv_identity, "", ""), np.array(prompt, np.int32), 8, blocks)
    part = state_keys(blocks[6], 1)[0]
    for found in (56, 0):
        decode = engine_for(hybrid, **SHORT, kv_peer=address, kv_key_file=key)
        always_load(decode)
        assert answer(decode, prompt) == (wanted, found)
        assert decode.stats().tier_hits == {"peer": found}
        assert answer(decode, [*prompt, *wanted, 7])[1] >= 56
        decode.check_integrity()
        decode.close()
        prefill._tiers._host._blocks[part].data[0] ^= 1
    prefill.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
def test_a_lost_prefill_engine_means_computing(demo_model: Path, key: str, end: signal.Signals) -> None:
    options = SMALL | {"kv_host_memory": 64 << 20, "kv_listen": "127.0.0.1:0", "kv_key_file": key}
    code = PREFILL.replace("OPTIONS", repr(options)).replace("PROMPT", repr(FIRST))
    process = subprocess.Popen([sys.executable, "-c", code, str(demo_model)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        decode = engine_for(demo_model, kv_peer=f"127.0.0.1:{port}", kv_key_file=key)
        always_load(decode)
        tiers = decode._tiers
        assert tiers is not None
        fetch, fetched = tiers._from_peer, 0

        def fetch_ten(name: bytes, block: int) -> bool:
            nonlocal fetched
            if fetched == 10:
                process.send_signal(end)
                while psutil.Process(process.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.001)  # another core may run it still
            fetched += 1
            return fetch(name, block)

        tiers._from_peer = fetch_ten  # type: ignore[method-assign]
        want = answer(engine_for(demo_model, prefix_cache=False), FIRST, seed=0)[0]
        got, found = answer(decode, FIRST, seed=0)
        assert got == want
        assert 10 * 8 <= found < 200  # the kernel may hold a block that was on its way
        assert decode.stats().tiers["failures"] >= 1
        decode.check_integrity()
        decode.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_peer": "127.0.0.1:1"}, "name its file: kv_key_file"),
        ({"kv_peer": "there", "kv_key_file": "KEY"}, "write HOST:PORT"),
        ({"kv_listen": "127.0.0.1:0", "kv_key_file": "KEY"}, "set kv_host_memory or kv_disk_path"),
        ({"kv_peer": "127.0.0.1:1", "kv_key_file": "KEY", "prefix_cache": False}, "kv_peer fetches .* do not turn"),
        ({"kv_key_file": "KEY"}, "name one of them"),
        ({"kv_peer": "127.0.0.1:1", "kv_key_file": "KEY", "tp": 2}, "leave out kv_peer"),
    ],
)
def test_mistakes(demo_model: Path, key: str, options: dict[str, Any], message: str) -> None:
    options = {name: key if value == "KEY" else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        engine_for(demo_model, **options)
