"""KV cache: the statistics of keys and values from calibration, and the configuration that a recipe makes of them.

The configuration is kv_config.json or fixed scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import ConfigError
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, storage_name
from lmkit.formats.kv_scheme import KVScheme
from lmkit.kv_dtype import KVDtype
from lmkit.layers.blocks.state import PagedKV
from lmkit.log import get_logger
from lmkit.models.kv_storage import LARGEST_SCALE, SMALLEST_SCALE, scale_name
from lmkit.models.kv_transform import PLAIN, KVTransform
from lmkit.models.spec import ModelSpec
from lmkit.quant.kv.balance import Moments, turns_values
from lmkit.quant.sections import KVLayerRecipe, KVRecipe

log = get_logger(__name__)

MAX_RATIO = 1e6  # of |mean| / std; a channel that never changes reaches it
# Above this |mean| / std before RoPE, a channel's offset takes most of a token's 16 levels, and INT4 loses the
# rest of the key.
RISKY_RATIO = 8.0


@dataclass(frozen=True)
class KVFit:
    """The transform that was found for a layer's keys and values (quant.kv.fit), and the cost of storing them.

    `errors` of "k int4", "v int8" and so on, of the types to choose from, else of int4 and int8: squared error of the
    attention's output, relative to the hidden states.
    """

    smoothing: float | None = None
    transform: KVTransform = PLAIN
    values_turned: bool = False  # in the weights
    errors: dict[str, float] = field(default_factory=dict)


@dataclass
class KVStats:
    """Statistics of one layer's keys and values over the calibration set. Largest absolute values are taken as keys and
    values enter the cache, sums from keys before RoPE. The statistics lie on the CPU, wherever keys and values do."""

    k_absmax: Tensor  # float32 [num_kv_heads, head_dim]
    v_absmax: Tensor
    k_sum: Tensor  # float64 [num_kv_heads, head_dim]
    k_square_sum: Tensor
    num_tokens: int = 0
    fit: KVFit = field(default_factory=KVFit)
    moments: Moments | None = None  # of keys and queries, if a recipe wants them; they are not kept

    @classmethod
    def empty(cls, num_kv_heads: int, head_dim: int) -> KVStats:
        zeros = torch.zeros(num_kv_heads, head_dim)
        return cls(zeros, zeros.clone(), zeros.double(), zeros.double())

    @classmethod
    def of(cls, kv: PagedKV | None) -> KVStats:
        """Those of a layer that keeps `kv`, before any token was seen."""
        return cls.empty(0, 0) if kv is None else cls.empty(kv.num_heads, kv.head_dim)

    def add(
        self,
        keys: Tensor,
        values: Tensor,
        rope: tuple[Tensor, Tensor],
        queries: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Add keys and values, float32 [tokens, num_kv_heads, head_dim] each. `rope` holds the cosines and sines
        [tokens, R/2] that rotated the keys. Moments need queries [tokens, num_heads, head_dim] after RoPE, and
        positions [tokens], too."""
        if self.moments is not None:
            assert queries is not None
            assert positions is not None
            self.moments.add(keys, queries, rope, positions)
        self.k_absmax = torch.maximum(self.k_absmax, keys.abs().amax(0).cpu())
        self.v_absmax = torch.maximum(self.v_absmax, values.abs().amax(0).cpu())
        keys = turned_back(keys, *rope)
        self.k_sum += keys.sum(0, dtype=torch.float64).cpu()
        self.k_square_sum += keys.square().sum(0, dtype=torch.float64).cpu()
        self.num_tokens += len(keys)

    def divide_keys(self, s: Tensor) -> None:
        """Change the statistics to those of keys / s. s float32 [num_kv_heads, head_dim], the same for both elements of
        a pair."""
        self.k_absmax /= s
        self.k_sum /= s
        self.k_square_sum /= s.square()

    @property
    def k_mean(self) -> Tensor:
        """float64 [num_kv_heads, head_dim], before RoPE."""
        return self.k_sum / self.num_tokens

    @property
    def k_std(self) -> Tensor:
        return (self.k_square_sum / self.num_tokens - self.k_mean.square()).clamp_min(0).sqrt()

    @property
    def k_mean_ratio(self) -> Tensor:
        """float64 [num_kv_heads], the largest |mean| / std of a head's channels over tokens."""
        return (self.k_mean.abs() / self.k_std.clamp_min(1e-12)).clamp_max(MAX_RATIO).amax(-1)


