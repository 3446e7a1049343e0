"""Engines whose model several GPUs share, each rank with an emulated one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.devices import CUDA
from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda.ranks import LAYOUT
from lmkit.turbo.engine import describe
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.memory import EXCHANGE_BYTES
from lmkit.turbo.runners import processes
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.cuda_ranks import LeadingCudaRunner
from tests.models import peft_folder, tiny
from tests.turbo.engine import test_cuda_engine
from tests.turbo.engine.test_adapters import set_adapter
from tests.turbo.engine.test_cuda_adapters import answers
from tests.turbo.engine.test_cuda_engine import SIZES, SMALL, assert_alike, on_gpu, request, requests, tokens
from tests.turbo.engine.test_engine import propose_drafts, run
from tests.turbo.engine.test_ranks import check_a_kill_ends

device = test_cuda_engine.device
emulated = test_cuda_engine.emulated


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense"
    tiny.make(path, "llama", **SIZES | {"intermediate_size": 256}).half().save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    return path


@pytest.fixture(autouse=True)
def ranks_are_emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(processes, "PROCESS", "tests.emulator.rank_process")


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines that are closed after the test."""
    found: list[Engine] = []
    yield found
    for engine in found:
        engine.close()


@pytest.mark.parametrize(("weights", "drafts"), [("float16", True), ("int4", False)])
def test_two_ranks_give_the_tokens_of_one(
    checkpoint: Path,
    device: CudaDevice,
    engines: list[Engine],
    weights: str,
    drafts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are cut into chunks beside sequences that decode. Steps overlap, or have drafts. Logits differ in the
    order of sums alone. A rank has its heads of KV. A real GPU has both ranks."""
    path = checkpoint
    if weights == "int4":
        path = tmp_path / "w4"
        make_awq(checkpoint, path, group=32)
    options: dict[str, Any] = {"kv_memory": 1 << 20, "overlap": not drafts}
    engines += [on_gpu(path, device, **options), on_gpu(path, device, tp=2, devices="0,0", **options)]
    one, two = engines
    assert isinstance(two.runner, LeadingCudaRunner)
    assert two.info.captured == one.info.captured
    monkeypatch.setattr(describe, "resolve_device", lambda config: device)
    config = EngineConfig(**SMALL, device="cuda", tp=2, kv_memory=options["kv_memory"])
    shown = describe.describe_model(str(path), config)["serving"]
    for name in ("weights", "workspace", "kv"):
        assert two.info.memory[name] == shown[f"{name.removesuffix('s')}_bytes"]
    assert two.info.memory["kv"] == one.info.memory["kv"] // 2
    assert two.runner.kv[0].k.data.shape[1] == one.runner.kv[0].k.data.shape[1] // 2  # type: ignore[attr-defined]
    wanted = [*requests(max_tokens=8), request("scored", list(range(50, 90)), 4, prompt_logprobs=True)]
    want = run(one, wanted)
    lengths = propose_drafts(two, tokens(want), monkeypatch) if drafts else [4]
    got = run(two, wanted)
    assert max(lengths) > 1
    assert assert_alike(got, want, 0.01) == 1
    two.check_integrity()


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_experts(tmp_path: Path, device: CudaDevice, engines: list[Engine], tp: int) -> None:
    """Uneven numbers of them, whole, and all else is whole, too, or split. Steps are captured."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    tiny.make(tmp_path / "dense", "qwen2-moe", **sizes).half().save_pretrained(tmp_path / "dense")
    make_awq(tmp_path / "dense", path := tmp_path / "w4", group=32)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    options: dict[str, Any] = {"kv_memory": 1 << 20, "max_model_len": 96}
    engines += [on_gpu(path, device, **options), on_gpu(path, device, tp=tp, ep=2, devices="0,0", **options)]
    one, two = engines
    assert two.info.captured == one.info.captured
    assert "decode steps" in two.info.captured
    assert assert_alike(run(two, requests(max_tokens=5)), run(one, requests(max_tokens=5)), 0.02) == 1


@emulated
def test_ranks_split_adapters(checkpoint: Path, device: CudaDevice, engines: list[Engine], tmp_path: Path) -> None:
    """Of all linears, one at the start and one at run time. Steps with adapters are captured."""
    shapes = peft_folder.linears(tiny.make(tmp_path / "base", "llama", **SIZES | {"intermediate_size": 256}))
    for name in ("half", "wide"):
        peft_folder.write(tmp_path / name, shapes, ord(name[0]), size=0.5, dtype=torch.float16)
    options: dict[str, Any] = {"adapters": (f"half={tmp_path / 'half'}",), "adapter_root": str(tmp_path)}
    options |= {"kv_memory": 1 << 20, "max_model_len": 96}
    engines += [on_gpu(checkpoint, device, **options), on_gpu(checkpoint, device, tp=2, devices="0,0", **options)]
    for one in engines:
        set_adapter(one, "wide", "wide")
    want, got = (answers(one, max_tokens=5) for one in engines)
    assert assert_alike(got, want, 0.02) == 1
    plain = tokens(run(engines[0], requests(max_tokens=5)))
    assert all(plain[name] != tokens(want)[name] for name in ("0", "1", "3"))


@emulated
def test_inspect_shows_the_memory_of_each_rank(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has a GPU's memory for itself, unless it shares the GPU."""
    monkeypatch.setattr(describe, "resolve_device", lambda config: device)
    monkeypatch.setattr(device, "free_memory", lambda: 2 << 30)
    common: dict[str, Any] = {**SMALL, "device": "cuda", "kv_memory": 1 << 20}
    one, two, sharing = (
        describe.describe_model(str(checkpoint), EngineConfig(**common, **options))["serving"]
        for options in ({}, {"tp": 2}, {"tp": 2, "devices": "0,0"})
    )
    assert (one["available_bytes"], two["available_bytes"], sharing["available_bytes"]) == (2 << 30, 2 << 30, 1 << 30)
    assert two["weight_bytes"] < one["weight_bytes"]
    assert two["kv_bytes"] == one["kv_bytes"] // 2
    assert two["workspace_bytes"] - one["workspace_bytes"] < EXCHANGE_BYTES + (1 << 20)


@emulated
def test_a_killed_rank_ends_the_engine_with_one_error(checkpoint: Path, device: CudaDevice) -> None:
    """In a step, rank 0's kernels wait for the other's. Nothing but the engine's end stops them."""
    model = on_gpu(checkpoint, device, tp=2, speculate="ngram", kv_memory=1 << 20)
    assert isinstance(model.runner, LeadingCudaRunner)
    model.add(request("one", [5, 6] * 8, 100))
    model.step()
    check_a_kill_ends(model, model.runner.ranks.pids[0])


@emulated
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 2, "pp": 2}, "tp=2 and pp=2: a model is shared out in one way"),
        ({"pp": 16}, "pp=16: at most 8 GPUs share a model"),
        ({"ep": 16}, "ep=16: at most 8 GPUs share a model"),
        ({"tp": 16}, "tp=16: at most 8 GPUs share a model"),
        ({"tp": 2, "kv_host_memory": 1 << 30}, "tp=2 keeps no KV outside the engine; leave out kv_host_memory"),
        ({"tp": 2, "cluster": "ray"}, "cluster=ray is for --device cpu"),
        ({"tp": 2, "devices": "0"}, "devices=0 names GPUs: give as many as tp, ep or pp"),
    ],
)
def test_what_gpus_cannot_share_is_refused(
    checkpoint: Path, device: CudaDevice, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        on_gpu(checkpoint, device, **options)


def test_a_rank_sees_its_own_gpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all others after it, whose memory it maps."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = CudaDevice()
    assert device.environment(2) == {"CUDA_VISIBLE_DEVICES": "2,0,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5ebe9f43,7")
    assert device.environment(1) == {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43,4,7"}
    assert device.environment(0) == {"CUDA_VISIBLE_DEVICES": "4,GPU-5ebe9f43,7"}
    with pytest.raises(ConfigError, match="a process is to have GPU 3, and there are 3"):
        device.environment(3)


def test_gpus_that_do_not_reach_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either direction. Their ranks exchange through host memory, as those of emulated GPUs do."""
    reach = {(0, 1), (1, 0), (1, 2)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reach)
    device = CudaDevice()
    assert device.reach_each_other([0, 1])
    assert device.reach_each_other([0, 0])
    assert not device.reach_each_other([0, 1, 2])
    assert not device.reach_each_other([1, 2])


def test_the_plan_has_room_for_exchanges() -> None:
    assert LAYOUT.num_bytes(CUDA.max_ranks) <= EXCHANGE_BYTES


@pytest.mark.parametrize(("devices", "sharing"), [("", 1), ("0,1", 1), ("0,0", 2)])
def test_ranks_on_one_gpu_share_its_memory(devices: str, sharing: int) -> None:
    assert EngineConfig(device="cuda", tp=2, devices=devices).num_sharing == sharing
