"""The common parts of linears: weights in panels of a few outputs, and storing the sums of a panel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.intrinsics import exp, fma, pointer, unpack
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.structs import numbers
from lmkit.kernels.ops import Places

ROW_BLOCK = 96  # rows that share a panel prepared in the cache
CHUNK_BYTES = 16 << 10  # of such a panel: half of a first-level cache
TASK_BYTES = 64 << 10  # of stored weights in one task: some ten microseconds from memory
SILU, GELU_TANH, CLAMPED_SWISH = 1, 2, 3
# For compiled code; 0: the weight is not gated.
ACTIVATION_NUMBERS = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH, "clamped_swish": CLAMPED_SWISH}
CLAMP, SWISH = np.float32(ops.CLAMP), np.float32(ops.SWISH)  # of clamped_swish
LINEAR, CUBIC = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715 * math.sqrt(2 / math.pi))  # of gelu_tanh
SERIAL_PRODUCTS = 1 << 17  # multiply-adds; with fewer, waking another thread costs more than it saves


def to_panels(rows: Tensor, width: int, gated: bool) -> Tensor:
    """[N, K] -> [panels, K, width]. N is padded with zeros. Gated: see `interleave`. Rows are copied once."""
    parts = rows.chunk(2) if gated else (rows,)
    panels = rows.new_empty(-(-parts[0].shape[0] // width), len(parts), rows.shape[1], width)
    for i, part in enumerate(parts):
        whole, rest = divmod(part.shape[0], width)
        panels[:whole, i] = part[: whole * width].unflatten(0, (whole, width)).transpose(1, 2)
        if rest:
            panels[whole, i] = torch.nn.functional.pad(part[whole * width :], (0, 0, 0, width - rest)).T
    return panels.flatten(0, 1)


def padded(rows: Tensor, multiple: int) -> Tensor:
    """rows [N, K] with zeros after K up to a multiple. No copy if K is one."""
    missing = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def interleave(rows: Tensor, width: int) -> Tensor:
    """[gate | up, K] -> `width` rows of gate, `width` of up, and so on. Each half is padded with zeros. A panel of
    gates lies before the panel of the values that they multiply.
    """
    gate, up = (torch.nn.functional.pad(half, (0, 0, 0, -half.shape[0] % width)) for half in rows.chunk(2))
    return torch.stack([gate.view(-1, width, rows.shape[1]), up.view(-1, width, rows.shape[1])], 1).flatten(0, 2)


def as_float(x: Tensor) -> Tensor:
    """x as float32 with contiguous elements in a row. The stride between rows is free."""
    x = as_type(x, torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def as_type(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y.to(dtype), at no cost if y already has it."""
    return y if y.dtype is dtype else y.to(dtype)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def panels_per_task(panel_bytes: int, panels: int, gated: bool) -> int:
    """As many panels as TASK_BYTES hold. Gates stay with the values that they multiply."""
    if gated:
        return 2 * panels_per_task(2 * panel_bytes, panels // 2, False)
    return max(1, min(TASK_BYTES // panel_bytes, panels))


class Blocks(NamedTuple):
    """The split of a product: each task computes a block of rows times a few panels."""

    rows: int
    panels: int
    per_task: int
    row_block: int


class Experts(NamedTuple):
    """Addresses for the linears of many experts; 0: there is one linear."""

    active: int = 0  # of ops.Places
    table: int = 0  # int64 [experts, ENTRY]: the addresses of each one's weight, scales, zeros and bias


ENTRY = 4
NO_EXPERTS = Experts()


@dataclass(frozen=True)
class ExpertTable:
    """The packed weights of many experts. `packed` is one of them: all have its shape."""

    packed: Any
    addresses: Tensor  # see Experts
    kept: list[Any]  # what lies at the addresses

    @classmethod
    def of(cls, parts: list[tuple[Any, Tensor | None]], tensors: Callable[[Any], list[Tensor | None]]) -> ExpertTable:
        """`tensors` gives the weight, the scales and the zeros of a packed weight."""
        filled = [(packed, None if bias is None else bias.float().contiguous()) for packed, bias in parts]
        entries = [[address(tensor) for tensor in (*tensors(packed), bias)] for packed, bias in filled]
        return cls(parts[0][0], torch.from_numpy(np.array(entries, np.int64)), filled)

    def at(self, places: Places) -> Experts:
        return Experts(places.active.data_ptr(), self.addresses.data_ptr())


class Results(NamedTuple):
    """The destination of a product: float32 [rows, features]."""

    out: int
    features: int
    bias: int  # or 0
    activation: int  # of ACTIVATION_NUMBERS


def results(out: Tensor, bias: Tensor | None, activation: str | None) -> Results:
    return Results(out.data_ptr(), out.shape[1], address(bias), ACTIVATION_NUMBERS[activation])


def run_blocks(
    task: Task, blocks: Blocks, args: tuple[Any, ...], *, panel_size: int, scratch: int, max_active: int = 0
) -> None:
    """Run a task for each block. `panel_size` is the number of weights in a panel, `args` the task's struct. With
    `max_active` experts, a task computes all rows of one of them."""
    threads.run(
        task,
        -(-blocks.panels // blocks.per_task) * (max_active or -(-blocks.rows // blocks.row_block)),
        numbers(args),
        parallel=blocks.rows * blocks.panels * panel_size > SERIAL_PRODUCTS,
        in_order=True,
        scratch=scratch,
    )


@inline
def block_of(blocks: Blocks, index: int) -> Any:
    """(first panel, first row, number of panels, number of rows) of task `index`."""
    tasks = (blocks.panels + blocks.per_task - 1) // blocks.per_task
    first, row = index % tasks * blocks.per_task, index // tasks * blocks.row_block
    return first, row, min(blocks.per_task, blocks.panels - first), min(blocks.row_block, blocks.rows - row)


@inline
def rows_of(blocks: Blocks, experts: Experts, index: int) -> Any:
    """(address of the expert's entry or 0, first panel, number of panels, first row, end of the rows) of task `index`.
    There are no rows if fewer experts than that have any."""
    if experts.active == 0:
        first, row, num_panels, num_rows = block_of(blocks, index)
        return 0, first, num_panels, row, row + num_rows
    tasks = (blocks.panels + blocks.per_task - 1) // blocks.per_task
    first, nth = index % tasks * blocks.per_task, index // tasks
    num_panels = min(blocks.per_task, blocks.panels - first)
    if nth >= carray(pointer(experts.active), 1, np.int64)[0]:
        return 0, first, num_panels, 0, 0
    expert, row, end = unpack(experts.active + 8 + 24 * nth, 3)
    return experts.table + 8 * ENTRY * expert, first, num_panels, row, end


@inline
def _store_sums(sums: int, width: int, rows: int, start: int, features: int, bias: int, out: int) -> None:
    """Copy sums float32 [rows, width] to columns start .. of out [rows, features], plus the bias if there is one."""
    count = min(width, features - start)
    for r in range(rows):
        x = carray(pointer(sums + 4 * r * width), count, np.float32)
        y = carray(pointer(out + 4 * (r * features + start)), count, np.float32)
        if bias:
            b = carray(pointer(bias + 4 * start), count, np.float32)
            for i in range(count):
                y[i] = x[i] + b[i]
        else:
            for i in range(count):
                y[i] = x[i]


@inline
def multiply_gates(gate: Any, value: Any, out: Any, count: int, activation: int) -> None:
    """out = f(gate) * g(value), arrays of float32 (ops.gated_activation). `activation` is one of ACTIVATION_NUMBERS."""
    if activation == SILU:
        for i in range(count):
            out[i] = gate[i] / (np.float32(1) + exp(-gate[i])) * value[i]
    elif activation == CLAMPED_SWISH:
        for i in range(count):
            x = min(gate[i], CLAMP)
            out[i] = x / (np.float32(1) + exp(-SWISH * x)) * (np.float32(1) + max(-CLAMP, min(value[i], CLAMP)))
    else:
        for i in range(count):  # (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
            x = gate[i]
            u = x * fma(x * x, CUBIC, LINEAR)
            out[i] = x / (np.float32(1) + exp(np.float32(-2) * u)) * value[i]


@inline
def _store_gated(gates: int, values: int, width: int, rows: int, start: int, features: int, bias: int, out: int,
                 activation: int) -> None:  # fmt: skip
    """Store f(gate) * value of two panels' sums, float32 [rows, width], to columns start .. of out [rows, features]."""
    count = min(width, features - start)
    for r in range(rows):
        gate = carray(pointer(gates + 4 * r * width), count, np.float32)
        value = carray(pointer(values + 4 * r * width), count, np.float32)
        if bias:
            of_gate = carray(pointer(bias + 4 * start), count, np.float32)
            of_value = carray(pointer(bias + 4 * (features + start)), count, np.float32)
            for i in range(count):
                gate[i] += of_gate[i]
                value[i] += of_value[i]
        y = carray(pointer(out + 4 * (r * features + start)), count, np.float32)
        multiply_gates(gate, value, y, count, activation)


@inline
def store_panels(
    results: Results, bias: int, sums: int, width: int, row: int, rows: int, first: int, count: int
) -> None:
    """Store the sums of `count` panels from `first` on, float32 [count, rows, width], to the rows from `row` on. The
    first panel of a gated weight is one of gates.
    """
    features, activation = results.features, results.activation
    out, sums_bytes = results.out + 4 * row * features, 4 * rows * width
    if activation:
        for p in range(0, count, 2):
            gates, start = sums + p * sums_bytes, (first + p) // 2 * width
            _store_gated(gates, gates + sums_bytes, width, rows, start, features, bias, out, activation)
    else:
        for p in range(count):
            _store_sums(sums + p * sums_bytes, width, rows, (first + p) * width, features, bias, out)
