"""Recorded decode steps: the same bits as steps run op by op, and nothing but kernels in them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.config import EngineConfig
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, save_kv_config
from lmkit.models.loader import ModelSource
from lmkit.turbo.engine import Engine
from lmkit.turbo.graphs import NotRecordableError, StepGraphs, _OnlyKernels
from lmkit.turbo.request import GenerationConfig, Request

PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 11]


def generate(engine: Engine) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of prompts of different lengths, which end at different steps."""
    found: dict[str, list[Any]] = {}
    for i, prompt in enumerate(PROMPTS):
        params = GenerationConfig(max_new_tokens=10 + 7 * i, ignore_eos=True, logprobs=2)
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs or [], strict=True))
    return found


def with_key_means(demo_model: Path, folder: Path) -> Path:
    """The demo model with a kv_config.json that has all there is: what is left out of its keys need not be theirs."""
    folder.mkdir()
    for file in demo_model.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    spec = ModelSource(demo_model).spec
    mean = tuple(((3, 5.0, -2.0), (30, 1.0, 40.0))[: 1 + head] for head in range(spec.num_kv_heads))
    layers = [
        KVLayerConfig(k=kind, v="int4", key_mean=mean if i % 2 else (), hadamard=i % 3 == 0)
        for i, kind in enumerate(itertools.islice(itertools.cycle(("int4", "fp8", "int8")), spec.num_layers))
    ]
    save_kv_config(KVConfig(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, layers=tuple(layers)), folder)
    return folder


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "auto"])
def test_recorded_steps_give_the_bits_of_steps_run_op_by_op(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any
) -> None:
    if kv_dtype == "auto":
        demo_model = with_key_means(demo_model, tmp_path / "model")
    config = EngineConfig(block_size=8, max_batch_size=4, max_step_tokens=64, max_model_len=128, kv_dtype=kv_dtype)
    launched: list[int] = []
    replay = StepGraphs.__call__

    def counted(self: StepGraphs, inputs: Any) -> Tensor | None:
        logits = replay(self, inputs)
        if logits is not None:
            launched.append(len(logits))
        return logits

    monkeypatch.setattr(StepGraphs, "__call__", counted)
    recorded = generate(Engine(str(demo_model), config))
    assert set(launched) == {1, 2, 3}
    monkeypatch.setattr(StepGraphs, "__call__", lambda self, inputs: None)
    assert generate(Engine(str(demo_model), config)) == recorded


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.half(),
        lambda x: x[:, 1:].contiguous(),
        lambda x: x[[1, 0]],
        lambda x: x.copy_(x.clone()),
        lambda x: x.__setitem__(0, 1),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros(3),
    ],
)
def test_what_torch_would_compute_is_refused(compute: Callable[[Tensor], Any]) -> None:
    x = torch.ones(4, 6)
    with pytest.raises(NotRecordableError), _OnlyKernels():
        compute(x)
    assert torch.equal(x, torch.ones(4, 6))


def test_views_facts_and_new_memory_are_allowed() -> None:
    x = torch.ones(4, 6)
    with _OnlyKernels():
        first, second = x.split((2, 4), dim=-1)
        assert second.view(4, -1, 2).shape == (4, 2, 2)
        assert first.stride(0) == 6
        assert x.float().data_ptr() == x.contiguous().data_ptr() == x[:3].data_ptr()
        assert torch.empty(2, dtype=torch.int8).numel() == 2
