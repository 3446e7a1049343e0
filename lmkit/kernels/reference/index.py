"""The choice of keys by an indexer."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels import index_ops
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kernels.registry import implements


@implements(index_ops.chosen_keys, "reference", device="any")
def chosen_keys(
    q: Tensor, weights: Tensor, keys: KVTensor, geometry: BatchGeometry, count: int
) -> tuple[Tensor, Tensor]:
    slots = geometry.block_tables.new_zeros(len(q), count)
    lengths = slots.new_zeros(len(q))
    starts, size = geometry.query_start.tolist(), keys.block_size
    for b, length in enumerate(geometry.context_lens.tolist()):
        blocks = geometry.block_tables[b, : -(-length // size)]
        stored = read_blocks(keys, blocks, length)[0]
        for row in range(starts[b], starts[b + 1]):
            seen = length - starts[b + 1] + row + 1
            scores = weights[row].float() @ (q[row].float() @ stored[:seen].T).relu()
            chosen = scores.sort(descending=True, stable=True).indices[:count].sort().values
            slots[row, : len(chosen)] = blocks[chosen // size] * size + (chosen % size).int()
            lengths[row] = len(chosen)
    return slots, lengths
