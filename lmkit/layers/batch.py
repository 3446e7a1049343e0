"""What one forward pass needs besides the weights: the batch's geometry and each layer's KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.kernels.ops import KV_CODED, KVTensor


@dataclass(frozen=True)
class BatchInputs:
    """One step: B sequences bring T new tokens in all; nothing distinguishes prefill from decode.

    Rows query_start[b] .. query_start[b+1] of the token dimension belong to sequence b.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T], where each token's KV goes: block * block_size + offset
    query_start: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], tokens in the cache after this step
    block_tables: Tensor  # int32 [B, max_blocks], padded with anything
    rope_lens: Tensor  # int32 [B], the length that fixes a sequence's dynamic-NTK base (its prompt's, once and for all)
    logit_rows: Tensor  # int64 [R], the rows whose logits are wanted


@dataclass(frozen=True)
class KVLayer:
    """Blocked keys and values of one layer; K and V may be stored in different types."""

    k: KVTensor
    v: KVTensor


def allocate_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtypes: tuple[str, str], device: str = "cpu"
) -> KVLayer:
    """Zeroed blocks for one layer; `dtypes` are the storage types of K and V (keys of kernels.ops.KV_BITS)."""

    def tensor(dtype: str) -> KVTensor:
        shape = (num_blocks, num_kv_heads, block_size)
        if dtype in KV_CODED:
            width = head_dim // 2 if dtype == "int4" else head_dim
            data = torch.zeros(*shape, width, dtype=torch.uint8, device=device)
            params = torch.zeros(*shape, 2, dtype=torch.float16, device=device)
        else:
            data = torch.zeros(*shape, head_dim, dtype=getattr(torch, dtype), device=device)
            params = torch.zeros(0, dtype=torch.float16, device=device)
        return KVTensor(data, params, dtype)

    return KVLayer(tensor(dtypes[0]), tensor(dtypes[1]))


def whole_batch(rows: list[list[int]], block_size: int, device: str = "cpu") -> tuple[BatchInputs, int]:
    """(batch, blocks needed) for whole sequences from position 0 in consecutive blocks, all logits wanted.

    For calibration and evaluation, which keep nothing between calls.
    """
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    blocks = [-(-len(row) // block_size) for row in rows]
    tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    slots, next_block = [], 0
    for b, count in enumerate(blocks):
        tables[b, :count] = torch.arange(next_block, next_block + count)
        slots.append(torch.arange(len(rows[b]), dtype=torch.int32) + next_block * block_size)
        next_block += count
    start = torch.zeros(len(rows) + 1, dtype=torch.int32)
    start[1:] = lens.cumsum(0)
    batch = BatchInputs(
        token_ids=torch.tensor([t for row in rows for t in row]).to(device),
        positions=torch.cat([torch.arange(len(row), dtype=torch.int32) for row in rows]).to(device),
        slots=torch.cat(slots).to(device),
        query_start=start.to(device),
        context_lens=lens.to(device),
        block_tables=tables.to(device),
        rope_lens=lens.to(device),
        logit_rows=torch.arange(int(lens.sum())).to(device),
    )
    return batch, next_block
