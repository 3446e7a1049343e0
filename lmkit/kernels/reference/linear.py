"""Reference linears, and torch's own dense product. Formulas and shapes: lmkit.kernels.ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops, plane_ops
from lmkit.kernels.ops import FP8_MAX, Norm
from lmkit.kernels.reference.elementwise import gated_activation, rms_norm
from lmkit.kernels.registry import implements
from lmkit.qtensor import QTensor, dequantize, plain

TORCH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PANEL_ROWS = 1024  # outputs widened to float32 at a time


def accepts_bits(bits: int) -> Any:
    def accepts(**traits: Any) -> str | None:
        given = traits.get("bits", bits)
        return None if given == bits else f"{given} bits"

    return accepts


@dataclass(frozen=True)
class Kept:
    """A weight as it was given."""

    weight: Any
    activation: str | None


def keep(weight: Any, activation: str | None = None) -> Kept:
    return Kept(weight, activation)


def _linear(product: Callable[[Tensor, Any, Tensor | None], Tensor]) -> Callable[..., Tensor]:
    """A linear around `product`: with the norm before it, and the activation, residual and dtype after it."""

    def linear(
        x: Tensor,
        packed: Kept,
        bias: Tensor | None,
        norm: Norm | None = None,
        *,
        dtype: torch.dtype | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        x = x if norm is None else rms_norm(x, norm)
        if residual is not None or dtype is not None:  # nothing is rounded before the end
            x = x.float()
        y = product(x, packed.weight, bias)
        y = y if packed.activation is None else gated_activation(y, packed.activation)
        if residual is not None:
            return residual.add_(y)
        return y if dtype is None else y.to(dtype)

    return linear


def rows_of(packed: Kept, rows: Tensor, factor: float = 1.0) -> Tensor:
    """See registry.Implementation.rows."""
    weight = packed.weight
    return (dequantize(weight) if isinstance(weight, QTensor) else weight)[rows].float() * factor


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _torch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's product. Weights narrower than x are widened a panel at a time, so that x is never rounded to them."""
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    y = x.new_empty(x.shape[0], weight.shape[0])
    for i in range(0, weight.shape[0], PANEL_ROWS):
        rows = slice(i, i + PANEL_ROWS)
        y[:, rows] = torch.nn.functional.linear(x, weight[rows].to(x.dtype), None if bias is None else bias[rows])
    return y


def _dequantized_product(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    return _product(x, dequantize(weight), bias)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """One group's inputs [T, group] -> (integers -127 .. 127 as float32, scale [T, 1])."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, x.float() / scale, 0).round(), scale


def _int8_product(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """The product group by group. Integer sums are exact in float64."""
    in_features, weight = x.shape[1], plain(weight)
    group = in_features if weight.scheme.group_size == -1 else weight.scheme.group_size
    y = x.new_zeros(x.shape[0], weight.codes.shape[0], dtype=torch.float32)
    for g, start in enumerate(range(0, in_features, group)):
        xq, scale = quantize_activations(x[:, start : start + group])
        codes = weight.codes[:, start : start + group].double()
        dot = xq.double() @ codes.t() - xq.double().sum(-1, keepdim=True) * weight.zeros[:, g].double()
        y += dot.float() * scale * weight.scales[:, g].float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _rounded(x: Tensor, group: int) -> Tensor:
    return torch.cat([torch.mul(*quantize_activations(part)) for part in x.float().split(group, dim=1)], dim=1)


def _group(x: Tensor, weight: QTensor) -> int:
    return x.shape[1] if weight.scheme.group_size == -1 else weight.scheme.group_size


def _planes_product(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    return _product(_rounded(x, _group(x, weight)), dequantize(weight), bias).to(x.dtype)


def _split_product(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    group = _group(x, weight)
    parts = [quantize_activations(part) for part in x.float().split(group, dim=1)]
    first, steps = torch.cat([xq * scale for xq, scale in parts], 1), torch.cat([scale / 256 for _, scale in parts], 1)
    steps = steps.repeat_interleave(group, 1)[:, : x.shape[1]]
    rest = torch.where(steps > 0, (x.float() - first) / steps, 0).round().clamp(-127, 127) * steps
    return _product(first + rest, dequantize(weight), bias).to(x.dtype)


def round_to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """One group's inputs [T, group] -> (e4m3 values as float32, scale [T, 1])."""
    scale = x.float().abs().amax(-1, keepdim=True) / FP8_MAX
    scaled = torch.where(scale > 0, x.float() / scale, 0).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).float(), scale


def _fp8_product(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    group = _group(x, weight)
    rounded = [torch.mul(*round_to_e4m3(part)) for part in x.split(group, dim=1)]
    return _product(torch.cat(rounded, dim=1), dequantize(weight), bias).to(x.dtype)


@implements(ops.linear_heads, "reference", device="any", pack=torch.Tensor.contiguous)
def linear_heads(x: Tensor, packed: Tensor) -> Tensor:
    return torch.einsum("thk,hnk->thn", x.float(), packed.float()).to(x.dtype)


def _accepts_torch(*, dtype: torch.dtype, **traits: Any) -> str | None:
    return None if dtype in TORCH_DTYPES else f"weights of {dtype}"


implements(ops.linear_dense, "reference", device="any", pack=keep, epilogue=True, rows=rows_of)(_linear(_product))
implements(
    ops.linear_dense, "torch", device="any", accepts=_accepts_torch, pack=keep, priority=10, epilogue=True, rows=rows_of
)(_linear(_torch_product))
for _op, _multiply in ((plane_ops.linear_planes, _planes_product), (plane_ops.linear_split, _split_product)):
    implements(_op, "reference", device="any", pack=keep, epilogue=True, rows=rows_of)(_linear(_multiply))
for _op, _bits, _multiply in (
    (ops.linear_w4a16, 4, _dequantized_product),
    (ops.linear_w4a8, 4, _int8_product),
    (ops.linear_w8a8, 8, _int8_product),
    (ops.linear_w8a16, 8, _dequantized_product),
    (ops.linear_fp8, 8, _dequantized_product),
    (ops.linear_fp8_a8, 8, _fp8_product),
):
    implements(_op, "reference", device="any", accepts=accepts_bits(_bits), pack=keep, epilogue=True, rows=rows_of)(
        _linear(_multiply)
    )
