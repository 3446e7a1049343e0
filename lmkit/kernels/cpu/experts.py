"""Mixtures of experts on the CPU: which experts a token has, and the sum of their outputs. The products are those of
quantized.py and dense.py, a task for each expert and a few panels:

    logits --route--> experts of each token --expert_places--> places, by expert
    x --gather--> rows of places --products--> gate | up --products--> y --sum_places--> tokens

All numbers that depend on the data lie in memory, so a step's jobs are the same for any choice of experts.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.intrinsics import bits_to_float, exp, fma, pointer, unpack
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.panels import address, as_float
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import Places, Routing
from lmkit.kernels.registry import implements

TINY = np.float32(ops.TINY)
INFINITY = np.float32(np.inf)


class RouteArgs(NamedTuple):
    logits: int
    stride: int  # bytes
    bias: int  # or 0
    num_experts: int
    per_token: int
    normalize: int
    sigmoid: int
    num_groups: int
    groups_per_token: int
    group_top: int
    scale_bits: int
    weights: int
    experts: int


@inline
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + exp(-x))


@inline
def _choose(values: int, count: int, wanted: int, chosen: int) -> None:
    """Mark the `wanted` greatest of float32 [count], the lower index of equal ones, in chosen uint8 [count]."""
    x, marks = carray(pointer(values), count, np.float32), carray(pointer(chosen), count, np.uint8)
    marks[:] = 0
    for _ in range(wanted):
        best = -1
        for i in range(count):
            if not marks[i] and (best < 0 or x[i] > x[best]):
                best = i
        marks[best] = 1


def _route(args: int, scratch: int, index: int) -> None:
    """Choose the experts of token `index`."""
    a = read(args, RouteArgs)
    num, per_token, groups = a.num_experts, a.per_token, a.num_groups
    logits = carray(pointer(a.logits + index * a.stride), num, np.float32)
    scores = carray(pointer(scratch), num, np.float32)
    wanted = carray(pointer(scratch + 4 * num), num, np.float32)
    if a.sigmoid:
        for i in range(num):
            scores[i] = _sigmoid(logits[i])
    else:
        peak, total = logits[0], np.float32(0)
        for i in range(num):
            peak = max(peak, logits[i])
        for i in range(num):
            scores[i] = exp(logits[i] - peak)
        for i in range(num):
            total += scores[i]
        for i in range(num):
            scores[i] /= total
    for i in range(num):
        wanted[i] = scores[i]
    if a.bias:
        bias = carray(pointer(a.bias), num, np.float32)
        for i in range(num):
            wanted[i] += bias[i]
    of_groups, marks = scratch + 8 * num, scratch + 12 * num
    if groups > 1:
        size, best = num // groups, carray(pointer(of_groups), groups, np.float32)
        for g in range(groups):
            first, second = -INFINITY, -INFINITY
            for i in range(g * size, (g + 1) * size):
                value = wanted[i]
                if value > first:
                    first, second = value, first
                elif value > second:
                    second = value
            best[g] = first + second if a.group_top == 2 else first
        _choose(of_groups, groups, a.groups_per_token, marks)
        kept = carray(pointer(marks), groups, np.uint8)
        for g in range(groups):
            if not kept[g]:
                wanted[g * size : (g + 1) * size] = -INFINITY
    _choose(scratch + 4 * num, num, per_token, marks)
    chosen, place, total = carray(pointer(marks), num, np.uint8), index * per_token, np.float32(0)
    weights = carray(pointer(a.weights), place + per_token, np.float32)
    experts = carray(pointer(a.experts), place + per_token, np.int64)
    for i in range(num):
        if chosen[i]:
            weights[place], experts[place] = scores[i], i
            total += scores[i]
            place += 1
    scale = bits_to_float(np.uint32(a.scale_bits))
    for p in range(place - per_token, place):
        weights[p] = (weights[p] / (total + TINY) if a.normalize else weights[p]) * scale


def _expert_places(args: int, scratch: int, index: int) -> None:
    """Sort all places by counting."""
    experts, count, per_token, num_experts, tokens, of_token, active, held, held_end = unpack(args, 9)
    chosen, starts = carray(pointer(experts), count, np.int64), carray(pointer(scratch), num_experts, np.int64)
    starts[:] = 0
    for p in range(count):
        starts[chosen[p]] += 1
    first, number = 0, 0
    for e in range(num_experts):
        end = first + starts[e]
        if end > first and held <= e < held_end:
            entry = carray(pointer(active + 8 + 24 * number), 3, np.int64)
            entry[0], entry[1], entry[2] = e - held, first, end
            number += 1
        starts[e], first = first, end
    carray(pointer(active), 1, np.int64)[0] = number
    token, place = carray(pointer(tokens), count, np.int64), carray(pointer(of_token), count, np.int64)
    for p in range(count):
        at = starts[chosen[p]]
        token[at], place[p] = p // per_token, at
        starts[chosen[p]] += 1


@inline
def _add_scaled(out: Any, x: Any, factor: Any, size: int) -> None:
    for i in range(size):
        out[i] = fma(x[i], factor, out[i])


def _sum_places(args: int, scratch: int, index: int) -> None:
    """Compute token `index`."""
    y, weights, of_token, per_token, out, size = unpack(args, 6)
    places = carray(pointer(of_token + 8 * index * per_token), per_token, np.int64)
    factors = carray(pointer(weights + 4 * index * per_token), per_token, np.float32)
    total = carray(pointer(out + 4 * index * size), size, np.float32)
    total[:] = 0
    for j in range(per_token):
        _add_scaled(total, carray(pointer(y + 4 * places[j] * size), size, np.float32), factors[j], size)


def _add_rows(args: int, scratch: int, index: int) -> None:
    """Add row `index`."""
    out, tokens, y, factors, size = unpack(args, 5)
    token = carray(pointer(tokens), index + 1, np.int64)[index]
    factor = carray(pointer(factors), index + 1, np.float32)[index]
    total = carray(pointer(out + 4 * token * size), size, np.float32)
    _add_scaled(total, carray(pointer(y + 4 * index * size), size, np.float32), factor, size)


def _add_shared(args: int, scratch: int, index: int) -> None:
    """Add the shared expert's output to token `index`."""
    out, y, size, logits, stride = unpack(args, 5)
    factor = np.float32(1)
    if logits:
        factor = _sigmoid(carray(pointer(logits + index * stride), 1, np.float32)[0])
    total = carray(pointer(out + 4 * index * size), size, np.float32)
    _add_scaled(total, carray(pointer(y + 4 * index * size), size, np.float32), factor, size)


