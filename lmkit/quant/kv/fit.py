"""The transform of a layer's keys before they are quantized, fitted on the calibration data.

- The mean before RoPE, b (a large key bias), is left out of the cache for heads where |b| / std is above RISKY_RATIO.
- SmoothAttention (QServe, arXiv 2405.04532) divides key channels by lambda and multiplies query channels by lambda, so
  that no channel takes most of a token's levels. Both elements of a RoPE pair and all query heads of a KV head share
  one lambda. Norms on queries and keys are shared by all heads; with them, all heads share one lambda. lambda =
  (largest radius of the pair)^alpha. It is folded into the weights before they are rounded.
- A Walsh-Hadamard matrix rotates the keys, if it helps.

Candidates are compared by the output of the attention block. The kernels that serve store and read the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.formats.kv_config import PairMean
from lmkit.kv_dtype import FLOAT32, INT4, INT8
from lmkit.layers.batch import Projected
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.layer_spec import LayerSpec
from lmkit.quant.kv.config import RISKY_RATIO, KVFit, KVStats
from lmkit.quant.layer.layer import BLOCK_SIZE, CalibratedLayer, Geometry
from lmkit.quant.sections import KVLayerRecipe, KVRecipe

ALPHAS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LARGE_MEAN = 4.0  # times the typical std of a channel; a smaller mean may stay
MAX_PAIRS = 8  # of a head's mean; each pair costs attention two multiply-adds a key and query
HADAMARD_GAIN = 0.9  # of the error without it; a rotation that does not get below this is not worth its time
LIMIT = 1e4  # of lambda, either way

MeanByHead = tuple[tuple[PairMean, ...], ...]


@dataclass(frozen=True)
class Probe:
    """What attention reads of the sampled sequences. `exact` is the output of the attention block for them."""

    layer: DecoderLayer
    sequences: Geometry
    projected: Projected
    exact: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, sample: Tensor, sequences: Geometry) -> Probe:
        probe = cls(layer, sequences, layer.queries_keys_values(sample), exact=sample)
        return replace(probe, exact=probe.output(KVStorage(FLOAT32, FLOAT32)))

    def scaled(self, s: Tensor) -> Probe:
        """The probe with lambda [num_kv_heads, head_dim] moved from keys to queries."""
        q, k = self.projected.q * of_queries(s, self.layer.spec), self.projected.k / s
        return replace(self, projected=self.projected._replace(q=q, k=k))

    def output(self, storage: KVStorage) -> Tensor:
        """The output of the attention block, float32 [tokens, hidden], with a cache of this storage."""
        layer, batch = self.layer, self.sequences.batch
        spec, positions = layer.spec, int(batch.geometries[0].context_lens.max())
        num_blocks = int(batch.geometries[0].block_tables.max()) + 1
        (kv,) = allocate([spec], [storage], num_blocks, BLOCK_SIZE, positions, layer.device)
        copies = self.projected._replace(q=self.projected.q.clone(), k=self.projected.k.clone())
        return layer.o(layer.attend(copies, batch, self.sequences.rope, kv))

    def error(self, storage: KVStorage) -> float:
        error = (self.output(storage) - self.exact).square().mean(dtype=torch.float64)
        return float(error) if bool(error.isfinite()) else float("inf")


def fit_cache(calibrated: CalibratedLayer, seen: KVStats, recipe: KVRecipe, hidden: Tensor) -> dict[str, Tensor]:
    """Choose the transform, fold lambda into the layer's float32 weights, and keep the result for kv_config.json in
    `seen`. Returns the factors on the rows of linears, by role.

    hidden float32 [tokens, hidden_size]: the states behind the layer. Errors are relative to them.
    """
    layer, rows = calibrated.layer, dict[str, Tensor]()
    if layer.spec.delta:
        return rows
    spec, sample = layer.spec, calibrated.inputs.get("attn.q")
    override = recipe.layers.get(layer.index, KVLayerRecipe())
    if {override.k_bits or recipe.bits, override.v_bits or recipe.bits} == {16}:
        return rows
    online = recipe.scheme == "online"
    by_index = not (spec.rope.by_length or spec.rope.sections)  # angles that depend on a token's index alone
    mean = key_mean(seen, spec) if online and recipe.key_mean and by_index else ()
    if recipe.key_mean == "auto":
        mean = tuple(m if r > RISKY_RATIO else () for m, r in zip(mean, seen.k_mean_ratio.tolist(), strict=False))
    mean = mean if any(mean) else ()
    if sample is None:  # the recipe leaves all of attention as it is
        seen.fit = KVFit(key_mean=mean, hadamard=online and recipe.hadamard is True)
        return rows
    probe = Probe.of(layer, sample.sample, calibrated.sequences)
    k_type = INT8 if (override.k_bits or recipe.bits) == 8 else INT4
    alphas = ALPHAS if recipe.smooth else ALPHAS[:1]
    turns = (False, True) if recipe.hadamard == "auto" else (recipe.hadamard,)
    turns = turns if online and not spec.head_dim & (spec.head_dim - 1) else (False,)
    scales = {alpha: smoothing_scale(probe, mean, alpha, exact_powers(calibrated)) for alpha in alphas}
    best = {}
    for turn in turns:
        errors = {
            alpha: probe.scaled(s).error(KVStorage(k_type, FLOAT32, divided(mean, s), turn))
            for alpha, s in scales.items()
        }
        best[turn] = min((error, alpha) for alpha, error in errors.items())
    turn = min(best, key=lambda t: best[t][0] * (1.0 if t or len(best) == 1 else HADAMARD_GAIN))
    alpha = best[turn][1]
    if alpha:
        rows = fold(layer, scales[alpha])
        seen.divide_keys(scales[alpha].cpu())
        probe, mean = probe.scaled(scales[alpha]), divided(mean, scales[alpha])
    keys = KVStorage(FLOAT32, FLOAT32, mean, turn)
    power = float(hidden.square().mean(dtype=torch.float64)) or 1.0
    costs = {f"k {kind}": probe.error(replace(keys, k=kind)) / power for kind in (INT4, INT8)}
    costs |= {f"v {kind}": probe.error(KVStorage(FLOAT32, kind)) / power for kind in (INT4, INT8)}
    seen.fit = KVFit(alpha if recipe.smooth else None, mean, turn, costs)
    return rows


def key_mean(seen: KVStats, spec: LayerSpec) -> MeanByHead:
    """By head, the pairs of the mean before RoPE that are much larger than the typical std, largest first."""
    half = spec.rope.rotary_dim // 2
    found = []
    for mean, std in zip(seen.k_mean, seen.k_std, strict=True):
        radius = torch.hypot(mean[:half], mean[half : 2 * half])
        order = radius.argsort(descending=True)[:MAX_PAIRS].tolist()
        kept = [i for i in order if radius[i] > LARGE_MEAN * std[: 2 * half].median()]
        found.append(tuple((i, float(mean[i].float()), float(mean[i + half].float())) for i in kept))
    return tuple(found)


def smoothing_scale(probe: Probe, mean: MeanByHead, alpha: float, powers: bool) -> Tensor:
    """lambda, float32 [num_kv_heads, head_dim]; 1 in the middle of each head. `powers`: round lambda to powers of two,
    as no float type rounds a product with them."""
    spec = probe.layer.spec
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
    spec = calibrated.layer.spec
    return spec.attn_bias or spec.qk_norm or not {"attn.q", "attn.k"} <= set(calibrated.schemes)


def divided(mean: MeanByHead, s: Tensor) -> MeanByHead:
    """The mean of keys / s."""
    by_head = zip(mean, s.tolist(), strict=False)
    return tuple(tuple((i, x / scale[i], y / scale[i]) for i, x, y in pairs) for pairs, scale in by_head)


def of_queries(s: Tensor, spec: LayerSpec) -> Tensor:
    """[num_kv_heads, head_dim] -> [num_heads, head_dim]. Each query head gets the value of its KV head."""
    return s.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=0)


def fold(layer: DecoderLayer, s: Tensor) -> dict[str, Tensor]:
    """Fold keys / s and queries * s into the weights. Scores change by rounding errors only. Returns the factors on the
    rows of linears, by role."""
    spec, weights = layer.spec, layer.weights
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
