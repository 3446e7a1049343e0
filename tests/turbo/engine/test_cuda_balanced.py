"""A model with the kv_config.json of a calibration for INT4 on device "cuda", emulated: the CPU engine's answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lmkit.formats.kv_config import KVConfig, KVLayerConfig, Numbers, save_kv_config
from lmkit.kernels import ops
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.turbo.engine.test_cuda_engine import (  # noqa: F401
    SIZES,
    assert_alike,
    checkpoint,
    device,
    emulated,
    on_cpu,
    on_gpu,
    requests,
)
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow
HEADS, DIM, LAYERS = (SIZES[name] for name in ("num_key_value_heads", "head_dim", "num_hidden_layers"))


def layer(seed: int, stored: str) -> KVLayerConfig:
    random = np.random.default_rng(seed)
    matrices = np.linalg.qr(random.normal(size=(HEADS, DIM, DIM)))[0] * np.logspace(-0.3, 0.3, DIM)[:, None]
    first = (Numbers.of(random.normal(size=(HEADS, DIM))) for _ in range(2))
    mean = tuple(((3, 0.5, -0.2), (head, 0.1, 0.1)) for head in range(HEADS))
    return KVLayerConfig(
        k=stored, v=stored, key_mean=mean, balance=Numbers.of(matrices), first_key=next(first), first_value=next(first)
    )


@emulated
@pytest.mark.parametrize(
    ("stored", "tolerance"), [pytest.param("int8", 0.25, marks=pytest.mark.exhaustive), ("int4", 1.0)]
)
def test_tokens_are_those_of_the_cpu(
    checkpoint: Path,  # noqa: F811
    device: CudaDevice,  # noqa: F811
    tmp_path: Path,
    stored: str,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks beside new tokens, captured steps, and prefixes that are found again. The model is random and
    sharp: CPU and GPU round to 4 bits at a few other edges, which changes as much with a plain cache."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    layers = tuple(layer(i, stored) for i in range(LAYERS))
    save_kv_config(KVConfig(num_kv_heads=HEADS, head_dim=DIM, layers=layers), model)
    want = run(on_cpu(model), requests())
    monkeypatch.setattr(ops.rope_paged_attention, "fall_back", None)  # kernels do it
    engine = on_gpu(model, device)
    assert "decode steps" in engine.info.captured
    for hits in (False, True):
        got = run(engine, requests())
        assert assert_alike(got, want, tolerance) > 0.3
        assert bool(engine.stats().prefix_hits) == hits