ROUTE, EXPERT_PLACES, SUM_PLACES, ADD_ROWS, ADD_SHARED = (
    Task(f) for f in (_route, _expert_places, _sum_places, _add_rows, _add_shared)
)


@implements(ops.route, "cpu", device="cpu", priority=20)
def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1)
    (count, num), per_token = logits.shape, routing.experts_per_token
    weights, experts = workspace.empty(count, per_token), workspace.empty(count, per_token, dtype=torch.int64)
    ctypes.memset(experts.data_ptr(), 0, experts.nbytes)  # of a step that only names its kernels (jit.collecting)
    args = RouteArgs(
        logits.data_ptr(), 4 * logits.stride(0), address(bias), num, per_token, int(routing.normalize),
        int(routing.sigmoid), routing.num_groups, routing.groups_per_token, routing.group_top,
        float_bits(routing.scale), weights.data_ptr(), experts.data_ptr(),
    )  # fmt: skip
    threads.run(ROUTE, count, numbers(args), parallel=count * num * per_token > SERIAL_VALUES, scratch=13 * num)
    return weights, experts


@implements(ops.expert_places, "cpu", device="cpu", priority=20)
def expert_places(experts: Tensor, num_experts: int, held: range) -> Places:
    count, per_token = experts.shape
    total = count * per_token
    tokens = workspace.empty(total, dtype=torch.int64)
    of_token = workspace.empty(count, per_token, dtype=torch.int64)
    active = workspace.empty(1 + 3 * min(len(held), total), dtype=torch.int64)
    args = (
        experts.data_ptr(), total, per_token, num_experts, tokens.data_ptr(), of_token.data_ptr(), active.data_ptr(),
        held.start, held.stop,
    )  # fmt: skip
    threads.run(EXPERT_PLACES, 1, args, parallel=False, scratch=8 * num_experts)
    return Places(tokens, of_token, active)


@implements(ops.sum_places, "cpu", device="cpu", priority=20)
def sum_places(y: Tensor, weights: Tensor, places: Places, out: Tensor) -> None:
    assert y.is_contiguous()
    assert out.is_contiguous()
    count, per_token = weights.shape
    args = (y.data_ptr(), weights.data_ptr(), places.of_token.data_ptr(), per_token, out.data_ptr(), out.shape[1])
    threads.run(SUM_PLACES, count, args, parallel=y.numel() > SERIAL_VALUES)


@implements(ops.add_rows, "cpu", device="cpu", priority=20)
def add_rows(out: Tensor, tokens: Tensor, y: Tensor, factors: Tensor) -> None:
    assert out.is_contiguous()
    y, tokens, factors = as_float(y).contiguous(), tokens.contiguous(), factors.contiguous()
    args = (out.data_ptr(), tokens.data_ptr(), y.data_ptr(), factors.data_ptr(), out.shape[1])
    threads.run(ADD_ROWS, len(y), args, parallel=y.numel() > SERIAL_VALUES)


@implements(ops.add_shared, "cpu", device="cpu", priority=20)
def add_shared(out: Tensor, y: Tensor, logits: Tensor | None) -> None:
    assert out.is_contiguous()
    y = as_float(y).contiguous()
    stride = 0 if logits is None else 4 * logits.stride(0)
    args = (out.data_ptr(), y.data_ptr(), out.shape[1], address(logits), stride)
    threads.run(ADD_SHARED, len(out), args, parallel=out.numel() > SERIAL_VALUES)
