"""Linears of a decoder layer: plain weights while a model is calibrated, packed for a kernel when it serves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kernels import low_rank_ops, ops, plane_ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import ExpertLinears, Implementation, Op
from lmkit.layers.adapters import LinearAdapters, StepAdapters, Ungated
from lmkit.layers.columns import Join
from lmkit.layers.outline import WeightKind, kind_of, packed_outline, replaced_tensors
from lmkit.log import get_logger
from lmkit.low_rank import AdapterRows, Add, Columns
from lmkit.qtensor import QTensor, QuantScheme, dequantize, plain

log = get_logger(__name__)

Weights = dict[str, Tensor | QTensor]  # role -> weight, and role + ".bias" -> bias
Observer = Callable[[str, Tensor], None]
ROWS = 128


class Packed(NamedTuple):
    """A kernel with its weight. `order` int32 [in]: the input of each column; None = column j belongs to input j."""

    implementation: Implementation
    weight: Any
    bias: Tensor | None
    order: Tensor | None = None


class MergedLinear:
    """Linears of several roles that read the same input. Their outputs stand side by side. With an `activation` (of
    ops.ACTIVATIONS) there are two roles, and the first is a gate: the result is ops.gated_activation of both.

    Before `pack`, each role is computed from the current `weights`, in numbers of `product_dtype`: a calibration may
    rewrite them between two calls, `observe(role, x)` sees each input, and `observe_output(roles, y)` the outputs side
    by side, before an activation. `pack` moves the weights into a kernel's layout; neighbouring roles with the same
    format become one product.

    `adapters`, if there are any, add to the products of rows that use one, before an activation. On a CPU the other
    rows of the step keep their bits: a kernel computes the same with and without a norm before it and an activation
    after it. On a GPU a product of up to 4 tokens adds up in another order with the norm inside.
    """

    def __init__(
        self, roles: tuple[str, ...], weights: Weights, device: str = "cpu", *, activation: str | None = None
    ) -> None:
        self.roles = roles
        self.weights = weights
        self.device = device
        self.activation = activation
        self.factor = 1.0  # what the input is multiplied with
        self.adapters: LinearAdapters | None = None
        self._ungated: Ungated | None = None  # the fused kernel's weight, without the activation
        self.observe: Observer | None = None
        self.observe_output: Callable[[tuple[str, ...], Tensor], None] | None = None
        self.product_dtype = torch.float32
        self._short: tuple[list[Tensor | QTensor], Tensor] | None = None  # weights, and they as they are multiplied
        self.packed: list[Packed] | None = None
        self._widths: list[int] = []  # output widths of the packed roles
        self._rms_norm = ops.rms_norm.select(device)
        self._gated_activation = ops.gated_activation.select(device)
        self._gated_panels = low_rank_ops.gated_panels.select(device)
        self._gather = ops.gather_columns.select(device)
        self._join = Join(device)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, in] -> [T, sum of the roles' out]; with a norm, x is normalized first."""
        x, norm = self._given(x, norm)
        if self.adapters is not None and (rows := self.adapters.rows(len(x))) is not None:
            return self._adapted(self.adapters, rows, x if norm is None else self._rms_norm(x, norm))
        if (fused := self._fused) is not None:
            return self._product(fused, x, norm)
        if norm is not None:
            x = self._rms_norm(x, norm)
        if self.packed is None:
            merged = self._plain(x)
            if self.observe_output is not None:
                self.observe_output(self.roles, merged)
        else:
            outputs = [self._product(packed, x) for packed in self.packed]
            merged = self._join(outputs)
        return merged if self.activation is None else self._gated_activation(merged, self.activation)

    def _given(self, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Norm | None]:
        """x times the factor, and the norm that is left to apply."""
        if self.factor == 1:
            return x, norm
        return (x if norm is None else self._rms_norm(x, norm)) * self.factor, None

    def adapt(self, step: StepAdapters) -> LinearAdapters:
        """Make room for what adapters add. The linear is packed."""
        self.adapters = LinearAdapters(self.roles, step, self.device)
        if self.activation is not None and (fused := self._fused) is not None:
            self._ungated = Ungated.of(fused.weight, fused.bias, self._widths[0])
        return self.adapters

    def _adapted(self, adapters: LinearAdapters, rows: AdapterRows, x: Tensor) -> Tensor:
        """The products of x, normalized already, with what the adapters of its rows add."""
        if self.activation is not None and self._ungated is not None and (fused := self._fused) is not None:
            weight, bias, panel = self._ungated
            places = [Columns(i * panel, panel, 2 * panel, width) for i, width in enumerate(self._widths)]
            add = adapters.begin(x, rows, places)
            wide = fused.implementation.epilogue and x.dtype != torch.float32
            options: dict[str, Any] = {"dtype": torch.float32} if wide else {}
            merged = self._product(fused._replace(weight=weight, bias=bias), x, **options)
            y: Tensor = self._gated_panels(merged, self.activation, panel, self._widths[0], x.dtype, add)
            return y
        add = self._begin(adapters, rows, x)
        outputs = [self._product(packed, x) for packed in self.packed or ()]
        merged = self._join(outputs)
        add(merged)
        return merged if self.activation is None else self._gated_activation(merged, self.activation)

    def _begin(self, adapters: LinearAdapters, rows: AdapterRows, x: Tensor) -> Add:
        """Begin what the adapters of x's rows add to its products, which stand side by side."""
        ends = itertools.accumulate(self._widths)
        places = [Columns(end - width, width, width, width) for end, width in zip(ends, self._widths, strict=True)]
        return adapters.begin(x, rows, places)

    def rows(self, rows: Tensor, factor: float = 1.0) -> Tensor:
        """Rows int64 [T] of the packed weight times a factor, float32 [T, in], as an embedding gives them."""
        fused = self._fused
        assert fused is not None and fused.order is None and fused.implementation.rows is not None  # noqa: PT018
        y: Tensor = fused.implementation.rows(fused.weight, rows, factor)
        return y

    def _product(self, packed: Packed, x: Tensor, norm: Norm | None = None, **options: Any) -> Tensor:
        """The product of x, normalized first if there is a norm, and of its columns in the weight's order."""
        if packed.order is not None:
            x = self._gather(x if norm is None else self._rms_norm(x, norm), packed.order)
            norm = None
        y: Tensor = packed.implementation(x, packed.weight, packed.bias, norm, **options)
        return y

    @property
    def _fused(self) -> Packed | None:
        """The one kernel that computes everything, including the activation, if there is one."""
        return self.packed[0] if self.packed is not None and len(self.packed) == 1 else None

    def add_to(self, stream: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add the product of x to the residual stream float32 [T, out]. Returns a pair (delta, residual), whose sum is
        the new stream: (stream, None) if a kernel has added the product, else (product, stream).
        """
        fused = self._fused
        if fused is not None and fused.implementation.epilogue and stream.dtype == torch.float32:
            x, _ = self._given(x)
            self._product(fused, x, residual=stream)
            if self.adapters is not None and (rows := self.adapters.rows(len(x))) is not None:
                self._begin(self.adapters, rows, x)(stream)
            return stream, None
        return self(x), stream

    def float32(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """As a call, but the result is not rounded to the activations' dtype. There is no activation."""
        fused, dtype = self._fused, x.dtype if norm is None else norm.dtype
        if fused is None or not fused.implementation.epilogue or dtype == torch.float32:
            return self(x, norm).float()
        x, norm = self._given(x, norm)
        if self.adapters is None or (rows := self.adapters.rows(len(x))) is None:
            return self._product(fused, x, norm, dtype=torch.float32)
        x = x if norm is None else self._rms_norm(x, norm)
        y = self._product(fused, x, dtype=torch.float32)
        self._begin(self.adapters, rows, x)(y)
        return y

    def _plain(self, x: Tensor) -> Tensor:
        """The products with the plain weights, side by side."""
        if self.observe is not None:
            for role in self.roles:
                self.observe(role, x)
        weights = [self.weights[role] for role in self.roles]
        biases = [self.weights.get(role + ".bias") for role in self.roles]
        bias = _concat_bias(list(zip(weights, biases, strict=True)))
        if self.product_dtype == torch.float32:
            return torch.nn.functional.linear(x, _dense(weights, torch.float32), bias)
        whole = in_full(x.to(self.product_dtype))
        product = torch.nn.functional.linear(whole, self._kept(weights))[: len(x)]
        if self.activation is not None and bias is None:
            return product  # the activation computes in float32, and its result is multiplied in short numbers again
        return product.float() if bias is None else product.float().add_(bias)

    def _kept(self, weights: list[Tensor | QTensor]) -> Tensor:
        """The weights as they are multiplied. They are kept for the next batch, as long as they are the same."""
        if torch.is_grad_enabled():
            return _dense(weights, self.product_dtype)
        if self._short is None or any(w is not old for w, old in zip(weights, self._short[0], strict=True)):
            self._short = weights, _dense(weights, self.product_dtype)
        return self._short[1]

    def pack(self, activations: str) -> None:
        """Choose a kernel, pack, and drop the plain weights. Raises UnsupportedError if no kernel accepts them."""
        weights = [self.weights.pop(role) for role in self.roles]
        biases = [self.weights.pop(role + ".bias", None) for role in self.roles]
        kinds = [kind_of(weight) for weight in weights]
        self.packed, self._widths = [], [_shape(weight)[0] for weight in weights]
        for group in _groups(kinds):
            weight = _concat([weights[i] for i in group])
            bias = _concat_bias([(weights[i], biases[i]) for i in group])
            activation = self._merged_activation(group)
            impl = _select(kinds[group[0]], _shape(weight), self.device, activations, activation)
            order = None
            if isinstance(weight, QTensor):
                order, weight = weight.order, weight.of_gathered()
            self.packed.append(Packed(impl, impl.pack(weight, activation), bias, order))

    def _merged_activation(self, group: list[int]) -> str | None:
        """The activation that a kernel computes, if any. The kernel must have both roles in one product."""
        return self.activation if len(group) == len(self.roles) else None

    def pack_outline(
        self, activations: str, kinds: list[WeightKind], shapes: list[tuple[int, int]], biases: list[bool]
    ) -> None:
        """As `pack` of weights of these kinds and shapes, but the tensors have no data: see `replace_packed`."""
        self.packed, self._widths = [], [rows for rows, _ in shapes]
        for group in _groups(kinds):
            kind, shape = kinds[group[0]], (sum(shapes[i][0] for i in group), shapes[group[0]][1])
            activation = self._merged_activation(group)
            impl = _select(kind, shape, self.device, activations, activation)
            bias = torch.empty(shape[0], device="meta") if any(biases[i] for i in group) else None
            order = torch.empty(shape[1], dtype=torch.int32, device="meta") if kind.order else None
            self.packed.append(Packed(impl, packed_outline(impl, kind, shape, activation), bias, order))

    def replace_packed(self, name: str, replace: Callable[[str, Tensor], Tensor]) -> None:
        """Replace every packed tensor by `replace(its name, tensor)`. The names begin with `name`."""
        assert self.packed is not None
        for i, (impl, packed, bias, order) in enumerate(self.packed):
            at = f"{name}.{'+'.join(self.roles)}.{i}"
            new_bias = None if bias is None else replace(at + ".bias", bias)
            new_order = None if order is None else _checked(replace(at + ".order", order))
            self.packed[i] = Packed(impl, replaced_tensors(packed, at, replace), new_bias, new_order)


def _checked(order: Tensor) -> Tensor:
    """The order, which kernels follow blindly. Raises CheckpointError if it leaves the inputs."""
    if not bool(((order >= 0) & (order < len(order))).all()):
        raise CheckpointError("an order names inputs that there are not")
    return order


class LinearsOfExperts:
    """The packed linears of many experts, as one kernel multiplies with them. `of` makes them."""

    def __init__(self, kernel: ExpertLinears, table: Any) -> None:
        self._kernel, self._table = kernel, table

    @classmethod
    def of(cls, linears: list[MergedLinear]) -> LinearsOfExperts | None:
        """None: the linears have no such kernel, differ in their kinds, or have an order of their own."""
        fused = [linear._fused for linear in linears]
        known = [packed for packed in fused if packed is not None and packed.order is None]
        if len(known) < len(linears) or (kernel := known[0].implementation.of_experts) is None:
            return None
        kinds = {(id(one.implementation), _outline(one.weight), one.bias is None) for one in known}
        table = kernel.table([(one.weight, one.bias) for one in known]) if len(kinds) == 1 else None
        return None if table is None else cls(kernel, table)

    def suits(self, tokens: float, dtype: torch.dtype) -> bool:
        """Whether this multiplies inputs of `dtype`, and is the fast way if an expert has so many tokens on average."""
        few = self.max_rows is None or tokens <= self.max_rows or self._kernel.in_parts()
        return few and not (self._kernel.half and dtype == torch.float32)

    @property
    def max_rows(self) -> int | None:
        """Rows of an expert on average that one call may have."""
        return self._kernel.max_rows

    @property
    def table(self) -> Any:
        """The kernel's own table of the weights."""
        return self._table

    def __call__(self, x: Tensor, places: ops.Places, *, by_token: bool = False) -> Tensor:
        y: Tensor = self._kernel.multiply(x, places, self._table, by_token)
        return y


def _outline(packed: Any) -> Any:
    """What a kernel's packed weight is but for its numbers."""
    if isinstance(packed, Tensor):
        return packed.shape, packed.dtype
    if not dataclasses.is_dataclass(packed) or isinstance(packed, type):
        return packed
    return type(packed), *(_outline(getattr(packed, field.name)) for field in dataclasses.fields(packed))


def _groups(kinds: list[WeightKind]) -> list[list[int]]:
    """Indices of neighbouring weights of the same kind."""
    groups: list[list[int]] = [[0]]
    for i in range(1, len(kinds)):
        if kinds[i] == kinds[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _shape(weight: Tensor | QTensor) -> tuple[int, int]:
    out_features, in_features = (weight.codes if isinstance(weight, QTensor) else weight).shape
    return out_features, in_features


def _concat(weights: list[Tensor | QTensor]) -> Tensor | QTensor:
    if len(weights) == 1:
        return plain(weights[0]) if isinstance(weights[0], QTensor) else weights[0]
    quantized = [plain(w) for w in weights if isinstance(w, QTensor)]
    if quantized:
        factors = [q.factor for q in quantized if q.factor is not None]
        return dataclasses.replace(
            quantized[0],
            codes=torch.cat([q.codes for q in quantized]),
            scales=torch.cat([q.scales for q in quantized]),
            zeros=torch.cat([q.zeros for q in quantized]),
            factor=torch.cat(factors) if factors else None,
        )
    return torch.cat([w for w in weights if isinstance(w, Tensor)])


def in_full(x: Tensor) -> Tensor:
    """x [n, in] with rows of zeros up to a multiple of ROWS. torch's library for short numbers keeps code for each
    number of rows that it has multiplied, up to a megabyte, and experts see any number."""
    missing = -len(x) % ROWS
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _dense(weights: list[Tensor | QTensor], dtype: torch.dtype) -> Tensor:
    """Plain weights, one below the other."""
    dense = [(dequantize(weight) if isinstance(weight, QTensor) else weight).to(dtype) for weight in weights]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


def _concat_bias(parts: list[tuple[Tensor | QTensor, Any]]) -> Tensor | None:
    if all(bias is None for _, bias in parts):
        return None
    device = next(bias.device for _, bias in parts if bias is not None)
    sizes = [_shape(weight)[0] for weight, _ in parts]
    return torch.cat(
        [
            torch.zeros(size, device=device) if bias is None else bias.float()
            for size, (_, bias) in zip(sizes, parts, strict=True)
        ]
    )


def _select(
    kind: WeightKind, shape: tuple[int, int], device: str, activations: str, activation: str | None
) -> Implementation:
    """The kernel for a weight [out, in]. Raises UnsupportedError."""
    traits: dict[str, Any] = {"out_features": shape[0], "in_features": shape[1], "activation": activation}
    if kind.scheme is None:
        return ops.linear_dense.select(device, dtype=kind.torch_dtype, **traits)
    traits |= {"group_size": kind.scheme.group_size, "bits": kind.scheme.bits, "values": kind.scheme.codes.values}
    traits |= {"scheme": kind.scheme, "scales": kind.torch_dtype}
    candidates = _candidates(kind.scheme, activations)
    found = [op.select(device, **traits) for op in candidates]
    native = next((impl for impl in found if impl.device == device), None)
    if native is None:
        _say_slow(candidates[-1].name, kind.scheme.bits, device)
    return native or found[-1]


@cache
def _say_slow(op: str, bits: int, device: str) -> None:
    log.warning("%s has no kernel for these %d-bit weights on %s: torch computes it, slowly", op, bits, device)


def _candidates(scheme: QuantScheme, activations: str) -> tuple[Op, ...]:
    """Ops for a quantized weight: the first that the device has a kernel for, else the last. Raises UnsupportedError.

    int8 rounds the inputs of integer weights, fp8 those of float8 weights; split keeps 16 bits of those of integer
    weights, and so do all kernels of weights in planes. auto rounds them if a row has one scale, so
    that the whole product is one of 8-bit numbers.
    """
    if scheme.in_planes:
        return (plane_ops.linear_planes,) if activations == "int8" else (plane_ops.linear_split,)
    kind = scheme.codes.inputs
    if activations == "split":
        split = (plane_ops.linear_split,) if kind == "int8" else ()
        return *split, *_candidates(scheme, "exact")
    rounded, exact = {
        ("fp8", 8): (ops.linear_fp8_a8, ops.linear_fp8),
        ("int8", 8): (ops.linear_w8a8, ops.linear_w8a16),
        ("int8", 4): (ops.linear_w4a8, ops.linear_w4a16),
    }[kind, scheme.bits]
    if activations == "auto":
        return (rounded, exact) if scheme.bits == 8 and scheme.group_size == -1 else (exact,)
    if activations == "fp8" and kind != "fp8":
        raise UnsupportedError(f"activations fp8 need float8 weights, not {scheme.codes.words}: auto, int8 or exact")
    return (rounded,) if activations == kind else (exact,)
