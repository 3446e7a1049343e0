"""Drawing tokens on the CPU (ops.draw), one task for each row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.intrinsics import order, pointer, unorder, unpack
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.registry import implements


@inline
def _keep(weights: Any, values: Any, floor: Any, count: int) -> None:
    """Set all weights to 0 except those of the `count` greatest of `values`. `floor` is the least of these."""
    equal = count
    for i in range(len(values)):
        if values[i] > floor:
            equal -= 1
    for i in range(len(values)):
        if values[i] == floor and equal > 0:
            equal -= 1  # of equal values the lower ids stay
        elif not values[i] > floor:
            weights[i] = 0.0


@inline
def kth_greatest(values: Any, k: int) -> Any:
    """The k-th greatest value by bisection of its bits: one pass over the vocabulary per bit, and no copy of it."""
    low, high = np.int64(-(1 << 31)), np.int64((1 << 31) - 1)  # at least k values are >= `low`, as `order` numbers them
    while low < high:
        middle = (low + high + 1) >> 1
        reaching = 0
        for i in range(len(values)):
            reaching += order(values[i]) >= middle
        if reaching >= k:
            low = middle
        else:
            high = middle - 1
    return unorder(np.int32(low))


@inline
def _sift(heap: Any, root: int, size: int) -> None:
    """Let heap[root] sink below its greater children."""
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[root] >= heap[child]:
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child


@inline
def _keep_nucleus(weights: Any, top_p: float, heap: Any) -> None:
    """Keep the nucleus (top_p). `heap` has room for as many weights."""
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    # Weights below this threshold are left out: all of them together are less than 1 - top_p of the total. So only some
    # hundred weights are ranked, not the vocabulary, and of these only the ones that are kept.
    least, num = (1 - top_p) * total / len(weights), 0
    for i in range(len(weights)):
        if weights[i] >= least:
            heap[num] = weights[i]
            num += 1
    for root in range(num // 2 - 1, -1, -1):
        _sift(heap, root, num)
    sums, count, floor = 0.0, 0, 0.0
    while num > 0 and (count == 0 or sums < top_p * total):
        floor = heap[0]
        sums += floor
        count += 1
        num -= 1
        heap[0] = heap[num]
        _sift(heap, 0, num)
    _keep(weights, weights, floor, count)


def _draw(args: int, scratch: int, index: int) -> None:
    logits, stride, size, rows, temperatures, top_ks, top_ps, min_ps, shares, out = unpack(args, 10)
    row = carray(pointer(rows), index + 1, np.int64)[index]
    values = carray(pointer(logits + row * stride), size, np.float32)
    weights = carray(pointer(scratch), size, np.float64)
    temperature = carray(pointer(temperatures + 8 * index), 1, np.float64)[0]
    k = carray(pointer(top_ks + 8 * index), 1, np.int64)[0]
    top_p = carray(pointer(top_ps + 8 * index), 1, np.float64)[0]
    min_p = carray(pointer(min_ps + 8 * index), 1, np.float64)[0]
    top = values[0]
    for i in range(size):
        top = max(top, values[i])
    for i in range(size):
        weights[i] = math.exp((np.float64(values[i]) - top) / temperature)
    if 0 < k < size:
        _keep(weights, values, kth_greatest(values, k), k)
    if top_p < 1:
        _keep_nucleus(weights, top_p, carray(pointer(scratch + 8 * size), size, np.float64))
    total = 0.0
    for i in range(size):
        if weights[i] < min_p:
            weights[i] = 0.0
        total += weights[i]
    target = carray(pointer(shares + 8 * index), 1, np.float64)[0] * total
    token, sums = 0, weights[0]
    while sums <= target and token < size - 1:
        token += 1
        sums += weights[token]
    carray(pointer(out + 8 * index), 1, np.int64)[0] = token


DRAW = Task(_draw)


@implements(ops.draw, "cpu", device="cpu", priority=20)
def draw(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, share: Tensor
) -> Tensor:
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1)
    numbers = [x.contiguous() for x in (rows, temperature, top_k, top_p, min_p, share)]
    assert [x.dtype for x in numbers] == [torch.int64, torch.float64, torch.int64, *[torch.float64] * 3]
    out, size = torch.empty(len(rows), dtype=torch.int64), logits.shape[1]
    args = (logits.data_ptr(), 4 * logits.stride(0), size, *(x.data_ptr() for x in numbers), out.data_ptr())
    threads.run(DRAW, len(rows), args, scratch=16 * size)
    return out
