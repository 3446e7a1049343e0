"""Weights beyond memory: layers that are read in every step give the tokens of a model that stays in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, ConfigError, EngineLostError
from lmkit.formats.direct_file import DirectFile, Reading
from lmkit.kernels.cpu import jit
from lmkit.models import packed_cache, streamed
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load
from lmkit.models.resolved import resolved
from lmkit.models.stream_plan import Streaming, StreamPlan, Turn, evenly, plan_stream
from lmkit.models.streamed import forecast
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from tests.models import peft_folder, tiny
from tests.turbo.engine.test_engine import SMALL, engine_for, requests_for, run, tokens

Shown = dict[str, Any]
TINY: dict[str, Any] = {"kv_dtype": "float32", "max_model_len": 64, "block_size": 4, "max_batch_size": 8}


@pytest.fixture(autouse=True)
def private_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights of the demo model go here. Compiled kernels stay where they are."""
    jit.cache_directory()
    monkeypatch.setenv("LMKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def shown(outputs: dict[str, list[StepOutput]]) -> Shown:
    return {
        name: (tokens(parts), [x for o in parts for x in o.logprobs], parts[-1].finish_reason)
        for name, parts in outputs.items()
    }


def plan_of(model: Path, budget: int = 1 << 40, **options: Any) -> StreamPlan:
    """The plan for a model, which is packed now."""
    with resolved(model, **options) as source:
        load(source, streaming=Streaming(budget))
        return forecast(source, Streaming(budget, step_tokens=SMALL["max_step_tokens"])).plan


def budgets(model: Path, *counts: int) -> Iterator[int]:
    """Bytes with which so many layers stream."""
    plan = plan_of(model)
    for count in counts:
        budget = replace(plan, streamed=evenly(count, len(plan.layers))).memory
        assert len(plan_stream(plan.layers, plan.fixed, budget).streamed) == count
        yield budget


def prompts(count: int = 5) -> list[Request]:
    generator, params = torch.Generator().manual_seed(3), SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    rows = [torch.randint(0, 199, (7 + 3 * i,), generator=generator).tolist() for i in range(count)]
    return [Request(request_id=f"r{i}", prompt_ids=row, params=params) for i, row in enumerate(rows)]


@pytest.mark.parametrize("num_streamed", [2, 5, 8])
def test_the_demo_model_has_the_same_bits(demo_model: Path, num_streamed: int) -> None:
    requests = requests_for(demo_model, temperature=1.0, logprobs=2)
    small: dict[str, Any] = {"kv_memory": 8 * 2 * 2 * 64 * 2 * 160, "max_model_len": None, "max_step_tokens": 16}
    want = shown(run(engine_for(demo_model), requests))
    (budget,) = budgets(demo_model, num_streamed)
    engine = engine_for(demo_model, weights_memory=budget, **small)
    assert shown(run(engine, requests)) == want
    assert engine.stats().preemptions > 0
    assert shown(run(engine, requests)) == want  # with the prefix cache, and captured steps
    assert engine.info.memory["weights"] < budget + (1 << 20)  # and tables


def tiny_engine(path: Path, budget: int | None = None, **options: Any) -> Engine:
    """Tiny models have no tokenizer."""
    with resolved(path) as model:
        decoder = load(model, streaming=None if budget is None else Streaming(budget))
    return Engine.of(decoder, EngineConfig(**TINY | options))


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v2-lite", "gemma2", "opt"])
def test_other_families_have_the_same_bits(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path, family, num_hidden_layers=5)
    want = shown(run(tiny_engine(tmp_path), prompts()))
    for budget in budgets(tmp_path, 5, 4):
        for overlap in (True, False):
            engine = tiny_engine(tmp_path, budget, overlap=overlap)
            assert [shown(run(engine, prompts())) for _ in range(2)] == [want] * 2


def test_loading_reads_ahead_over_nothing_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have the same place here, and a read ends as soon as it is begun."""
    begin = DirectFile.begin

    def at_once(file: DirectFile, *part: Any) -> Reading:
        reading = begin(file, *part)
        reading.wait()
        return reading

    def placed(plan: StreamPlan) -> list[Turn]:
        return [Turn(layer, 0, 0, sum(plan.layers[layer])) for layer in plan.streamed]

    tiny.make(tmp_path, "gpt-oss", num_hidden_layers=5)
    want = shown(run(tiny_engine(tmp_path), prompts()))
    (budget,) = budgets(tmp_path, 5)
    monkeypatch.setattr(DirectFile, "begin", at_once)
    monkeypatch.setattr(StreamPlan, "turns", property(placed))
    assert shown(run(tiny_engine(tmp_path, budget), prompts())) == want


def places(decoder: Decoder) -> set[tuple[int, int]]:
    """Begin and end of the packed tensors in memory."""
    found = set()

    def note(_: str, tensor: torch.Tensor) -> torch.Tensor:
        found.add((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    for layer in decoder.layers:
        for linear in layer.linears:
            linear.replace_packed("", note)
    decoder.lm_head.replace_packed("", note)
    return found


def test_no_more_memory_is_taken(demo_model: Path) -> None:
    for budget in budgets(demo_model, 8, 5):
        decoder = engine_for(demo_model, weights_memory=budget).runner.decoder
        taken, end = 0, 0
        for start, stop in sorted(places(decoder)):
            taken += max(0, stop - max(start, end))
            end = max(end, stop)
        embed = decoder.embed_tokens
        rest = [
            embed[: 2 * SMALL["max_step_tokens"]] if isinstance(embed, torch.Tensor) else None,
            decoder.final_norm,
            *(w for layer in decoder.layers for w in layer.weights.values()),
        ]
        taken += sum(x.nbytes for x in rest if isinstance(x, torch.Tensor))
        assert budget * 0.9 < taken <= budget


def test_a_step_reads_each_streamed_layer_once(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (budget,) = budgets(demo_model, 5)
    engine, read, preadv = engine_for(demo_model, weights_memory=budget, overlap=False), 0, os.preadv
    plan = plan_of(demo_model, budget)

    def counting(file: int, into: list[memoryview], at: int) -> int:
        nonlocal read
        read += len(into[0])
        return preadv(file, into, at)

    monkeypatch.setattr(os, "preadv", counting)
    (request,) = requests_for(demo_model, max_tokens=30)[:1]
    steps = engine.profile().steps
    run(engine, [request])
    steps = engine.profile().steps - steps
    assert steps >= 30
    ahead = 2 * plan.room  # what the last steps have begun may not be read yet
    assert abs(read - steps * plan.step_bytes) <= 2 * ahead


def test_adapters_go_together_with_it(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "base", "llama-tied-bias", num_hidden_layers=5)
    peft_folder.write(tmp_path / "adapter", peft_folder.linears(model), seed=1)
    plain = prompts(3)
    options: dict[str, Any] = {"adapters": (f"a={tmp_path / 'adapter'}",)}
    adapted = [msgspec.structs.replace(each, request_id=f"a{each.request_id}", adapter="a") for each in plain]
    want = shown(run(tiny_engine(tmp_path / "base", **options), plain + adapted))
    assert want["r0"] != want["ar0"]
    (budget,) = budgets(tmp_path / "base", 5)
    assert shown(run(tiny_engine(tmp_path / "base", budget, **options), plain + adapted)) == want


def test_a_draft_model_goes_together_with_it(demo_model: Path) -> None:
    requests, want = requests_for(demo_model), shown(run(engine_for(demo_model), requests_for(demo_model)))
    (budget,) = budgets(demo_model, 5)
    engine = engine_for(demo_model, weights_memory=budget, speculate=f"draft={demo_model}")
    assert shown(run(engine, requests)) == want


def test_the_folder_of_the_weights(demo_model: Path, tmp_path: Path) -> None:
    (budget,) = budgets(demo_model, 5)
    engine_for(demo_model, weights_memory=budget, weights_path=str(tmp_path)).close()
    (file,) = tmp_path.glob("*/packed-*.safetensors")
    config = EngineConfig(device="cpu", weights_memory=budget, weights_path=str(tmp_path), max_step_tokens=64)
    report = describe_model(str(demo_model), config)
    assert report["packed_weights"]["folder"] == str(file.parent)
    assert report["serving"]["streaming"]["streamed_layers"] == 5
    assert report["serving"]["streaming"]["resident_bytes"] <= budget


def test_the_batch_computes_while_the_disk_reads(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (budget,) = budgets(demo_model, 5)
    monkeypatch.setattr(streamed, "token_seconds", lambda *_: 0.001)
    with resolved(demo_model) as model:
        step_bytes = forecast(model, Streaming(budget)).plan.step_bytes
    monkeypatch.setattr(DirectFile, "bandwidth", lambda _: step_bytes / 0.0995)
    options: dict[str, Any] = {"weights_memory": budget, "device": "cpu", "max_model_len": 256}
    engine = Engine(str(demo_model), EngineConfig(**options))
    assert (engine.info.max_batch_size, engine.scheduler.limits.max_step_tokens) == (100, 512)
    want = shown(run(engine_for(demo_model), requests_for(demo_model)))
    assert shown(run(engine, requests_for(demo_model))) == want
    asked = Engine(str(demo_model), EngineConfig(**options, max_batch_size=5))
    assert (asked.info.max_batch_size, asked.scheduler.limits.max_step_tokens) == (5, 512)
    serving = describe_model(str(demo_model), EngineConfig(**options))["serving"]["streaming"]
    assert (serving["batch_size"], serving["batch_tokens_per_second"]) == (100, 1000)


def test_damaged_weights_are_packed_anew(demo_model: Path, tmp_path: Path) -> None:
    (budget,) = budgets(demo_model, 5)
    options: dict[str, Any] = {"weights_memory": budget, "weights_path": str(tmp_path)}
    want = shown(run(engine_for(demo_model, **options), requests_for(demo_model)))
    (file,) = tmp_path.glob("*/packed-*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    assert shown(run(engine_for(demo_model, **options), requests_for(demo_model))) == want
    assert file.read_bytes() == whole


def fail_shrunk(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    os.truncate(file, 1 << 20)
    return "bytes were there before"


def fail_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    return "cannot be read: Input/output error"


@pytest.mark.parametrize("fail", [fail_shrunk, fail_read])
def test_a_disk_that_fails_ends_the_engine_with_one_line(
    demo_model: Path, tmp_path: Path, fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (budget,) = budgets(demo_model, 5)
    engine = engine_for(demo_model, weights_memory=budget, weights_path=str(tmp_path))
    (file,) = tmp_path.glob("*/packed-*.safetensors")
    reason = fail(file, monkeypatch)
    engine.add(requests_for(demo_model)[0])
    (output,) = engine.step()
    assert output.error
    with pytest.raises(EngineLostError, match=rf"packed-.*{reason}.*; start the engine again"):
        engine.step()
    engine.close()


def test_a_full_disk_is_one_line(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"needs a file of packed weights: .* MiB are free.*another weights_path"):
        engine_for(demo_model, weights_memory=10 << 20, weights_path=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights_path": "nvme"}, "set weights_memory too"),
        ({"weights_memory": 1 << 30, "packed_cache": False}, "do not turn packed_cache off"),
        ({"weights_memory": 1 << 30, "tp": 2}, "leave out weights_memory, or use tp=1"),
        ({"weights_memory": 1 << 20}, r"weights_memory 1.0 MiB is too little for this model: .* set 4M or more"),
    ],
)
def test_what_makes_no_sense_is_refused(demo_model: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_for(demo_model, **options)


def test_a_decoder_has_no_file(demo_model: Path) -> None:
    with resolved(demo_model) as model, pytest.raises(ConfigError, match="needs a checkpoint"):
        Engine.of(load(model), EngineConfig(weights_memory=1 << 30))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        engine_for(tmp_path / "none", weights_memory=1 << 30)
