"""The choice of keys by an indexer on the CPU, one task for each query."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import index_ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.intrinsics import pointer
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.sampling import kth_greatest
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kernels.registry import implements


class ChooseArgs(NamedTuple):
    q: int  # [rows, heads, dim]
    weights: int  # [rows, heads]
    keys: int  # [length, dim]
    table: int  # blocks of the sequence
    block_size: int
    heads: int
    dim: int
    most: int  # keys that a row sees
    first_seen: int  # keys that the first row sees
    slots: int
    lengths: int


@inline
def _floats(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.float32)


@inline
def _score(a: Any, index: int, scratch: int, scores: Any) -> None:
    """The scores of a row's keys. Sums run over heads side by side, so that their order is that of the elements."""
    heads, dim = a.heads, a.dim
    q, weights = _floats(a.q + 4 * index * heads * dim, heads * dim), _floats(a.weights + 4 * index * heads, heads)
    sums, turned = _floats(scratch, heads), _floats(scratch + 4 * heads, dim * heads)
    for h in range(heads):
        for d in range(dim):
            turned[d * heads + h] = q[h * dim + d]
    for j in range(len(scores)):
        key = _floats(a.keys + 4 * j * dim, dim)
        sums[:] = np.float32(0)
        for d in range(dim):
            x, column = key[d], _floats(scratch + 4 * heads * (1 + d), heads)
            for h in range(heads):
                sums[h] += x * column[h]
        total = np.float32(0)
        for h in range(heads):
            total += max(sums[h], np.float32(0)) * weights[h]
        scores[j] = total


def _choose(args: int, scratch: int, index: int) -> None:
    a = read(args, ChooseArgs)
    seen = a.first_seen + index
    slots = carray(pointer(a.slots + 4 * index * a.most), a.most, np.int32)
    table = carray(pointer(a.table), (seen + a.block_size - 1) // a.block_size, np.int32)
    scores, floor, equal = _floats(scratch, seen), np.float32(0), seen
    if seen > a.most:
        _score(a, index, scratch + 4 * seen, scores)
        floor, equal = kth_greatest(scores, a.most), a.most
        for j in range(seen):
            equal -= scores[j] > floor
    else:
        scores[:] = np.float32(0)
    at = 0
    for j in range(seen):
        ties = scores[j] == floor and equal > 0  # of equal scores the first ones
        if scores[j] > floor or ties:
            equal -= ties
            slots[at] = table[j // a.block_size] * a.block_size + j % a.block_size
            at += 1
    carray(pointer(a.lengths + 4 * index), 1, np.int32)[0] = at


CHOOSE = Task(_choose)


@implements(index_ops.chosen_keys, "cpu", device="cpu", priority=20)
def chosen_keys(
    q: Tensor, weights: Tensor, keys: KVTensor, geometry: BatchGeometry, count: int
) -> tuple[Tensor, Tensor]:
    q, weights, tables = q.float().contiguous(), weights.float().contiguous(), geometry.block_tables.contiguous()
    slots = torch.zeros(len(q), count, dtype=torch.int32)
    lengths = torch.zeros(len(q), dtype=torch.int32)
    starts, size = geometry.query_start.tolist(), keys.block_size
    heads, dim = q.shape[1:]
    for b, length in enumerate(geometry.context_lens.tolist()):
        row, rows = starts[b], starts[b + 1] - starts[b]
        stored = read_blocks(keys, tables[b, : -(-length // size)], length).contiguous()
        args = ChooseArgs(
            q[row:].data_ptr(), weights[row:].data_ptr(), stored.data_ptr(), tables[b].data_ptr(), size, heads, dim,
            count, length - rows + 1, slots[row:].data_ptr(), lengths[row:].data_ptr(),
        )  # fmt: skip
        threads.run(CHOOSE, rows, numbers(args), scratch=4 * (length + heads * (dim + 1)))
    return slots, lengths
