"""Tensors that a checkpoint stores inside others: some rows of a fused linear, one expert of all, or another name.

qkv_proj.weight [q + k + v, in]     ->  q_proj.weight, k_proj.weight, v_proj.weight
experts.gate_up_proj [E, 2I, in]    ->  experts.0.gate_proj.weight, experts.0.up_proj.weight, experts.1. ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from torch import Tensor

from lmkit.errors import CheckpointError


@dataclass(frozen=True)
class Rows:
    """Outputs of a fused linear. They are cut into `groups` equal groups; of each, the outputs from share `start` to
    share `stop` are taken, in order."""

    start: Fraction
    stop: Fraction
    groups: int = 1


@dataclass(frozen=True)
class View:
    """A tensor made of the tensor `source` of the same checkpoint, which has the dtype of its source."""

    source: str
    shape: tuple[int, ...]
    take: Callable[..., Tensor]  # of the source, and of those beside it
    beside: tuple[str, ...] = ()  # other tensors that it is made of


# The axis of the outputs in the tensors of a linear, if it is not the first. None: a tensor that all outputs share.
AXES = {
    "qweight": 1, "qzeros": 1, "scaled_zeros": 1, "scales": 1, "g_idx": None, "weight_g_idx": None, "input_scale": None,
}  # fmt: skip
# Where a version of AWQ differs.
VERSIONS = {"gemv": {"qweight": 0, "qzeros": 0, "scales": 0}, "gemv_fast": {"qweight": 0}, "llm-awq": {"qweight": 0}}
SUFFIXES = (
    "weight", "bias", *AXES, "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
)  # fmt: skip


def named(source: str, shape: tuple[int, ...]) -> View:
    """The whole tensor, under another name."""
    return View(source, shape, lambda tensor: tensor)


def flat(source: str, shape: tuple[int, ...]) -> View:
    """A vector that may stand in a tensor of more axes, under another name."""
    return View(source, (prod(shape),), lambda tensor: tensor.flatten())


def rows_of(source: str, shape: tuple[int, ...], rows: Rows, outputs: int, *, version: str = "") -> View:
    """Some outputs of a tensor of a fused linear with so many `outputs`, of any weight format. `version` is that of
    AWQ. Raises CheckpointError if a word or a block of the format crosses the border.
    """
    suffix = source.rpartition(".")[2]
    axis = (AXES | VERSIONS.get(version, {})).get(suffix, 0)
    if suffix == "weight_shape":
        return View(source, shape, lambda tensor: _fewer_rows(tensor, rows))
    if axis is None or len(shape) <= axis or shape[axis] == 1:
        return named(source, shape)
    if suffix.startswith("weight_scale") and (outputs % shape[0] or (outputs // shape[0]).bit_count() != 1):
        raise _no_border(source, shape)  # blocks of a power of two of outputs, and the last is shorter
    return View(source, *_cut(source, shape, axis, rows))


def expert_of(source: str, shape: tuple[int, ...], expert: int, rows: Rows, *, transposed: bool = False) -> View:
    """Some outputs of one expert of a tensor [experts, out, ...], or [experts, in, out] if `transposed`. Raises
    CheckpointError if it has no such rows."""
    of_one, take = _cut(source, shape[:0:-1] if transposed else shape[1:], 0, rows)
    return View(source, of_one, lambda tensor: take(tensor[expert].T if transposed else tensor[expert]))


def _cut(
    source: str, shape: tuple[int, ...], axis: int, rows: Rows
) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """(shape, function) of the rows of a tensor of this shape."""
    size = shape[axis] // rows.groups
    start, stop = rows.start * size, rows.stop * size
    if shape[axis] % rows.groups or start.denominator > 1 or stop.denominator > 1:
        raise _no_border(source, shape)
    first, count = int(start), int(stop - start)

    def take(tensor: Tensor) -> Tensor:
        grouped: Tensor = tensor.unflatten(axis, (rows.groups, size))  # type: ignore[no-untyped-call]
        return grouped.narrow(axis + 1, first, count).flatten(axis, axis + 1).contiguous()

    return (*shape[:axis], rows.groups * count, *shape[axis + 1 :]), take


def _no_border(source: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{source} is {list(shape)}: the linears inside it do not end at borders of words or blocks")


def _fewer_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """The shape [out, in] of the linear that has these rows."""
    fewer = tensor.clone()
    fewer[0] = int(int(tensor[0]) * (rows.stop - rows.start))
    return fewer
