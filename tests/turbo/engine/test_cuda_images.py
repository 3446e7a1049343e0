"""Prompts with images on device "cuda", emulated: log-probabilities are those of transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lmkit.turbo.engine.encoder import Encoder
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.models.pictures import expected, frames, picture, prompt, tower_of
from tests.models.test_images import MARKS, request, text, tokens
from tests.turbo.engine.test_cuda_engine import device, emulated, on_gpu  # noqa: F401
from tests.turbo.engine.test_cuda_families import saved
from tests.turbo.engine.test_cuda_ranks import engines, ranks_are_emulated  # noqa: F401
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("qwen2.5-vl", 16),
        pytest.param("qwen3-vl", 16, marks=pytest.mark.exhaustive),
        pytest.param("gemma3-vision", 64, marks=pytest.mark.exhaustive),  # tokens of an image see each other
    ],
)
@emulated
def test_images(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    step: int,
) -> None:
    """In chunks that cut an image, beside a prompt of text, and after cached prefixes. Steps of new tokens are
    captured, those with an image's rows are not."""
    encode = Encoder.advance  # a request's images in one step, so that no time decides when it begins
    monkeypatch.setattr(Encoder, "advance", lambda encoder, seconds: encode(encoder, math.inf))
    model = saved(tmp_path, name, hidden_size=64, num_attention_heads=4, head_dim=16)
    tower, engine = tower_of(tmp_path), on_gpu(tmp_path, device, max_model_len=64, max_step_tokens=step)
    assert isinstance(engine.runner, CudaRunner)
    replayed, replay = [], engine.runner.captured.replay
    monkeypatch.setattr(engine.runner.captured, "replay", lambda size: (replayed.append(size), replay(size))[1])
    ids, images = prompt(tower, [*text(3), -1, *text(2, 1), -1, 5], [picture(tower, 4, 4, 1), picture(tower, 3, 5, 2)])
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3, logit_bias=dict.fromkeys(MARKS, -100.0))
    given = [
        Request(request_id="a", prompt_ids=ids, images=images, params=params),
        Request(request_id="b", prompt_ids=text(7, 4), params=params),
    ]
    for _ in range(2):
        found = run(engine, given)
        for one in given:
            parts = [part for output in found[one.request_id] for part in output.logprobs]
            row = [*one.prompt_ids, *(part.token_id for part in parts)]
            logits = expected(model, tower, row, one.images)[len(one.prompt_ids) - 1 :]
            assert len(parts) == 4
            for part, want in zip(parts, logits.log_softmax(-1), strict=False):
                for token_id, logprob in part.top:
                    assert logprob == pytest.approx(want[token_id].item(), abs=0.05)
    assert engine.stats().images == {"encoded": 2, "reused": 2}
    assert any(size.is_decode for size in replayed)
    without = expected(model, tower, ids, images[:0]) - expected(model, tower, ids, images)
    assert without.abs().max() > 0.2, "images change nothing"


def test_a_tower_computes_where_its_weights_are(tmp_path: Path) -> None:
    """Nothing of it stays on the CPU: torch's "meta" refuses to compute with numbers from there."""
    saved(tmp_path, "qwen3-vl")
    tower = tower_of(tmp_path)
    moved = type(tower)(tower.spec, {k: x.to("meta") for k, x in tower.weights.items()}, tower.settings, "meta")
    image = picture(tower, 3, 4)
    steps, rows = moved.encode(image.rows, image.columns, image.pixels), None
    with torch.inference_mode():
        while rows is None:
            try:
                next(steps)
            except StopIteration as end:
                rows = end.value.rows
    assert rows.device.type == "meta"
    assert len(rows) == 12


@pytest.mark.exhaustive
def test_every_gpu_has_the_images(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    engines: list[Engine],  # noqa: F811
    ranks_are_emulated: None,  # noqa: F811
) -> None:
    """Both are emulated."""
    saved(tmp_path, "qwen3-vl", hidden_size=64, num_attention_heads=4, head_dim=16)
    tower = tower_of(tmp_path)
    images = [picture(tower, 4, 4, 1), *frames(tower, 2, 3, 1)]
    given = [request(str(n), *prompt(tower, [*text(9, n), -1, *text(3)], [x]), 4) for n, x in enumerate(images)]
    engines += [on_gpu(tmp_path, device, max_model_len=64, **tp) for tp in ({}, {"tp": 2, "devices": "0,0"})]
    one, two = (run(each, given) for each in engines)
    assert {name: tokens(found) for name, found in two.items()} == {name: tokens(found) for name, found in one.items()}
