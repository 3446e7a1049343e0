"""The transform of a layer's keys and values before they are quantized, fitted on the calibration data.

Of keys and values of 4 bits or fewer:

- The mean before RoPE, b, is left out of the cache at the largest pairs of each head.
- Keys and queries are multiplied by the matrices of quant.kv.balance. Values are rotated in the weights around them.
- The mean key and value of position 0, an attention sink with numbers of its own, are left out.

Of other keys, or without matrices:

- The mean is left out for heads where |b| / std is above RISKY_RATIO.
- SmoothAttention (QServe, arXiv 2405.04532) divides key channels by lambda and multiplies query channels by lambda, so
  that no channel takes most of a token's levels. Both elements of a RoPE pair and all query heads of a KV head share
  one lambda. Norms on queries and keys are shared by all heads; with them, all heads share one lambda. lambda =
  (largest radius of the pair)^alpha. It is folded into the weights before they are rounded.
- A Walsh-Hadamard matrix rotates the keys, if it helps.

Candidates are compared by the output of the attention block. The kernels that serve store and read the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.formats.kv_config import Numbers
from lmkit.kv_dtype import FLOAT32, INT4, INT8
from lmkit.layers.batch import Projected
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.rope import frequencies
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.kv_transform import KVTransform, MeanByHead
from lmkit.quant.kv.balance import Moments, balanced, mean_vector, turn_values, turns_values
from lmkit.quant.kv.config import RISKY_RATIO, KVStats
from lmkit.quant.layer.layer import BLOCK_SIZE, CalibratedLayer, Geometry
from lmkit.quant.sections import KVRecipe

ALPHAS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LARGE_MEAN = 4.0  # times the typical std of a channel; a smaller mean may stay
SMALL_MEAN = 0.5  # the same, where matrices make all channels equally wide
MAX_PAIRS = 8  # of a head's mean; each pair costs attention two multiply-adds a key and query
HADAMARD_GAIN = 0.9  # of the error without it; a rotation that does not get below this is not worth its time
LIMIT = 1e4  # of lambda, either way


@dataclass(frozen=True)
class Probe:
    """What attention reads of the sampled sequences. `exact` is the output of the attention block for them."""

    layer: DecoderLayer
    spec: SelfAttentionSpec
    sequences: Geometry
    projected: Projected
    exact: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, sample: Tensor, sequences: Geometry) -> Probe:
        spec = layer.spec.fitted_kv
        assert spec is not None
        probe = cls(layer, spec, sequences, layer.attention.queries_keys_values(sample), exact=sample)
        return replace(probe, exact=probe.output(KVStorage(FLOAT32, FLOAT32)))

    def first(self) -> tuple[Tensor, Tensor]:
        """Keys before RoPE, and values, of the first tokens of the sequences."""
        first = self.sequences.batch.positions == 0
        return self.projected.k[first], self.projected.v[first]

    def scaled(self, s: Tensor) -> Probe:
        """The probe with lambda [num_kv_heads, head_dim] moved from keys to queries."""
        q, k = self.projected.q * of_queries(s, self.spec), self.projected.k / s
        return replace(self, projected=self.projected._replace(q=q, k=k))

    def output(self, storage: KVStorage) -> Tensor:
        """The output of the attention block, float32 [tokens, hidden], with a cache of this storage."""
        layer, batch = self.layer, self.sequences.batch
        attention, positions = layer.attention, int(batch.geometries[0].context_lens.max())
        num_blocks = int(batch.geometries[0].block_tables.max()) + 1
        (kv,) = allocate([layer.spec], [storage], num_blocks, BLOCK_SIZE, positions, layer.device)
        copies = self.projected._replace(q=self.projected.q.clone(), k=self.projected.k.clone())
        return attention.out(attention.attend(copies, self.sequences.at._replace(kv=kv)))

    def error(self, storage: KVStorage) -> float:
        error = (self.output(storage) - self.exact).square().mean(dtype=torch.float64)
        return float(error) if bool(error.isfinite()) else float("inf")


def fit_cache(calibrated: CalibratedLayer, seen: KVStats, recipe: KVRecipe, hidden: Tensor) -> dict[str, Tensor]:
    """Choose the transform, fold lambda into the layer's float32 weights, and keep the result for kv_config.json in
    `seen`. Returns the factors on the rows of linears, by role.

    hidden float32 [tokens, hidden_size]: the states after the layer. Errors are relative to them.
    """
    layer, rows = calibrated.layer, dict[str, Tensor]()
    k_bits, v_bits = recipe.bits_of(layer.index)
    spec = layer.spec.fitted_kv
    if spec is None or {k_bits, v_bits} == {16}:
        return rows
    probe = Probe.of(layer, calibrated.inputs["attn.q"].sample, calibrated.sequences)
    by_index = not (spec.rope.by_length or spec.rope.sections)  # angles depend on a token's index alone
    if seen.moments is not None:
        mean = key_mean(seen, spec, SMALL_MEAN) if recipe.key_mean and by_index else ()
        b = mean_vector(mean, spec)
        a = balanced(seen.moments.without(b), seen.moments.queries / max(seen.moments.num_tokens, 1))
        keys, smoothing = KVTransform(mean, balance=Numbers.of(a.numpy())), None
    else:
        with_mean = recipe.scheme == "online" and recipe.key_mean and by_index
        mean = key_mean(seen, spec, LARGE_MEAN) if with_mean else ()
        if recipe.key_mean == "auto":
            mean = tuple(m if r > RISKY_RATIO else () for m, r in zip(mean, seen.k_mean_ratio.tolist(), strict=False))
        keys, smoothing, s = _smoothed(calibrated, probe, mean if any(mean) else (), recipe, k_bits)
        if smoothing:
            rows, probe = fold(layer, s), probe.scaled(s)
            seen.divide_keys(s.cpu())
    wanted = recipe.leaves_out_first(layer.index)
    transform = with_first(keys, spec, *probe.first(), wanted=wanted)
    power = float(hidden.square().mean(dtype=torch.float64)) or 1.0
    kinds = recipe.choices or (INT4, INT8)
    costs = {f"k {kind}": probe.error(KVStorage(kind, FLOAT32, transform)) / power for kind in kinds}
    costs |= {f"v {kind}": probe.error(KVStorage(FLOAT32, kind, transform)) / power for kind in kinds}
    seen.fit = replace(seen.fit, smoothing=smoothing if recipe.smooth else None, transform=transform, errors=costs)
    return rows


def prepare_cache(layer: DecoderLayer, seen: KVStats, recipe: KVRecipe) -> None:
    """Before a layer is observed: rotate its values in the weights, and ask for the statistics that matrices need."""
    spec = layer.spec.fitted_kv
    if spec is None:
        return
    if recipe.turns_values(layer.index) and turns_values(layer.spec):
        turn_values(layer)
        seen.fit = replace(seen.fit, values_turned=True)
    if recipe.balances(layer.index):
        seen.moments = Moments.empty(spec)


def fit_first(layer: DecoderLayer, seen: KVStats, recipe: KVRecipe, hidden: Iterable[Tensor]) -> None:
    """Find the key and value of position 0 anew, from the states float32 [sequences, hidden_size] before the layer
    as it will be stored: steps may have scaled its values."""
    wanted = recipe.leaves_out_first(layer.index)
    spec = layer.spec.fitted_kv
    if spec is None or not any(wanted):
        return
    projected = [layer.attention.queries_keys_values(*layer.mixing.read(x)[:2]) for x in hidden]
    keys, values = torch.cat([p.k for p in projected]), torch.cat([p.v for p in projected])
    seen.fit = replace(seen.fit, transform=with_first(seen.fit.transform, spec, keys, values, wanted=wanted))


def _smoothed(
    calibrated: CalibratedLayer, probe: Probe, mean: MeanByHead, recipe: KVRecipe, k_bits: int | str
) -> tuple[KVTransform, float, Tensor]:
    """The best of lambdas, with and without a Hadamard matrix: (transform, alpha, lambda)."""
    spec, k_type = probe.spec, INT8 if k_bits == 8 else recipe.stored(k_bits) or INT4
    alphas = ALPHAS if recipe.smooth else ALPHAS[:1]
    turns = (False, True) if recipe.hadamard == "auto" else (recipe.hadamard,)
    turns = turns if recipe.scheme == "online" and not spec.head_dim & (spec.head_dim - 1) else (False,)
    scales = {alpha: smoothing_scale(probe, mean, alpha, exact_powers(calibrated)) for alpha in alphas}
    best = {}
    for turn in turns:
        errors = {
            alpha: probe.scaled(s).error(KVStorage(k_type, FLOAT32, KVTransform(divided(mean, s), turn)))
            for alpha, s in scales.items()
        }
        best[turn] = min((error, alpha) for alpha, error in errors.items())
    turn = min(best, key=lambda t: best[t][0] * (1.0 if t or len(best) == 1 else HADAMARD_GAIN))
    alpha = best[turn][1]
    return KVTransform(divided(mean, scales[alpha]) if alpha else mean, turn), alpha, scales[alpha]


def with_first(
    transform: KVTransform, spec: SelfAttentionSpec, keys: Tensor, values: Tensor, *, wanted: tuple[bool, bool]
) -> KVTransform:
    """The transform that also leaves out position 0. keys (before RoPE) and values of first tokens, float32 [sequences,
    num_kv_heads, D]; `wanted`: of keys, of values."""
    magnitude = frequencies(spec.rope)[1]  # at position 0, RoPE is a factor on the elements that it turns
    key = keys.double().mean(0).cpu() - mean_vector(transform.key_mean, spec)
    key[:, : spec.rope.rotary_dim] *= magnitude
    value = values.double().mean(0).cpu()
    found = (Numbers.of(x.numpy()) if is_wanted else None for x, is_wanted in zip((key, value), wanted, strict=True))
    return replace(transform, first_key=next(found), first_value=next(found))


def key_mean(seen: KVStats, spec: SelfAttentionSpec, smallest: float) -> MeanByHead:
    """By head, the pairs of the mean before RoPE that are larger than `smallest` typical stds, largest first."""
    half = spec.rope.rotary_dim // 2
    found = []
    for mean, std in zip(seen.k_mean, seen.k_std, strict=True):
        radius = torch.hypot(mean[:half], mean[half : 2 * half])
        order = radius.argsort(descending=True)[:MAX_PAIRS].tolist()
        kept = [i for i in order if radius[i] > smallest * std[: 2 * half].median()]
        found.append(tuple((i, float(mean[i].float()), float(mean[i + half].float())) for i in kept))
    return tuple(found)


def smoothing_scale(probe: Probe, mean: MeanByHead, alpha: float, powers: bool) -> Tensor:
    """lambda, float32 [num_kv_heads, head_dim]; 1 in the middle of each head. `powers`: round lambda to powers of two,
    as no float type rounds a product with them."""
    spec = probe.spec
    half = spec.rope.rotary_dim // 2
    keys = probe.projected.k.clone()
    for head, pairs in enumerate(mean):
        for i, first, second in pairs:
            keys[:, head, i] -= first
            keys[:, head, i + half] -= second
    radius = torch.hypot(keys[..., :half], keys[..., half : 2 * half]).amax(0)
    largest = torch.cat([radius, radius, keys[..., 2 * half :].abs().amax(0)], dim=-1).clamp_min(1e-6)
    if spec.qk_norm and not spec.joint_qk_norm:
        largest = largest.amax(0, keepdim=True).expand(spec.num_kv_heads, -1)
    logarithm = alpha * largest.log2()
    logarithm = logarithm - logarithm.mean(-1, keepdim=True)
    return torch.exp2(logarithm.round() if powers else logarithm).clamp(1 / LIMIT, LIMIT)


def exact_powers(calibrated: CalibratedLayer) -> bool:
    """Whether lambda is folded into a tensor that is stored in a short float type."""
    spec = calibrated.layer.spec.fitted_kv
    assert spec is not None
    return spec.attn_bias or spec.qk_norm or not {"attn.q", "attn.k"} <= set(calibrated.schemes)


def divided(mean: MeanByHead, s: Tensor) -> MeanByHead:
    """The mean of keys / s."""
    by_head = zip(mean, s.tolist(), strict=False)
    return tuple(tuple((i, x / scale[i], y / scale[i]) for i, x, y in pairs) for pairs, scale in by_head)


def of_queries(s: Tensor, spec: SelfAttentionSpec) -> Tensor:
    """[num_kv_heads, head_dim] -> [num_heads, head_dim]. Each query head gets the value of its KV head."""
    return s.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=0)


def fold(layer: DecoderLayer, s: Tensor) -> dict[str, Tensor]:
    """Fold keys / s and queries * s into the weights. Scores change by rounding errors only. Returns the factors on the
    rows of linears, by role."""
    spec, weights = layer.spec.fitted_kv, layer.weights
    assert spec is not None
    s = s[:, torch.tensor(spec.pair_order).argsort()] if spec.pair_order else s  # as the checkpoint has them
    factors = {"attn.k": 1 / s, "attn.q": of_queries(s, spec)}
    for role, factor in factors.items():
        names = [role + "_norm"] if spec.qk_norm else [role, role + ".bias"]
        of_rows = factor[0] if spec.qk_norm and not spec.joint_qk_norm else factor.flatten()
        for name in names:
            if name in weights:
                weight = weights[name]
                assert isinstance(weight, Tensor)
                weights[name] = weight * (of_rows if weight.ndim == 1 else of_rows[:, None])
    return {} if spec.qk_norm else {role: factor.flatten() for role, factor in factors.items()}
