"""Reference linears, and torch's own dense product. Formulas and shapes: lmkit.kernels.ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.registry import implements
from lmkit.qtensor import QTensor, dequantize

TORCH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PANEL_ROWS = 1024  # outputs widened to float32 at a time


def accepts_bits(bits: int) -> Any:
    def accepts(**traits: Any) -> str | None:
        given = traits.get("bits", bits)
        return None if given == bits else f"{given} bits"

    return accepts


def _keep(weight: Any) -> Any:
    return weight


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@implements(ops.linear_dense, "reference", device="any", pack=_keep)
def linear_dense(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, packed, bias)


def _accepts_torch(*, dtype: torch.dtype, **traits: Any) -> str | None:
    return None if dtype in TORCH_DTYPES else f"weights of {dtype}"


@implements(ops.linear_dense, "torch", device="any", accepts=_accepts_torch, pack=_keep, priority=10)
def linear_torch(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """torch's library; narrower weights than x are widened a panel at a time, so that x is never rounded to them."""
    bias = None if bias is None else bias.to(x.dtype)
    if packed.dtype == x.dtype:
        return torch.nn.functional.linear(x, packed, bias)
    y = x.new_empty(x.shape[0], packed.shape[0])
    for i in range(0, packed.shape[0], PANEL_ROWS):
        rows = slice(i, i + PANEL_ROWS)
        y[:, rows] = torch.nn.functional.linear(x, packed[rows].to(x.dtype), None if bias is None else bias[rows])
    return y


@implements(ops.linear_w4a16, "reference", device="any", accepts=accepts_bits(4), pack=_keep)
def linear_w4a16(x: Tensor, packed: QTensor, bias: Tensor | None) -> Tensor:
    return _product(x, dequantize(packed), bias)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """One group's inputs [T, group] -> (integers -127 .. 127 as float32, scale [T, 1])."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, x.float() / scale, 0).round(), scale


def _linear_a8(x: Tensor, packed: QTensor, bias: Tensor | None) -> Tensor:
    """Group by group; integer sums are exact in float64."""
    in_features = x.shape[1]
    group = in_features if packed.scheme.group_size == -1 else packed.scheme.group_size
    y = x.new_zeros(x.shape[0], packed.codes.shape[0], dtype=torch.float32)
    for g, start in enumerate(range(0, in_features, group)):
        xq, scale = quantize_activations(x[:, start : start + group])
        codes = packed.codes[:, start : start + group].double()
        dot = xq.double() @ codes.t() - xq.double().sum(-1, keepdim=True) * packed.zeros[:, g].double()
        y += dot.float() * scale * packed.scales[:, g].float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@implements(ops.linear_w4a8, "reference", device="any", accepts=accepts_bits(4), pack=_keep)
def linear_w4a8(x: Tensor, packed: QTensor, bias: Tensor | None) -> Tensor:
    return _linear_a8(x, packed, bias)


@implements(ops.linear_w8a8, "reference", device="any", accepts=accepts_bits(8), pack=_keep)
def linear_w8a8(x: Tensor, packed: QTensor, bias: Tensor | None) -> Tensor:
    return _linear_a8(x, packed, bias)
