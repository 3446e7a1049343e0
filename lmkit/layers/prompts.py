"""The chunks of a step that latent attention computes over plain keys and values of each head (layers.latent_cost)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lmkit.kernels.ops import BatchGeometry
from lmkit.layers.latent_cost import Prompt


@dataclass(frozen=True)
class Prompts:
    """The chunks of a step that are computed over plain heads, and the others."""

    chunks: tuple[Prompt, ...]
    starts: Tensor  # int32 [chunks, 2]: 0 and the chunk's tokens, the query_start of a batch of the chunk alone
    block: Tensor  # int32 [1, 1], 0: such a batch's block table
    rows: Tensor | None  # int64: rows of the step's other sequences; None: there are none
    geometries: tuple[BatchGeometry, ...]  # of the other sequences, for each KV group

    @classmethod
    def of(cls, chunks: Sequence[Prompt], query_start: list[int], geometries: tuple[BatchGeometry, ...]) -> Self:
        """`query_start` are the numbers of the geometries, which may be on a GPU."""
        device = geometries[0].query_start.device

        def moved(numbers: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).to(device)

        starts, block = moved([[0, chunk.tokens] for chunk in chunks]), moved([[0]])
        of_chunks = {chunk.sequence for chunk in chunks}
        others = [b for b in range(len(query_start) - 1) if b not in of_chunks]
        rows = [row for b in others for row in range(query_start[b], query_start[b + 1])]
        if not rows:
            return cls(tuple(chunks), starts, block, None, ())
        start = [0]
        for b in others:
            start.append(start[-1] + query_start[b + 1] - query_start[b])
        start_of_others, which = moved(start), moved(others, torch.int64)
        return cls(
            tuple(chunks),
            starts,
            block,
            moved(rows, torch.int64),
            tuple(
                BatchGeometry(start_of_others, whole.context_lens[which], whole.block_tables[which], whole.slots)
                for whole in geometries
            ),
        )
