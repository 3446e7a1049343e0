"""KV statistics are those of the keys and values that enter the cache; bits are the recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.kv_scheme import parse_kv_scheme
from lmkit.kv_dtype import BFLOAT16, INT4, INT8
from lmkit.models import load_spec
from lmkit.models.kv_transform import KVTransform
from lmkit.models.spec import ModelSpec
from lmkit.quant.kv.config import KVFit, KVStats, check_layers, make_kv_config, turned_back, write_static
from lmkit.quant.report.evaluate import encode_text, evaluate
from lmkit.quant.run import prepare
from lmkit.quant.sections import KVLayerRecipe, KVRecipe
from tests.quant.helpers import recipe, tiny_checkpoint

UNTURNED = (torch.ones(50, 8), torch.zeros(50, 8))  # cosines and sines of no rotation


def spec(**differences: Any) -> ModelSpec:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    rest = {"intermediate_size": 96, "vocab_size": 100}
    return load_spec({"architectures": ["LlamaForCausalLM"]} | sizes | rest | differences)


def test_statistics_over_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(50, 2, 16, generator=generator) for _ in range(2))
    keys[:, 1, 4] += 100.0  # a large constant offset, as a key bias makes
    seen = KVStats.empty(2, 16)
    for part in (slice(0, 13), slice(13, 50)):
        seen.add(keys[part], values[part], (UNTURNED[0][part], UNTURNED[1][part]))
    torch.testing.assert_close(seen.k_absmax, keys.abs().amax(0))
    torch.testing.assert_close(seen.v_absmax, values.abs().amax(0))
    ratio = (keys.mean(0).abs() / keys.std(0, correction=0)).amax(-1)
    torch.testing.assert_close(seen.k_mean_ratio.float(), ratio, rtol=1e-3, atol=1e-3)
    (layer,) = make_kv_config(KVRecipe(bits=4), spec(num_hidden_layers=1), [seen]).layers
    assert (layer.k, layer.v) == ("int8", "int4")  # nothing was found to take the offset out
    assert layer.k_absmax == tuple(keys.abs().amax((0, 2)).tolist())
    seen.fit = KVFit(smoothing=0.5, transform=KVTransform(((), ((4, 100.0, 0.0),)), hadamard=True))
    (layer,) = make_kv_config(KVRecipe(bits=4), spec(num_hidden_layers=1), [seen]).layers
    assert (layer.k, layer.v, layer.smoothing, layer.key_mean, layer.hadamard) == (
        "int4", "int4", 0.5, ((), ((4, 100.0, 0.0),)), True,
    )  # fmt: skip
    override = KVRecipe(bits=4, layers={0: KVLayerRecipe(k_bits=16)})
    (layer,) = make_kv_config(override, spec(num_hidden_layers=1), [seen]).layers
    assert (layer.k, layer.key_mean, layer.hadamard) == ("dense", (), False)


def test_keys_are_turned_back() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, angle = torch.randn(5, 2, 10, generator=generator), torch.rand(5, 3, generator=generator) * 9
    cos, sin = 1.3 * angle.cos(), 1.3 * angle.sin()
    x, y = keys[..., :3], keys[..., 3:6]
    turned = [x * cos[:, None] - y * sin[:, None], y * cos[:, None] + x * sin[:, None], keys[..., 6:]]
    torch.testing.assert_close(turned_back(torch.cat(turned, dim=-1), cos, sin), keys)


def test_a_budget_goes_where_it_saves_most() -> None:
    stats = []
    for gain in (1.0, 5.0, 3.0):
        seen = KVStats.empty(2, 16)
        seen.add(torch.randn(50, 2, 16), torch.randn(50, 2, 16), UNTURNED)
        seen.fit = KVFit(errors={"k int4": 2 * gain, "k int8": gain, "v int4": 0.1 * gain, "v int8": 0.0})
        stats.append(seen)

    def bits(average: float) -> list[tuple[str, str]]:
        recipe = KVRecipe(bits="auto", average_bits=average, type="fp8")
        return [(layer.k, layer.v) for layer in make_kv_config(recipe, spec(), stats).layers]

    assert bits(4.0) == [("int4", "int4")] * 3
    assert bits(5.4) == [("int4", "int4"), ("fp8", "int4"), ("fp8", "int4")]
    assert bits(6.7) == [("fp8", "int4"), ("fp8", "fp8"), ("fp8", "int4")]
    assert bits(8.0) == [("fp8", "fp8")] * 3


class Written(dict[str, torch.Tensor]):
    """What a CheckpointWriter is asked to add."""

    add = dict.__setitem__


@pytest.mark.parametrize(("kind", "largest", "name"), [("int", 127, "int"), ("fp8", 448, "float")])
def test_static_scales(kind: Any, largest: int, name: str) -> None:
    seen = KVStats.empty(2, 16)
    seen.add(torch.full((50, 2, 16), -3.0), torch.full((50, 2, 16), 5.0), UNTURNED)
    written: Any = Written()
    entry = write_static(
        written, {"a": 1}, KVRecipe(bits=8, type=kind, scheme="static8"), spec(num_hidden_layers=1), [seen]
    )
    assert entry is not None
    assert entry["a"] == 1
    scheme = parse_kv_scheme({"quantization_config": entry})
    assert scheme is not None
    assert (scheme.type, scheme.strategy, scheme.dynamic) == (name, "tensor", False)
    prefix = "model.layers.0.self_attn."
    assert {key: value.tolist() for key, value in written.items()} == {
        prefix + "k_scale": [pytest.approx(3 / largest)], prefix + "v_scale": [pytest.approx(5 / largest)],
    }  # fmt: skip
    assert write_static(written, None, KVRecipe(bits=8), spec(num_hidden_layers=1), [seen]) is None


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (KVRecipe(bits=8, scheme="static8"), "static8 is stored in compressed-tensors only, not in awq"),
        (KVRecipe(hadamard=True), "a power of two, not 24"),
        (KVRecipe(key_mean=True), "RoPE here is dynamic"),
    ],
)
def test_refused(recipe: KVRecipe, message: str) -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match=message):
        check_layers(recipe, spec(head_dim=24, rope_parameters=rope, max_position_embeddings=64), "awq")


def test_a_channel_that_never_changes_has_a_finite_ratio() -> None:
    seen = KVStats.empty(1, 4)
    seen.add(torch.full((5, 1, 4), 3.0), torch.zeros(5, 1, 4), (torch.ones(5, 2), torch.zeros(5, 2)))
    assert 1e3 < float(seen.k_mean_ratio) <= 1e6


def test_bits_by_layer() -> None:
    recipe = KVRecipe(bits=8, layers={0: KVLayerRecipe(k_bits=16), 2: KVLayerRecipe(v_bits=4)})
    seen = KVStats.empty(2, 16)
    seen.add(torch.randn(50, 2, 16), torch.randn(50, 2, 16), UNTURNED)
    config = make_kv_config(recipe, spec(), [seen] * 3)
    assert [(layer.k, layer.v) for layer in config.layers] == [("dense", "int8"), ("int8", "int8"), ("int8", "int4")]
    assert config.dtypes(2, BFLOAT16) == (INT8, INT4)


def test_layers_that_do_not_exist_are_refused() -> None:
    check_layers(KVRecipe(layers={2: KVLayerRecipe(k_bits=8)}), spec())
    with pytest.raises(ConfigError, match="no layer 3, the model has 3"):
        check_layers(KVRecipe(layers={3: KVLayerRecipe(k_bits=8)}), spec())


@pytest.mark.parametrize(("kind", "stored"), [("int", "int8"), ("fp8", "fp8")])
def test_fixed_scales_from_the_recipe_to_the_cache(tmp_path: Path, kind: str, stored: str) -> None:
    source, out = tiny_checkpoint(tmp_path / "source"), tmp_path / "out"
    asked = recipe(format="compressed-tensors", kv={"bits": 8, "scheme": "static8", "type": kind})
    prepare(source, asked).run(out)
    assert CheckpointReader(out).has("model.layers.0.self_attn.k_scale")
    assert not (out / "kv_config.json").exists()
    result = evaluate(out, encode_text(source)[:200], against=out, activations="exact", seq_len=64)
    assert result.kv_dtype == stored
    assert result.divergence is not None
    assert 0 < result.divergence.kl_mean < 0.02
