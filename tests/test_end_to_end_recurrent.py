"""A model without attention behind a real server: it has no KV pool, and everything else that a server has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.turbo.engine.memory import RECORD_BYTES
from lmkit.turbo.transport.messages import ENGINE
from tests.quant.helpers import tiny_checkpoint
from tests.serve.live import Server

pytestmark = pytest.mark.slow
BLOCKS = 9  # of 8 tokens: they do not hold both prompts with their answers
rng = random.Random(4)
PROMPTS = [[rng.randrange(4096) for _ in range(length)] for length in (30, 27)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("served") / "mamba2", "mamba2")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMKIT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        sizes = {"block-size": 8, "kv-memory": BLOCKS * RECORD_BYTES, "max-step-tokens": 16, "max-model-len": 64}
        options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        options += ["--max-batch-size", "2", "--speculate", "ngram", "--no-packed-cache"]
        with Server(*options, model=model, engine=ENGINE) as server:
            yield server
            assert server.terminate() == 0


def complete(server: Server, prompt: Any) -> tuple[list[str], int]:
    """The greedy answers, and the prompt tokens that were cached."""
    body = {"model": "mamba2", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return [each["text"] for each in answer.json()["choices"]], usage["prompt_tokens_details"]["cached_tokens"]


def lmkit(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_chunks_preemptions_prefixes_and_drafts_change_no_answer(server: Server) -> None:
    together, cached = complete(server, PROMPTS)  # prompts of two chunks
    assert cached == 0
    assert server.metric("lmkit:num_preemptions_total") > 0
    for prompt, text in zip(PROMPTS, together, strict=True):
        alone, cached = complete(server, prompt)
        assert alone == [text]
        assert cached >= 24  # up to the snapshot after the last full block of the prompt


def test_metrics_and_commands_show_states_in_place_of_a_kv_cache(server: Server, model: Path) -> None:
    assert 0 <= server.metric("lmkit:kv_cache_usage_perc") <= 1
    assert server.metric("lmkit:state_snapshots_limit") == 32
    assert server.metric("lmkit:state_snapshots") > 0
    (row,) = json.loads(lmkit("ps", "--json"))
    assert (row["model"], row["url"]) == ("mamba2", server.url)
    assert row["reserved_bytes"] > 0
    shown = json.loads(lmkit("inspect", str(model), "--json"))
    assert shown["kv_cache"] is None
    assert shown["serving"]["state_bytes"] > 0
    assert shown["serving"]["kv_bytes"] == shown["serving"]["kv_blocks"] * RECORD_BYTES
    assert "Mamba2ForCausalLM" in lmkit("inspect", str(model))
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 64
