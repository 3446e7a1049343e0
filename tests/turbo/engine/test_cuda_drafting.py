"""Draft models, heads and layers for multi-token prediction on device "cuda", emulated: the tokens are those without
draft tokens, and the draft tokens are those of a CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models import draft_head
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request
from lmkit.turbo.runners.captured_sizes import Size
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.models import mtp, tiny
from tests.turbo.engine.drafts import three_drafts, watch
from tests.turbo.engine.heads import tiny_head
from tests.turbo.engine.test_cuda_engine import (
    SIZES,
    captured,
    checkpoint,
    device,
    emulated,
    on_cpu,
    on_gpu,
    requests,
    tokens,
)
from tests.turbo.engine.test_drafting import drafter_of, shown
from tests.turbo.engine.test_engine import run
from tests.turbo.engine.test_mtp import with_luck

__all__ = ["captured", "checkpoint", "device", "three_drafts"]

pytestmark = [pytest.mark.slow, emulated]
EXACT: dict[str, Any] = {"dtype": "float32"}  # chunks of other sizes have the same tokens


def replays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Size], list[int]]:
    """The captured steps of the engine's drafter from now on, and the tokens of its other steps."""
    runner = drafter_of(engine)._runner
    assert isinstance(runner, CudaRunner)
    sizes, others = list[Size](), list[int]()
    replay, put = runner.captured.replay, runner._staged.put
    monkeypatch.setattr(runner.captured, "replay", lambda size: (sizes.append(size), replay(size))[1])

    def watched(inputs: Any, pad_to: Size | None = None, **options: Any) -> Any:
        if pad_to is None:
            others.append(len(inputs.token_ids))
        return put(inputs, pad_to, **options)

    monkeypatch.setattr(runner._staged, "put", watched)
    return sizes, others


def greedy_and_drawn(max_tokens: int) -> list[Request]:
    greedy, drawn = (requests(temperature=each, logprobs=None, max_tokens=max_tokens) for each in (0.0, 1.0))
    return greedy[:2] + drawn[2:]


@pytest.mark.usefixtures("captured")
def test_tokens_are_those_without_a_draft_model(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the model itself, in float16, so its drafts are right. Its steps are captured, and launched before the
    first draft token is known."""
    wanted = greedy_and_drawn(10)
    want = tokens(run(on_gpu(checkpoint, device, **EXACT), wanted))
    engine = on_gpu(checkpoint, device, **EXACT, speculate=f"draft={checkpoint}")
    sizes, others = replays(engine, monkeypatch)
    runner, calls = drafter_of(engine)._runner, list[str]()
    for name in ("launch", "collect"):
        whole = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda x, of=whole, name=name: (calls.append(name[0]), of(x))[1])
    for _ in range(2):  # the second time with the prefix cache
        assert tokens(run(engine, wanted)) == want
    stats = engine.stats()
    assert stats.prefix_hits
    assert stats.accepted_tokens > 0.8 * stats.draft_tokens > 10
    assert sum(size.is_decode for size in sizes) > 4
    assert min(others, default=24) > 16, "a prompt's tokens"
    assert "lllccc" in "".join(calls)
    assert not drafter_of(engine)._has_failed
    assert not drafter_of(engine)._texts


def test_preempted_sequences_go_on(checkpoint: Path, device: CudaDevice) -> None:
    wanted = requests(max_tokens=26, logprobs=None)[1:3]
    want = tokens(run(on_gpu(checkpoint, device, **EXACT), wanted))
    options: dict[str, Any] = {"kv_memory": 10 * 16 * 2 * 2 * 2 * 64 * 2, "max_model_len": None}
    engine = on_gpu(checkpoint, device, **EXACT | options, speculate=f"draft={checkpoint}")
    assert tokens(run(engine, wanted)) == want
    stats = engine.stats()
    assert stats.preemptions
    assert stats.accepted_tokens


def test_a_draft_model_that_fails_is_left_out(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(max_tokens=8)[:2]
    want = tokens(run(on_gpu(checkpoint, device, **EXACT), wanted))
    engine = on_gpu(checkpoint, device, **EXACT, speculate=f"draft={checkpoint}")

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(drafter_of(engine)._runner, "_logits", fail)
    assert tokens(run(engine, wanted)) == want
    assert drafter_of(engine)._has_failed
    assert engine.stats().failed_steps == 0


def same_drafts(
    path: Path, device: CudaDevice, wanted: list[Request], how: str, monkeypatch: pytest.MonkeyPatch
) -> set[int]:
    """Check that a GPU drafts what a CPU does, in captured steps. Returns the draft tokens."""
    monkeypatch.setattr(draft_head.Place, "activations", "exact")
    options: dict[str, Any] = {"speculate": how}
    on_host, engine = on_cpu(path, **options), on_gpu(path, device, **options)
    sizes, _ = replays(engine, monkeypatch)
    found = []
    for each in (on_host, engine):
        seen = watch(each, monkeypatch)
        run(each, wanted)
        found.append({tuple(text): drafts for text, _, drafts in seen})
    on_both = found[0].keys() & found[1].keys()
    same = sum(all(map(int.__eq__, found[0][text], found[1][text])) for text in on_both)
    assert len(on_both) > 8
    assert same > 0.5 * len(on_both)  # a GPU has halves, and another head would hardly ever draft the same
    assert sum(size.is_decode for size in sizes) > 8
    return {token for drafts in found[1].values() for token in drafts}


def unchanged(path: Path, device: CudaDevice, wanted: list[Request], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that drafts, of which some are right, change no token."""
    want = shown(run(on_gpu(path, device, **EXACT), wanted))
    engine = on_gpu(path, device, **EXACT, speculate=how)
    with_luck(drafter_of(engine), want, monkeypatch)
    for _ in range(2):
        assert shown(run(engine, wanted)) == want
    assert 8 < engine.stats().accepted_tokens < engine.stats().draft_tokens
    assert not drafter_of(engine)._has_failed


@pytest.mark.exhaustive
def test_a_head(device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has half of the model's tokens."""
    model, own = tmp_path / "model", list(range(0, 211, 2))
    tiny.make(model, "llama", **SIZES | {"num_hidden_layers": 3}).half().save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, model / file)
    how = f"eagle={tiny_head(tmp_path / 'head', model, own, (0, 1, 2))}"
    drafted = same_drafts(model, device, requests(max_tokens=12), how, monkeypatch)
    assert len(drafted) > 5
    assert drafted <= set(own)
    unchanged(model, device, greedy_and_drawn(10), how, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3.5", "glm4-moe"])
def test_a_layer_for_multi_token_prediction(
    tmp_path: Path, device: CudaDevice, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its linears and experts are in 8 bits, whose groups take a multiple of 32 inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 96} | ({"moe_intermediate_size": 32} if "moe" in family else {})
    mtp.make(tmp_path, family, vocab_size=211, num_hidden_layers=2, **sizes)
    same_drafts(tmp_path, device, requests(max_tokens=8)[1:3], "mtp", monkeypatch)
    unchanged(tmp_path, device, greedy_and_drawn(6), "auto", monkeypatch)


def test_ranks_take_none(checkpoint: Path, device: CudaDevice) -> None:
    with pytest.raises(ConfigError, match="tp=2 takes no draft model or head on GPUs"):
        on_gpu(checkpoint, device, tp=2, speculate=f"draft={checkpoint}")
