"""The shapes and dtypes that `pack` would return for a weight, found without the weight itself.

The loader looks for tensors of these shapes in a file of packed weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.kernels.registry import Implementation
from lmkit.qtensor import QTensor, QuantScheme

STEP = 256  # outputs; a multiple of every kernel's panel


@dataclasses.dataclass(frozen=True)
class WeightKind:
    """A weight without its size and values: `dtype` of a dense weight or of the scales, `scheme` of a quantized weight.

    `scheme` is that of qtensor.plain, as which kernels see a weight. `order` is a digest of QTensor.order:
    weights of one kind read the same inputs in the same order.
    """

    dtype: str
    scheme: QuantScheme | None = None
    order: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises CheckpointError if there is no such dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"no dtype {self.dtype!r:.40}")
        return dtype

    def zeros(self, shape: tuple[int, int]) -> Tensor | QTensor:
        """A weight [out, in] of this kind, of gathered inputs. Raises CheckpointError for an impossible kind."""
        if self.scheme is None:
            return torch.zeros(shape, dtype=self.torch_dtype)
        if (
            self.scheme.bits not in (2, 3, 4, 5, 6, 8)
            or self.scheme != self.scheme.plain
            or not (self.scheme.group_size == -1 or self.scheme.group_size > 0)
            or not {*self.scheme.codes.values} <= {*range(256)}
            or len(self.scheme.codes.values) > 16
        ):
            raise CheckpointError(f"no such scheme: {self.scheme}")
        scheme = dataclasses.replace(self.scheme, act_order=False)
        scales = torch.zeros(shape[0], scheme.num_groups(shape[1]), dtype=self.torch_dtype)
        codes = torch.zeros(shape, dtype=scheme.codes.element)
        zeros, factor = scheme.scales.like(scales, scheme.codes.zeros(tuple(scales.shape)))
        return QTensor(codes, scales, zeros, scheme, factor=factor)


def kind_of(weight: Tensor | QTensor) -> WeightKind:
    if isinstance(weight, QTensor):
        order = "" if weight.order is None else hashlib.sha256(weight.order.cpu().numpy().tobytes()).hexdigest()[:32]
        dtype = _name(weight.scales) if weight.scheme.scales.kept == weight.scheme.scales else "float32"
        return WeightKind(dtype, weight.scheme.plain, order)
    return WeightKind(_name(weight))


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@cache
def packed_outline(
    impl: Implementation, kind: WeightKind, shape: tuple[int, int], activation: str | None = None
) -> Any:
    """`impl.pack` of a weight [out, in], with tensors on the device "meta": shapes and dtypes, no data.

    Two small weights are packed. Each STEP more outputs adds the same amount to every size and number of a layout, so
    larger layouts are extrapolated. A layout contains nothing that depends on the values of a weight.
    """
    rows, columns = shape
    small = min(rows, rows % STEP + STEP)
    packed = impl.pack(kind.zeros((small, columns)), activation)
    grown = packed if rows == small else impl.pack(kind.zeros((small + STEP, columns)), activation)
    return _extrapolate(packed, grown, (rows - small) // STEP)


def _extrapolate(small: Any, large: Any, steps: int) -> Any:
    if isinstance(small, Tensor):
        shape = [_extrapolate(a, b, steps) for a, b in zip(small.shape, large.shape, strict=True)]
        return torch.empty(shape, dtype=small.dtype, device="meta")
    if dataclasses.is_dataclass(small) and not isinstance(small, type):
        names = [field.name for field in dataclasses.fields(small) if field.init]
        new = {name: _extrapolate(getattr(small, name), getattr(large, name), steps) for name in names}
        return dataclasses.replace(small, **new)
    if isinstance(small, int) and not isinstance(small, bool):
        return small + steps * (large - small)
    return small


def replaced_tensors(packed: Any, name: str, replace: Callable[[str, Tensor], Tensor]) -> Any:
    """A copy of a kernel's packed weight (a tensor, or a dataclass of tensors and numbers) with replaced tensors."""
    if isinstance(packed, Tensor):
        return replace(name, packed)
    if not dataclasses.is_dataclass(packed) or isinstance(packed, type):
        return packed
    fields = [field.name for field in dataclasses.fields(packed) if field.init]
    new = {field: replaced_tensors(getattr(packed, field), f"{name}.{field}", replace) for field in fields}
    return dataclasses.replace(packed, **new)
