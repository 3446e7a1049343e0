"""KV statistics are those of the keys and values that enter the cache; bits are the recipe's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.models import load_spec
from lmkit.models.spec import ModelSpec
from lmkit.quant.kv import KVStats, check_layers, make_kv_config
from lmkit.quant.recipe import KVLayerRecipe, KVRecipe


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
        seen.add(keys[part], values[part])
    torch.testing.assert_close(seen.k_absmax, keys.abs().amax((0, 2)))
    torch.testing.assert_close(seen.v_absmax, values.abs().amax((0, 2)))
    ratio = (keys.mean(0).abs() / keys.std(0, correction=0)).amax(-1)
    torch.testing.assert_close(seen.k_mean_ratio.float(), ratio, rtol=1e-3, atol=1e-3)
    config = make_kv_config(KVRecipe(bits=4), spec(num_hidden_layers=1), [seen])
    assert config.layers[0].risky_int4_keys


def test_a_channel_that_never_changes_has_a_finite_ratio() -> None:
    seen = KVStats.empty(1, 4)
    seen.add(torch.full((5, 1, 4), 3.0), torch.zeros(5, 1, 4))
    assert 1e3 < float(seen.k_mean_ratio) <= 1e6


def test_bits_by_layer() -> None:
    recipe = KVRecipe(bits=8, layers={0: KVLayerRecipe(k_bits=16), 2: KVLayerRecipe(v_bits=4)})
    seen = KVStats.empty(2, 16)
    seen.add(torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    config = make_kv_config(recipe, spec(), [seen] * 3)
    assert [(layer.k_bits, layer.v_bits) for layer in config.layers] == [(16, 8), (8, 8), (8, 4)]
    assert config.dtypes(2, "bfloat16") == ("int8", "int4")


def test_layers_that_do_not_exist_are_refused() -> None:
    check_layers(KVRecipe(layers={2: KVLayerRecipe(k_bits=8)}), spec())
    with pytest.raises(ConfigError, match="no layer 3, the model has 3"):
        check_layers(KVRecipe(layers={3: KVLayerRecipe(k_bits=8)}), spec())
