"""KV cache: what calibration sees of keys and values, and the kv_config.json that a recipe asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmkit.errors import ConfigError
from lmkit.formats.kv_config import KVConfig, KVLayerConfig
from lmkit.models.spec import ModelSpec
from lmkit.quant.recipe import KVLayerRecipe, KVRecipe

MAX_RATIO = 1e6  # of |mean| / std: a channel that never changes


@dataclass
class KVStats:
    """Keys (after RoPE) and values of one layer over the calibration set, as they enter the cache."""

    k_absmax: Tensor  # float32 [num_kv_heads]
    v_absmax: Tensor
    k_sum: Tensor  # float64 [num_kv_heads, head_dim]
    k_square_sum: Tensor
    num_tokens: int = field(default=0)

    @classmethod
    def empty(cls, num_kv_heads: int, head_dim: int) -> KVStats:
        heads, channels = torch.zeros(num_kv_heads), torch.zeros(num_kv_heads, head_dim, dtype=torch.float64)
        return cls(heads, heads.clone(), channels, channels.clone())

    def add(self, keys: Tensor, values: Tensor) -> None:
        """float32 [tokens, num_kv_heads, head_dim] each."""
        self.k_absmax = torch.maximum(self.k_absmax, keys.abs().amax((0, 2)))
        self.v_absmax = torch.maximum(self.v_absmax, values.abs().amax((0, 2)))
        self.k_sum += keys.sum(0, dtype=torch.float64)
        self.k_square_sum += keys.square().sum(0, dtype=torch.float64)
        self.num_tokens += len(keys)

    @property
    def k_mean_ratio(self) -> Tensor:
        """float64 [num_kv_heads], the largest |mean| / std of a head's channels over tokens."""
        mean = self.k_sum / self.num_tokens
        std = (self.k_square_sum / self.num_tokens - mean.square()).clamp_min(0).sqrt()
        return (mean.abs() / std.clamp_min(1e-12)).clamp_max(MAX_RATIO).amax(-1)


def check_layers(recipe: KVRecipe, spec: ModelSpec) -> None:
    """Raise ConfigError for a layer the model does not have and for bits it cannot store."""
    for layer in recipe.layers:
        if layer >= spec.num_layers:
            raise ConfigError(f"recipe: kv.layers: there is no layer {layer}, the model has {spec.num_layers}")
    bits = {recipe.bits, *(b for layer in recipe.layers.values() for b in (layer.k_bits, layer.v_bits))}
    if 4 in bits and spec.head_dim % 2:
        raise ConfigError(f"recipe: kv: 4 bits need an even head_dim, not {spec.head_dim}")


def make_kv_config(recipe: KVRecipe, spec: ModelSpec, stats: list[KVStats]) -> KVConfig:
    """The recipe's bits and the statistics of each layer."""
    layers = []
    for index, seen in enumerate(stats):
        override = recipe.layers.get(index, KVLayerRecipe())
        layers.append(
            KVLayerConfig(
                k_bits=override.k_bits or recipe.bits,
                v_bits=override.v_bits or recipe.bits,
                k_absmax=tuple(seen.k_absmax.tolist()),
                v_absmax=tuple(seen.v_absmax.tolist()),
                k_mean_ratio=tuple(seen.k_mean_ratio.tolist()),
            )
        )
    return KVConfig(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, layers=tuple(layers))
