"""Rotary position embedding: the frequencies of every kind, and each step's cosines and sines.

Kinds and formulas are those of `rope_parameters` in a Hugging Face config.json: default (RoFormer, arXiv 2104.09864),
linear (position interpolation, arXiv 2306.15595), dynamic (NTK-aware by length), yarn (arXiv 2309.00071), llama3,
longrope (arXiv 2402.13753), proportional (Gemma 4: only the first pairs of a head turn).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.batch import BatchInputs
from lmkit.layers.rope_spec import RopeSpec
from lmkit.qtensor import QTensor, plain


class Rope:
    """cos and sin float32 [T, R/2] of a batch. They are computed once a step and shared by all layers."""

    def __init__(self, spec: RopeSpec, device: str = "cpu") -> None:
        self.spec = spec
        self.inv_freq, self.magnitude = frequencies(spec)
        self.inv_freq = self.inv_freq.to(tensor_device(device))
        self.angles = ops.rope_angles.select(device)

    def __call__(self, batch: BatchInputs) -> tuple[Tensor, Tensor]:
        if batch.places is not None and self.spec.sections:
            return self._by_place(batch.places)
        if not self.spec.by_length or not bool((batch.rope_lens > self.spec.original_max_position).any()):
            cos, sin = self.angles(batch.positions, self.inv_freq, self.magnitude)
            return cos, sin
        angles = batch.positions[:, None].float() * self._frequencies_by_length(batch)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def _by_place(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """M-RoPE (arXiv 2409.12191). A token of text has three equal places, and the angles of its position."""
        found = [self.angles(row, self.inv_freq, self.magnitude) for row in places]
        which = torch.tensor(self.spec.places, device=places.device).expand(1, places.shape[1], -1)
        cos, sin = (torch.stack(parts).gather(0, which)[0] for parts in zip(*found, strict=True))
        return cos, sin

    def _frequencies_by_length(self, batch: BatchInputs) -> Tensor:
        """Inverse frequencies [T, R/2]. A sequence longer than the trained context has frequencies of its own.

        The prompt's length fixes them, for good. Keys in the cache therefore stay valid, and tokens do not depend on
        the other sequences or on how the prompt was cut into chunks.
        """
        of_length = longrope if self.spec.kind == "longrope" else dynamic_ntk
        per_sequence = torch.stack([of_length(self.spec, int(n)) for n in batch.rope_lens]).to(self.inv_freq.device)
        return per_sequence.repeat_interleave(batch.geometries[0].query_start.diff().long(), dim=0)


def frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [R/2], factor on cos and sin)."""
    inv_freq = _base_frequencies(spec.theta, spec.rotary_dim)
    if spec.kind == "none":
        return torch.zeros_like(inv_freq), 1.0
    if spec.kind == "proportional":
        still = torch.arange(len(inv_freq)) >= int(spec.partial_rotary_factor * spec.rotary_dim // 2)
        return inv_freq.masked_fill(still, 0.0) / spec.factor, 1.0
    if spec.kind == "linear":
        return inv_freq / spec.factor, 1.0
    if spec.kind == "llama3":
        return _llama3(spec, inv_freq), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, inv_freq)
    if spec.kind == "longrope":
        return longrope(spec, 0), 1.0 if spec.attention_factor is None else spec.attention_factor
    return inv_freq, 1.0


def longrope(spec: RopeSpec, length: int) -> Tensor:
    """Inverse frequencies [R/2] for a sequence whose prompt has `length` tokens."""
    factors = spec.long_factor if length > spec.original_max_position else spec.short_factor
    powers = spec.theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim)
    return 1.0 / (torch.tensor(factors) * powers)


def dynamic_ntk(spec: RopeSpec, length: int) -> Tensor:
    """Inverse frequencies [R/2] for a sequence whose prompt has `length` tokens."""
    if length <= spec.original_max_position:
        return _base_frequencies(spec.theta, spec.rotary_dim)
    stretch = spec.factor * length / spec.original_max_position - (spec.factor - 1)
    return _base_frequencies(spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)), spec.rotary_dim)


def _base_frequencies(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)


def _llama3(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Wavelengths short against the original context stay. Long ones are divided by `factor`. A ramp lies between."""
    wavelength = 2 * math.pi / inv_freq
    ramp = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * inv_freq / spec.factor + ramp * inv_freq


def _yarn(spec: RopeSpec, inv_freq: Tensor) -> tuple[Tensor, float]:
    """NTK-by-parts: dimension i turns `rotations` times over the original context; few turns = interpolate."""

    def dimension_of(rotations: float) -> float:
        ratio = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    span = max(high - low, 0.001)
    interpolate = ((torch.arange(spec.rotary_dim // 2).float() - low) / span).clamp(0, 1)
    scaled = inv_freq / spec.factor * interpolate + inv_freq * (1 - interpolate)
    return scaled, _yarn_magnitude(spec)


def _yarn_magnitude(spec: RopeSpec) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * scale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def halves_first(weight: Tensor | QTensor, order: tuple[int, ...]) -> Tensor | QTensor:
    """The outputs of q or k [heads * head_dim, ...], each head's in `order` (LayerSpec.pair_order)."""
    rows = torch.arange(len(weight.codes if isinstance(weight, QTensor) else weight)).view(-1, len(order))
    rows = rows[:, list(order)].flatten()
    if isinstance(weight, Tensor):
        return weight[rows]
    weight = plain(weight)
    codes = weight.codes.view(torch.uint8)[rows].view(weight.codes.dtype)  # torch indexes no float8
    zeros = weight.zeros[rows] if len(weight.zeros) else weight.zeros
    factor = None if weight.factor is None else weight.factor[rows]
    return replace(weight, codes=codes, scales=weight.scales[rows], zeros=zeros, factor=factor)
