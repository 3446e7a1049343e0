"""Engines whose layers several GPUs share, each stage with an emulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.turbo.engine import describe
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.cuda_stages import FirstCudaStage
from tests.turbo.engine import test_cuda_ranks
from tests.turbo.engine.test_cuda_engine import SMALL, assert_alike, on_gpu, request, requests
from tests.turbo.engine.test_cuda_families import saved
from tests.turbo.engine.test_engine import run
from tests.turbo.engine.test_ranks import check_a_kill_ends

pytestmark = pytest.mark.slow
checkpoint = test_cuda_ranks.checkpoint
device = test_cuda_ranks.device
emulated = test_cuda_ranks.emulated
engines = test_cuda_ranks.engines
processes_are_emulated = test_cuda_ranks.ranks_are_emulated


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("float16", {}),
        pytest.param("int4", {"kv_dtype": "int8", "max_step_tokens": 32}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_stages_give_the_tokens_of_one_gpu(
    checkpoint: Path,
    device: CudaDevice,
    engines: list[Engine],
    weights: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy ones, in captured steps; and the scores and the embedding of a prompt, whose rows all come back. Plans are
    of other sequences than with one GPU, so logits differ in the last bits."""
    path = checkpoint
    if weights == "int4":
        path = tmp_path / "w4"
        make_awq(checkpoint, path, group=32)
    options = {"kv_memory": 1 << 20} | options
    engines += [on_gpu(path, device, **options), on_gpu(path, device, pp=2, devices="0,0", **options)]
    one, two = engines
    assert isinstance(two.runner, FirstCudaStage)
    assert two.info.captured == one.info.captured
    assert len(two.runner.decoder.layers) == len(two.runner.kv) == 1
    monkeypatch.setattr(describe, "resolve_device", lambda config: device)
    shown = describe.describe_model(str(path), EngineConfig(**(SMALL | options), device="cuda", pp=2))["serving"]
    assert two.info.memory["workspace"] == shown["workspace_bytes"] > one.info.memory["workspace"]
    text = Request(
        request_id="text", prompt_ids=list(range(30, 75)), params=SamplingParams(max_tokens=0), pooling="mean"
    )
    wanted = [*requests(max_tokens=8), request("scored", list(range(50, 90)), 4, prompt_logprobs=True), text]
    replayed = list[Any]()
    replay = two.runner.captured.replay
    monkeypatch.setattr(two.runner.captured, "replay", lambda size: (replayed.append(size), replay(size))[1])
    want, got = run(one, wanted), run(two, wanted)
    vectors = [
        torch.frombuffer(bytearray(found.pop("text")[0].embedding), dtype=torch.float32) for found in (want, got)
    ]
    torch.testing.assert_close(*vectors, rtol=0, atol=0.02)
    scores = [torch.tensor([x.logprob for x in found["scored"][0].prompt_logprobs]) for found in (want, got)]
    torch.testing.assert_close(*scores, rtol=0, atol=0.02)
    assert assert_alike(got, want, 0.02) == 1
    assert len(replayed) > 8
    two.check_integrity()


@emulated
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3.5", {}),
        pytest.param(
            "granite-hybrid",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("zamba2-plain", {"num_hidden_layers": 4}, marks=pytest.mark.exhaustive),  # reads embeddings
    ],
)
def test_stages_and_ranks_keep_the_states_of_hybrids(
    tmp_path: Path, device: CudaDevice, engines: list[Engine], family: str, sizes: dict[str, Any]
) -> None:
    """A stage has those of its layers, a rank all of them. The second turn begins with snapshots."""
    saved(tmp_path, family, **{"num_hidden_layers": 3} | sizes)
    ways: list[dict[str, Any]] = [{}, {"pp": 2, "devices": "0,0"}, {"tp": 2, "devices": "0,0"}]
    engines += [on_gpu(tmp_path, device, max_model_len=96, **way) for way in ways]
    assert len({engine.info.captured for engine in engines}) == 1
    wanted = requests(max_tokens=6)[1:3]
    for turn in range(2):
        want, *others = (run(engine, wanted) for engine in engines)
        assert all(assert_alike(got, want, 0.05) == 1 for got in others), turn
    assert all(engine.stats().prefix_hits > 0 for engine in engines)


@emulated
def test_drawn_tokens_and_little_memory(checkpoint: Path, device: CudaDevice, engines: list[Engine]) -> None:
    """Sequences are preempted while plans are under way. Each draws the tokens of its seed, of float32."""
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": None, "kv_memory": 7 * 16 * 2 * 2 * 2 * 64 * 4}
    engines.append(on_gpu(checkpoint, device, **common))
    wanted = requests(max_tokens=20, temperature=1.0, logprobs=None)
    engines.append(on_gpu(checkpoint, device, pp=2, devices="0,0", **common))
    found = [{name: [t for o in parts for t in o.token_ids] for name, parts in run(e, wanted).items()} for e in engines]
    assert found[0] == found[1]
    assert all(engine.stats().preemptions > 0 for engine in engines)


@emulated
def test_a_killed_stage_ends_the_engine_with_one_error(checkpoint: Path, device: CudaDevice) -> None:
    """In a step, stage 0's kernels wait for the other's. Nothing but the engine's end stops them."""
    model = on_gpu(checkpoint, device, pp=2, kv_memory=1 << 20)
    assert isinstance(model.runner, FirstCudaStage)
    model.add(request("one", [5, 6] * 8, 100))
    model.step()
    check_a_kill_ends(model, model.runner.stages.pids[0])
