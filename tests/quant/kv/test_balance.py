"""The statistics and matrices of INT4 keys and values: against plain formulas, exact in floats, and better in codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmkit.kv_dtype import FLOAT32, INT4
from lmkit.models.kv_storage import KVStorage
from lmkit.models.layer_spec import LayerSpec
from lmkit.quant.kv.balance import Moments, balanced, rotation, turn_values
from lmkit.quant.kv.fit import fit_cache, prepare_cache
from lmkit.quant.layer.gradients import turned
from lmkit.quant.sections import KVRecipe
from tests.quant.kv.test_fit import calibrated, probe_of, seen_of

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "glm4"]


def layer_spec(tmp_path: Path, family: str) -> LayerSpec:
    return calibrated(tmp_path, family).layer.spec


def test_the_covariance_of_keys_without_their_mean(tmp_path: Path) -> None:
    """Gathered in parts, before the mean is known, and without the first tokens."""
    spec = layer_spec(tmp_path, "llama")
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(20).repeat(3)
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02, 0.5, 0.7, 0.9, 0.01])
    rope = angles.cos() * 1.1, angles.sin() * 1.1
    keys, queries = torch.randn(60, 2, 16, generator=generator) + 5, torch.randn(60, 4, 16, generator=generator)
    b = torch.randn(2, 16, generator=generator)
    moments = Moments.empty(spec)
    for part in (slice(20), slice(20, 60)):
        moments.add(keys[part], queries[part], (rope[0][part], rope[1][part]), positions[part])
    later = positions > 0
    rest = (keys - turned(b.expand(60, 2, 16), rope))[later].double()
    torch.testing.assert_close(moments.without(b.double()), torch.einsum("thd,the->hde", rest, rest) / 57)
    grouped = queries[later].view(57, 2, 2, 16).double()
    torch.testing.assert_close(moments.queries, torch.einsum("thgd,thge->hde", grouped, grouped))


@pytest.mark.parametrize("dim", [6, 64, 80])
def test_both_covariances_become_one_that_is_flat(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    keys, queries = (
        torch.cov(torch.randn(dim, 40 * dim, generator=generator).double() * torch.logspace(-0.5, 0.5, dim)[:, None])
        for _ in range(2)
    )
    queries = torch.roll(queries, (dim // 3, dim // 3), (0, 1))
    a = balanced(keys[None], queries[None])[0]
    of_keys, of_queries = a @ keys @ a.T, a.inverse().T @ queries @ a.inverse()
    of_keys, of_queries = of_keys / of_keys.trace(), of_queries / of_queries.trace()
    torch.testing.assert_close(of_keys, of_queries, rtol=0, atol=1e-2 * float(of_keys.norm()))
    widths = of_keys.diagonal().sqrt()
    assert float(widths.max() / widths.min()) < 2
    assert float((keys.diagonal().max() / keys.diagonal().min()).sqrt()) > 5


@pytest.mark.parametrize("dim", [2, 6, 64, 80])
def test_the_rotation_is_orthonormal_and_flat(dim: int) -> None:
    h = rotation(dim)
    torch.testing.assert_close(h @ h, torch.eye(dim).double())
    assert float(h.abs().max()) <= (2 / dim) ** 0.5 + 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_values_turned_in_the_weights_leave_outputs_equal(tmp_path: Path, family: str) -> None:
    whole = calibrated(tmp_path, family)
    probe, layer = probe_of(whole), whole.layer.with_weights(dict(whole.layer.weights))
    turn_values(layer)
    after = replace(probe, layer=layer, projected=layer.attention.queries_keys_values(whole.inputs["attn.q"].sample))
    torch.testing.assert_close(after.output(KVStorage(FLOAT32, FLOAT32)), probe.exact, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after.projected.v, probe.projected.v, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fit_is_exact_in_floats_and_better_in_codes(tmp_path: Path, family: str) -> None:
    """A wide pair of channels, a bias where there is one, and a first token like no other."""
    recipe, layer = KVRecipe(bits=4), calibrated(tmp_path, family, bias=50.0, gain=9.0)
    plain = probe_of(layer)
    first = plain.sequences.batch.positions == 0
    layer.inputs["attn.q"].sample[first] *= 6
    seen = seen_of(plain)
    prepare_cache(layer.layer, seen, recipe)
    assert seen.moments is not None
    probe = probe_of(layer)
    keys, queries = (turned(x, probe.sequences.rope) for x in (probe.projected.k, probe.projected.q))
    seen.moments.add(keys, queries, probe.sequences.rope, probe.sequences.batch.positions)
    assert fit_cache(layer, seen, recipe, torch.ones(1, 1)) == {}
    power, transform = float(probe.exact.square().mean()), seen.fit.transform
    assert transform.first_key is not None
    assert probe.error(KVStorage(FLOAT32, FLOAT32, transform)) < 1e-8 * power
    assert probe.error(KVStorage(INT4, FLOAT32, transform)) < 0.7 * probe.error(KVStorage(INT4, FLOAT32))
    assert probe.error(KVStorage(FLOAT32, INT4, transform)) < plain.error(KVStorage(FLOAT32, INT4))
