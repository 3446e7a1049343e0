"""What is found for a layer's keys: folding changes no score, the mean is left out exactly, and INT4 gets better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cpu import isa
from lmkit.kv_dtype import FLOAT32, FP8, INT4, INT8, KVDtype
from lmkit.models import load_spec
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.kv_transform import PLAIN, KVTransform
from lmkit.models.source import ModelSource
from lmkit.quant.kv.config import KVStats
from lmkit.quant.kv.fit import (
    LARGE_MEAN,
    Probe,
    divided,
    fit_cache,
    fit_first,
    fold,
    key_mean,
    prepare_cache,
    smoothing_scale,
)
from lmkit.quant.layer.layer import CalibratedLayer, Geometry
from lmkit.quant.sections import SWITCHES, KVRecipe
from tests.quant import helpers

ROWS, LENGTH = 4, 48
BIASED = 6  # the pair of the large bias, of 8: it turns slowly


def calibrated(tmp_path: Path, family: str, bias: float = 0.0, gain: float = 1.0, **sizes: Any) -> CalibratedLayer:
    """A layer whose keys have an offset (before RoPE) in one pair, and another pair `gain` times as large."""
    source = ModelSource(helpers.tiny_checkpoint(tmp_path / "model", family, head_dim=16, **sizes))
    layer = source.layer(0, torch.float32)
    rows = layer.weights["attn.k"]
    assert isinstance(rows, Tensor)
    if "attn.k.bias" in layer.weights:
        offset = layer.weights["attn.k.bias"]
        assert isinstance(offset, Tensor)
        offset.view(-1, 16)[:, [BIASED, BIASED + 8]] += torch.tensor([bias, -bias])
    rows.view(-1, 16, rows.shape[1])[:, [2, 10]] *= gain
    hidden = torch.randn(ROWS * LENGTH, source.spec.hidden_size, generator=torch.Generator().manual_seed(2))
    return helpers.calibrate(layer, hidden, num_rows=ROWS)


def seen_of(probe: Probe) -> KVStats:
    projected = probe.projected
    seen = KVStats.empty(*projected.k.shape[1:])
    copies = projected._replace(q=projected.q.clone(), k=projected.k.clone())
    geometry = probe.sequences
    probe.layer.attention.attend(copies, geometry.at)
    seen.add(*geometry.keys_and_values(), geometry.rope)
    return seen


def probe_of(layer: CalibratedLayer) -> Probe:
    return Probe.of(layer.layer, layer.inputs["attn.q"].sample, layer.sequences)


def scores(layer: DecoderLayer, sample: Tensor, geometry: Geometry) -> Tensor:
    """Of all pairs of tokens, queries and keys after RoPE, [heads, tokens, tokens]."""
    q, k, v, _ = layer.attention.queries_keys_values(sample)
    ops.rope_append.named("reference")(
        q, k, v, *geometry.rope, geometry.kv.k, geometry.kv.v, geometry.batch.geometries[0].slots
    )
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("qhd,khd->hqk", q, keys)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2", "gemma3"])
def test_folding_leaves_scores_equal(tmp_path: Path, family: str) -> None:
    layer = calibrated(tmp_path, family, bias=20.0, gain=9.0)
    sample, geometry = layer.inputs["attn.q"].sample, layer.sequences
    before = scores(layer.layer, sample, geometry)
    scale = smoothing_scale(probe_of(layer), (), 0.7, powers=False)
    assert float(scale.max() / scale.min()) > 1.5
    torch.testing.assert_close(scale[:, :8], scale[:, 8:])
    fold(layer.layer, scale)
    after = scores(layer.layer, sample, geometry)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5


def test_the_statistics_are_of_keys_before_rope(tmp_path: Path) -> None:
    layer = calibrated(tmp_path, "qwen2", bias=300.0)
    probe = probe_of(layer)
    seen = seen_of(probe)
    torch.testing.assert_close(seen.k_mean.float(), probe.projected.k.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen.k_std.float(), probe.projected.k.std(0, correction=0), rtol=2e-2, atol=2e-2)
    for pairs in key_mean(seen, layer.layer.spec, LARGE_MEAN):
        assert pairs[0][0] == BIASED
        assert len(pairs) <= 8


@pytest.mark.parametrize("dtype", [FLOAT32, INT8, FP8, INT4], ids=str)
def test_a_mean_left_out_is_exact(tmp_path: Path, dtype: KVDtype) -> None:
    """Float keys: as without; codes: as those of a model without the bias, although its scores are in the hundreds."""
    layer = calibrated(tmp_path, "qwen2", bias=300.0)
    probe = probe_of(layer)
    mean = key_mean(seen_of(probe), layer.layer.spec, LARGE_MEAN)
    with_mean = probe.error(KVStorage(dtype, FLOAT32, KVTransform(mean)))
    limit = {FLOAT32: 1e-10, INT8: 2e-5, FP8: 2e-3, INT4: 1e-2}[dtype] * float(probe.exact.square().mean())
    assert with_mean < limit
    if dtype != FLOAT32:
        assert with_mean < probe.error(KVStorage(dtype, FLOAT32)) / 50


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"gain": 12.0}), ("qwen2", {"bias": 300.0, "gain": 12.0}), ("qwen3", {"gain": 1.0})],
)
def test_int4_gets_better_and_function_stays(tmp_path: Path, family: str, changes: dict[str, float]) -> None:
    layer = calibrated(tmp_path, family, **changes)
    probe = probe_of(layer)
    seen = seen_of(probe)
    plain = probe.error(KVStorage(INT4, FLOAT32))
    fit_cache(layer, seen, KVRecipe(bits=4, balance=False, first_token=False), torch.ones(1, 1))
    after = probe_of(layer)
    torch.testing.assert_close(after.exact, probe.exact, rtol=1e-4, atol=1e-4)
    assert seen.fit.transform.has_mean == ("bias" in changes)
    found = after.error(KVStorage(INT4, FLOAT32, seen.fit.transform))
    assert found == pytest.approx(seen.fit.errors["k int4"], rel=0.2)
    assert found <= plain * (0.34 if "bias" in changes or family == "llama" else 1.0)
    assert seen.fit.errors["k int8"] < seen.fit.errors["k int4"]
    assert seen.fit.errors["v int8"] < seen.fit.errors["v int4"]


def test_powers_of_two_where_bfloat16_stores_them(tmp_path: Path) -> None:
    probe = probe_of(calibrated(tmp_path, "qwen2", gain=9.0))
    scale = smoothing_scale(probe, (), 1.0, powers=True)
    assert bool((scale.log2() == scale.log2().round()).all())
    assert len(scale.unique()) > 1


def test_a_recipe_that_switches_all_off_changes_nothing(tmp_path: Path) -> None:
    layer = calibrated(tmp_path, "qwen2", bias=300.0, gain=9.0)
    before = {role: weight.clone() for role, weight in layer.layer.weights.items() if isinstance(weight, Tensor)}
    seen = seen_of(probe_of(layer))
    off = KVRecipe(4, smooth=False, **dict.fromkeys(SWITCHES, False))
    prepare_cache(layer.layer, seen, off)
    fit_cache(layer, seen, off, torch.ones(1, 1))
    fit_first(layer.layer, seen, off, [])
    assert (seen.fit.transform, seen.fit.smoothing, seen.fit.values_turned) == (PLAIN, None, False)
    assert all(torch.equal(before[role], weight) for role, weight in layer.layer.weights.items())  # type: ignore[arg-type]
    fit_cache(layer, seen, KVRecipe(bits=16), torch.ones(1, 1))
    assert all(torch.equal(before[role], weight) for role, weight in layer.layer.weights.items())  # type: ignore[arg-type]


def test_a_mean_divided_is_the_mean_of_divided_keys() -> None:
    scale = torch.tensor([[2.0, 4.0, 2.0, 4.0]])
    assert divided((((1, 8.0, -2.0),),), scale) == (((1, 2.0, -0.5),),)


def test_the_mean_is_exact_far_into_a_sequence() -> None:
    """At positions beyond 32k, keys stored without b give the attention of the keys themselves."""
    spec = load_spec(
        {
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2,
            "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8,
            "max_position_embeddings": 1 << 16, "rope_theta": 1e6,
        }
    ).layers[0]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    start, count = 40_000, 40
    geometry = Geometry.of(spec, 1, start + count)
    last = slice(start, None)
    rope = (geometry.rope[0][last], geometry.rope[1][last])
    mean = (tuple((i, 100.0 * (-1) ** i, 50.0) for i in (3, 9, 14)),)
    b = torch.zeros(1, 32)
    for i, x, y in mean[0]:
        b[0, i], b[0, i + 16] = x, y
    k, v = torch.randn(count, 1, 32, generator=generator) + b, torch.randn(count, 1, 32, generator=generator)
    q = torch.randn(count, 2, 32, generator=generator) / 20
    outputs = []
    for storage in (KVStorage(FLOAT32, FLOAT32), KVStorage(FLOAT32, FLOAT32, KVTransform(mean))):
        (kv,) = allocate([spec], [storage], len(geometry.kv.k.data), 32, start + count)
        queries = q.clone()
        (batch,) = geometry.batch.geometries
        batch = replace(batch, query_start=torch.tensor([0, count]).int(), slots=batch.slots[last])
        ops.rope_append.named("reference")(queries, k.clone(), v, *rope, kv.k, kv.v, batch.slots)
        outputs.append(
            ops.paged_attention.named("cpu." + isa.host().name)(
                queries, kv.k, kv.v, batch, AttentionSpec(32**-0.5, count)
            )
        )
    plain, left_out = (output[-1] for output in outputs)  # the others' windows reach keys that are not there
    torch.testing.assert_close(left_out, plain, rtol=2e-4, atol=2e-4)
    assert float((plain - v.mean(0)).abs().max()) > 0.1