def turned_back(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [tokens, heads, head_dim] as they were before RoPE."""
    half = cos.shape[-1]
    square = (cos.square() + sin.square())[:, None]
    cos, sin = cos[:, None] / square, sin[:, None] / square
    first, second, rest = keys.split((half, half, keys.shape[-1] - 2 * half), dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def check_layers(recipe: KVRecipe, spec: ModelSpec, weight_format: str = "") -> None:
    """Raise ConfigError for a layer that the model does not have, and for a storage that the model or the format cannot
    have."""
    for layer in recipe.layers:
        if layer >= spec.num_layers:
            raise ConfigError(f"recipe: kv.layers: there is no layer {layer}, the model has {spec.num_layers}")
        if spec.layers[layer].kv is None:
            raise ConfigError(f"recipe: kv.layers: layer {layer} has no keys and values: its state is recurrent")
    if recipe.bits != 16 and not describable(spec):
        raise ConfigError("recipe: kv: no file describes this model's KV cache; leave kv out, and use serve --kv-dtype")
    bits = {recipe.bits, *(b for layer in recipe.layers.values() for b in (layer.k_bits, layer.v_bits))}
    for dim in {layer.kv.head_dim for layer in spec.kinds if layer.kv}:
        asked = {recipe.stored(b) for b in bits if b is not None} | set(recipe.choices)
        for kind in sorted((t for t in asked if t is not None and dim % t.unit), key=lambda t: t.bits):
            raise ConfigError(f"recipe: kv: {kind.needs_of_rows}, not {dim}")
        if recipe.hadamard is True and dim & (dim - 1):
            raise ConfigError(f"recipe: kv: hadamard needs a head_dim that is a power of two, not {dim}")
    if recipe.value_hadamard is True and not all(turns_values(layer) for layer in spec.kinds if layer.kv):
        raise ConfigError(
            "recipe: kv: value_hadamard: the output of this model's attention is gated, or keys are values"
        )
    if recipe.key_mean is True and spec.dynamic_length:
        raise ConfigError("recipe: kv: key_mean needs angles that do not depend on the sequence, RoPE here is dynamic")
    if recipe.scheme == "static8" and weight_format != "compressed-tensors":
        raise ConfigError(f"recipe: kv: scheme static8 is stored in compressed-tensors only, not in {weight_format}")


def describable(spec: ModelSpec) -> bool:
    """Whether a kv_config.json can describe the model's KV cache: it has one size of heads for all layers, and a
    calibration sees what attention reads."""
    kept = [layer.kv for layer in spec.kinds if layer.kv]
    if any(layer.mixer.scores is None for layer in spec.kinds if layer.kv):
        return False
    return len({(kv.num_heads, kv.head_dim) for kv in kept}) == 1 and not any(kv.shared for kv in kept)


def make_kv_config(recipe: KVRecipe, spec: ModelSpec, stats: list[KVStats]) -> KVConfig:
    """The configuration of all layers: the recipe's storage, the transform that was found, and the statistics."""
    chosen = _budgeted(recipe, spec, stats) if recipe.bits == "auto" else {}
    layers = []
    for index, seen in enumerate(stats):
        if spec.layers[index].kv is None:
            layers.append(KVLayerConfig(k="dense", v="dense"))
            continue
        override = recipe.layers.get(index, KVLayerRecipe())
        k_bits = override.k_bits or _k_bits(recipe, seen, index, chosen)
        v_bits = override.v_bits or chosen.get((index, "v")) or recipe.bits
        k, v = (recipe.stored(bits) for bits in (k_bits, v_bits))
        found = seen.fit.transform
        layers.append(
            KVLayerConfig(
                k=storage_name(k),
                v=storage_name(v),
                smoothing=seen.fit.smoothing,
                key_mean=() if k is None else found.key_mean,
                hadamard=k is not None and found.hadamard,
                balance=None if k is None else found.balance,
                first_key=None if k is None else found.first_key,
                first_value=None if v is None else found.first_value,
                values_turned=seen.fit.values_turned,
                k_absmax=tuple(seen.k_absmax.amax(-1).tolist()),
                v_absmax=tuple(seen.v_absmax.amax(-1).tolist()),
                k_mean_ratio=tuple(seen.k_mean_ratio.tolist()),
            )
        )
    first = next(layer.kv for layer in spec.layers if layer.kv)  # the file has one size of heads for all layers
    return KVConfig(num_kv_heads=first.num_heads, head_dim=first.head_dim, layers=tuple(layers))


def _k_bits(recipe: KVRecipe, seen: KVStats, index: int, chosen: dict[tuple[int, str], int]) -> int | str:
    """Bits of the keys: 8 instead of a few where a constant offset stays in the cache and would take most levels."""
    bits = chosen.get((index, "k")) or recipe.bits
    ratio = float(seen.k_mean_ratio.max())
    stays = not seen.fit.transform.has_mean and seen.fit.transform.balance is None
    if bits in (2, 3, 4) and ratio > RISKY_RATIO and stays:
        log.warning("layer %d: keys have 8 bits: their mean is %.0f times what differs, and stays", index, ratio)
        return 8
    return bits


def _budgeted(recipe: KVRecipe, spec: ModelSpec, stats: list[KVStats]) -> dict[tuple[int, str], int]:
    """(layer, "k" or "v") -> bits. All begin with the fewest; the budget's other bits go where each saves the most."""
    steps = list(pairwise(recipe.choices))
    places = [(i, which) for i in range(len(stats)) if spec.layers[i].kv for which in ("k", "v")]
    chosen = dict.fromkeys(places, recipe.choices[0].bits)
    left = len(places) * (recipe.average_bits - recipe.choices[0].bits) + 1e-9

    def saved(place: tuple[int, str], fewer: KVDtype, more: KVDtype) -> float:
        few, many = (stats[place[0]].fit.errors.get(f"{place[1]} {kind}", 0.0) for kind in (fewer, more))
        return (few - many) / (more.bits - fewer.bits)

    while open_steps := [
        (saved(place, *step), place, step[1].bits)
        for place in places
        for step in steps
        if step[0].bits == chosen[place] and step[1].bits - step[0].bits <= left
    ]:
        _, place, bits = max(open_steps, key=lambda each: each[0])
        left -= bits - chosen[place]
        chosen[place] = bits
    return chosen


def write_static(
    writer: CheckpointWriter, entry: dict[str, Any] | None, recipe: KVRecipe, spec: ModelSpec, stats: list[KVStats]
) -> dict[str, Any] | None:
    """With scheme static8, add k_scale and v_scale of each layer to the checkpoint. Returns the
    quantization_config."""
    if recipe.scheme != "static8":
        return entry
    scheme = KVScheme(type="float" if recipe.type == "fp8" else "int")
    for index, seen in enumerate(stats):
        if spec.layers[index].kv is None:
            continue
        for which, peak in (("k_scale", seen.k_absmax.max()), ("v_scale", seen.v_absmax.max())):
            scale = (peak / (448 if recipe.type == "fp8" else 127)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
            writer.add(scale_name(spec, index, which), scale.float().reshape(1))
    return (entry or {}) | {"kv_cache_scheme": scheme.entry()}
