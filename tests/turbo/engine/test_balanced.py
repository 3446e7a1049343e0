"""A model whose kv_config.json has matrices, means and vectors of position 0: attention undoes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.formats.kv_config import KVConfig, KVLayerConfig, Numbers, save_kv_config
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import whole_batch
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.kv_transform import KVTransform
from lmkit.models.loader import load
from lmkit.models.resolved import resolved
from tests.turbo.engine.test_engine import engine_for, propose_drafts, requests_for, run, tokens
from tests.turbo.engine.test_engine_cache import FIRST, ask

HEADS, DIM, LAYERS = 2, 64, 8  # of the demo


def layer_config(seed: int) -> KVLayerConfig:
    random = np.random.default_rng(seed)
    matrices = np.linalg.qr(random.normal(size=(HEADS, DIM, DIM)))[0] * np.logspace(-1, 1, DIM)[:, None]
    first = (Numbers.of(random.normal(size=(HEADS, DIM)) * 4) for _ in range(2))
    mean = tuple(((3, 5.0, -2.0), (head, 1.0, 1.0)) for head in range(HEADS))
    return KVLayerConfig(
        k="int4", v="int4", key_mean=mean, balance=Numbers.of(matrices), first_key=next(first), first_value=next(first)
    )


def test_the_transform_changes_no_output(demo_model: Path) -> None:
    """With KV in float32, of a text that is longer than a partition of attention."""
    batch, num_blocks = whole_batch([list(range(100, 400)), [7]], 32)
    streams = []
    with resolved(demo_model, activations="exact") as model:
        decoder, spec = load(model), model.spec
    for changed in (False, True):
        transforms = [KVTransform.of(layer_config(i), keys=changed, values=changed) for i in range(LAYERS)]
        storages = [KVStorage(FLOAT32, FLOAT32, transform) for transform in transforms]
        delta, residual = decoder.hidden(batch, allocate(spec.layers, storages, num_blocks, 32, 400))
        streams.append(delta if residual is None else delta + residual)
    torch.testing.assert_close(streams[1], streams[0], rtol=0, atol=2e-4 * float(streams[0].abs().max()))


@pytest.fixture(scope="module")
def balanced_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balanced") / "model"
    shutil.copytree(demo_model, folder)
    layers = tuple(layer_config(i) for i in range(LAYERS))
    save_kv_config(KVConfig(num_kv_heads=HEADS, head_dim=DIM, layers=layers), folder)
    return folder


def test_chunks_the_prefix_cache_and_tiers_change_nothing(balanced_model: Path, tmp_path: Path) -> None:
    answer, _ = ask(engine_for(balanced_model, prefix_cache=False), FIRST)
    engine = engine_for(balanced_model, max_step_tokens=48, kv_host_memory=4 << 20)
    assert ask(engine, FIRST) == (answer, 0)
    assert ask(engine, FIRST) == (answer, 200)
    assert ask(engine, FIRST[:1], 3) == (ask(engine_for(balanced_model), FIRST[:1], 3)[0], 0)
    engine.close()


def test_drafts_and_preemption_change_nothing(balanced_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are refused are overwritten, and what a preempted sequence has at position 0 is computed again."""
    requests = [request for request in requests_for(balanced_model) if len(request.prompt_ids) < 20]
    want = {name: tokens(outputs) for name, outputs in run(engine_for(balanced_model), requests).items()}
    longest = max(len(request.prompt_ids) for request in requests) + 24 + 8  # in whole blocks
    kv_memory = LAYERS * HEADS * 2 * 36 * longest
    small = engine_for(balanced_model, kv_memory=kv_memory, max_model_len=None, prefix_cache=False)
    assert {name: tokens(outputs) for name, outputs in run(small, requests).items()} == want
    assert small.stats().preemptions > 0
    drafted = engine_for(balanced_model, overlap=False)
    lengths = propose_drafts(drafted, want, monkeypatch)
    assert {name: tokens(outputs) for name, outputs in run(drafted, requests).items()} == want
    assert max(lengths) == 4
