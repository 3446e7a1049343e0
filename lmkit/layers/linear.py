"""Linears of a decoder layer: plain while a model is calibrated, packed for a kernel when it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation, Op
from lmkit.qtensor import QTensor, dequantize

Weights = dict[str, Tensor | QTensor]  # role -> weight, and role + ".bias" -> bias
Observer = Callable[[str, Tensor], None]


class MergedLinear:
    """Linears of several roles that read the same input; the outputs stand side by side. `gated`: there are two roles,
    and silu of the first's output is a factor on the second's.

    Before `pack`, each role is computed from `weights` as they are at that moment, in float32: a calibration may
    rewrite them between two calls, and `observe(role, x)` sees each input. `pack` moves the weights into a kernel's
    layout; roles whose formats agree become one product.
    """

    def __init__(self, roles: tuple[str, ...], weights: Weights, device: str = "cpu", *, gated: bool = False) -> None:
        self.roles = roles
        self.weights = weights
        self.device = device
        self.gated = gated
        self.observe: Observer | None = None
        self.packed: list[tuple[Implementation, Any, Tensor | None]] | None = None
        self._rms_norm = ops.rms_norm.select(device)
        self._silu_mul = ops.silu_mul.select(device)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, in] -> [T, sum of the roles' out]; with a norm, x is normalized first. Gated: silu(first) * second."""
        if self.packed is not None and len(self.packed) == 1:
            implementation, packed, bias = self.packed[0]
            return implementation(x, packed, bias, norm)
        if norm is not None:
            x = self._rms_norm(x, norm)
        if self.packed is None:
            outputs = [self._plain(role, x) for role in self.roles]
        else:
            outputs = [implementation(x, packed, bias, None) for implementation, packed, bias in self.packed]
        merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return self._silu_mul(merged) if self.gated else merged

    def _plain(self, role: str, x: Tensor) -> Tensor:
        if self.observe is not None:
            self.observe(role, x)
        weight, bias = self.weights[role], self.weights.get(role + ".bias")
        dense = dequantize(weight) if isinstance(weight, QTensor) else weight.float()
        assert not isinstance(bias, QTensor)
        return torch.nn.functional.linear(x, dense, None if bias is None else bias.float())

    def pack(self, activations: str) -> None:
        """Choose a kernel, pack, and drop the plain weights. Raises UnsupportedError if no kernel takes them."""
        weights = [self.weights.pop(role) for role in self.roles]
        biases = [self.weights.pop(role + ".bias", None) for role in self.roles]
        groups: list[list[int]] = [[0]]
        for i in range(1, len(weights)):
            if _format_of(weights[i]) == _format_of(weights[groups[-1][0]]):
                groups[-1].append(i)
            else:
                groups.append([i])
        self.packed = []
        for group in groups:
            weight = _concat([weights[i] for i in group])
            bias = _concat_bias([(weights[i], biases[i]) for i in group])
            op, traits = _op_for(weight, activations)
            impl = op.select(self.device, **traits)
            self.packed.append((impl, impl.pack(weight, self.gated and len(groups) == 1), bias))


def _format_of(weight: Tensor | QTensor) -> object:
    return weight.scheme if isinstance(weight, QTensor) else weight.dtype


def _concat(weights: list[Tensor | QTensor]) -> Tensor | QTensor:
    if len(weights) == 1:
        return weights[0]
    quantized = [w for w in weights if isinstance(w, QTensor)]
    if quantized:
        return QTensor(
            torch.cat([q.codes for q in quantized]),
            torch.cat([q.scales for q in quantized]),
            torch.cat([q.zeros for q in quantized]),
            quantized[0].scheme,
        )
    return torch.cat([w for w in weights if isinstance(w, Tensor)])


def _concat_bias(parts: list[tuple[Tensor | QTensor, Any]]) -> Tensor | None:
    if all(bias is None for _, bias in parts):
        return None
    rows = [(w.codes if isinstance(w, QTensor) else w).shape[0] for w, _ in parts]
    return torch.cat([torch.zeros(n) if b is None else b.float() for n, (_, b) in zip(rows, parts, strict=True)])


def _op_for(weight: Tensor | QTensor, activations: str) -> tuple[Op, dict[str, Any]]:
    if not isinstance(weight, QTensor):
        return ops.linear_dense, {
            "out_features": weight.shape[0],
            "in_features": weight.shape[1],
            "dtype": weight.dtype,
        }
    scheme = weight.scheme
    traits = {
        "out_features": weight.codes.shape[0],
        "in_features": weight.codes.shape[1],
        "group_size": scheme.group_size,
        "bits": scheme.bits,
    }
    if scheme.bits == 4:
        return (ops.linear_w4a8 if activations == "int8" else ops.linear_w4a16), traits
    return ops.linear_w8a8, traits
