"""The inputs of one forward pass besides the weights: the batch's geometry and each layer's KV blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.devices import holding
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kv_dtype import KVDtype
from lmkit.layers.blocks.state import Memory, PagedKV, Recurrent, State
from lmkit.layers.prompts import Prompts

ALIGNMENT = 64  # of KV blocks: a cache line


Queries = tuple[slice, BatchGeometry, AttentionSpec]


Alone = tuple[Tensor, BatchGeometry, AttentionSpec]  # rows, each the last query of a sequence of its own


class Together(NamedTuple):
    """Rows of a step whose tokens see each other: an image's, or those of its end. Each sees the keys up to the last
    one's. Its window begins where that of a causal query does."""

    sequence: int  # its place in the step
    rows: range
    position: int  # of the first row

    def alone(self, geometry: BatchGeometry, scores: AttentionSpec) -> Iterator[Alone]:
        """The rows by how they see their keys."""
        count = len(self.rows)
        own = geometry.block_tables[[self.sequence] * count]
        of_rows = torch.arange(count, dtype=torch.int32, device=own.device)
        ends = torch.full_like(of_rows, self.position + count)
        for rows, apart, wide in _alone(replace(geometry, block_tables=own), of_rows + self.position, ends, scores):
            yield rows + self.rows.start, apart, wide


def _alone(geometry: BatchGeometry, positions: Tensor, ends: Tensor, scores: AttentionSpec) -> Iterator[Alone]:
    """Rows at `positions` int32 [n], with a block table each, that see the keys up to before `ends` int32 [n]. Windows
    that begin after the first key make them differ."""
    past = positions >= scores.window if scores.window else torch.zeros_like(positions, dtype=torch.bool)
    windows = torch.where(past, ends - 1 - positions + scores.window, 0)
    for window in windows.unique().tolist():
        rows = (windows == window).nonzero()[:, 0]
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        tables = geometry.block_tables[rows]
        yield (
            rows,
            replace(geometry, query_start=starts, context_lens=ends[rows], block_tables=tables),
            replace(scores, window=window),
        )


@dataclass
class Choice:
    """The keys that the last indexer of a step has chosen for each row. Later layers may see the same ones."""

    seen: BatchGeometry | None = None  # rows are sequences of their own, whose blocks are single tokens


@dataclass(frozen=True)
class BatchInputs:
    """One step: B sequences bring T new tokens in all. Nothing distinguishes prefill from decode."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    geometries: tuple[BatchGeometry, ...]  # one for each KV group (models.kv_layout); they differ in tables and slots
    rope_lens: Tensor  # int32 [B], the length that fixes a sequence's dynamic-NTK base for good: its prompt's
    logit_rows: Tensor  # int64 [R], the rows whose logits are wanted: the last of each of the first S sequences
    logit_start: Tensor  # int32 [S + 1]: entries logit_start[s] .. logit_start[s + 1] of these belong to sequence s
    adapters: Tensor | None = None  # int32 [T]: each row's adapter, -1 = none; None if no row has one
    logit_adapters: Tensor | None = None  # int32 [R]: those of the logit rows
    states: Tensor | None = None  # int32 [B, 6]: see kernels.recurrent; None = sequence b begins in row b
    # float32 [T, ModelSpec.token_width], which the decoder makes: vectors of layers.per_layer, or embeddings
    per_layer: Tensor | None = None
    prompts: Prompts | None = None  # chunks that latent attention computes over plain heads
    choice: Choice = field(default_factory=Choice)  # of the step's last indexer
    # Of a step with tokens of images:
    places: Tensor | None = None  # int32 [3, T]: places in time, height and width, for M-RoPE
    image_rows: Tensor | None = None  # int64 [I]: rows of tokens of images
    image_values: Tensor | None = None  # float32 [I, hidden * (1 + deep layers)]: in place of embeddings, then for them
    together: tuple[Together, ...] = ()  # of images whose tokens see each other
    sees_all: bool = False  # see `seeing_all`
    memory: BatchGeometry | None = None  # each token as a sequence of its own, over the memory of its slot

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], num_groups: int) -> BatchInputs:
        """A batch from `tensors`, named as the property `tensors` names them."""
        shared: dict[str, Any] = {name: x for name, x in tensors.items() if "." not in name}
        geometry = {name: shared.pop(name) for name in ("query_start", "context_lens")}
        return cls(
            geometries=tuple(
                BatchGeometry(**geometry, block_tables=tensors[f"block_tables.{g}"], slots=tensors[f"slots.{g}"])
                for g in range(num_groups)
            ),
            **shared,
        )

    @property
    def state_rows(self) -> Tensor:
        """`states`, or those of a step whose sequence b begins in row b."""
        if self.states is not None:
            return self.states
        fresh = [[b, -1, -1, 0, 0, 0] for b in range(len(self.rope_lens))]
        return torch.tensor(fresh, dtype=torch.int32).to(self.rope_lens.device)

    @property
    def wants_all(self) -> bool:
        """Whether the logits of every token are wanted."""
        return len(self.logit_rows) == len(self.token_ids)

    def logit_geometry(self, group: int) -> BatchGeometry:
        """The geometry of the logit rows alone in a KV group. Its `slots` are those of all tokens."""
        whole, num_seqs = self.geometries[group], len(self.logit_start) - 1
        lens, tables = whole.context_lens[:num_seqs], whole.block_tables[:num_seqs]
        return replace(whole, query_start=self.logit_start, context_lens=lens, block_tables=tables)

    def is_causal(self, scores: AttentionSpec) -> bool:
        """Whether every row sees the keys that its geometry says. Otherwise see `alone`."""
        return not (self.together or (self.sees_all and scores.window))

    def alone(self, group: int, scores: AttentionSpec) -> Iterator[Alone]:
        """The rows that see other keys. Those of whole texts have windows on both sides: each sees as many later
        keys."""
        geometry = self.geometries[group]
        if self.sees_all and scores.window:
            ends = torch.minimum(self.positions + scores.window, geometry.context_lens)
            yield from _alone(geometry, self.positions, ends, scores)
        for together in self.together:
            yield from together.alone(geometry, scores)

    def seeing_all(self) -> BatchInputs:
        """The same step in which each token sees all tokens of its sequence, which the step computes as a whole: it is
        the last query of a sequence of its own, with the same blocks."""
        starts = self.geometries[0].query_start
        rows = torch.arange(len(self.token_ids) + 1, dtype=starts.dtype, device=starts.device)
        owner = torch.searchsorted(starts[1:], rows[:-1], right=True).clamp_(max=len(starts) - 2)
        return replace(
            self,
            sees_all=True,
            geometries=tuple(
                replace(g, query_start=rows, context_lens=g.context_lens[owner], block_tables=g.block_tables[owner])
                for g in self.geometries
            ),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name. The names of a KV group's own tensors end in the group's number."""
        first = self.geometries[0]
        named = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        named |= {"query_start": first.query_start, "context_lens": first.context_lens}
        for g, geometry in enumerate(self.geometries):
            named |= {f"slots.{g}": geometry.slots, f"block_tables.{g}": geometry.block_tables}
        return named

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """`tensors` of the host as arrays over the same memory. A step's inputs may be those of many steps."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}


class Projected(NamedTuple):
    """What attention reads of a step's tokens: q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], before
    RoPE, and what its output is gated with, [T, num_heads * head_dim]. Linear attention has all of its inputs in q."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None = None


@dataclass(frozen=True)
class KVLayer:
    """Blocked keys and values of one layer; K and V may be stored in different types.

    Layers of different KV groups may share the same tensors. Their blocks are different.
    """

    k: KVTensor
    v: KVTensor
    group: int = 0
    states: RecurrentStates | None = None  # of a recurrent block
    index: KVTensor | None = None  # the keys of an indexer, of one head
    memory: KVLayer | None = None  # of an encoder's states: blocks for each slot (blocks.state.Memory)

    @property
    def storages(self) -> tuple[KVTensor, ...]:
        """Both, or the one that is both: a row of latent attention; then the keys of an indexer."""
        own = (self.k,) if self.v.data is self.k.data else (self.k, self.v)
        return own if self.index is None else (*own, self.index)


def allocate_kv(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtypes: tuple[KVDtype, KVDtype],
    device: str = "cpu",
) -> KVLayer:
    """Zeroed blocks for one layer; `dtypes` are those of K and V."""

    def tensor(dtype: KVDtype) -> KVTensor:
        shape = (num_blocks, num_kv_heads, block_size)
        data = zeros((*shape, dtype.columns(head_dim)), getattr(torch, dtype.element), device)
        params = zeros((*shape, count) if (count := dtype.num_params(head_dim)) else (0,), torch.float16, device)
        return KVTensor(data, params, dtype)

    return KVLayer(tensor(dtypes[0]), tensor(dtypes[1]))


def allocate_memory(
    memory: Memory, num_slots: int, block_size: int, dtypes: tuple[KVDtype, KVDtype], device: str = "cpu"
) -> KVLayer:
    """Zeroed blocks for an encoder's states in each slot, one slot after the other."""
    num_blocks = num_slots * memory.blocks(block_size)
    return allocate_kv(num_blocks, memory.num_heads, block_size, memory.head_dim, dtypes, device)


def allocate_states(
    state: Recurrent, num_states: int, num_draft_tokens: tuple[int, int] = (0, 0), device: str = "cpu"
) -> RecurrentStates:
    """Zeroed recurrent states of `num_states` sequences for one layer. `num_draft_tokens`: (slots, of each)."""
    shapes = (num_states, *state.window), (num_states, *state.matrix), (*num_draft_tokens, state.draft_width)
    return RecurrentStates(*(zeros(shape, torch.float32, device) for shape in shapes))


def allocate_state(
    state: State,
    num_blocks: int,
    block_size: int,
    dtypes: tuple[KVDtype, KVDtype],
    num_states: int,
    num_draft_tokens: tuple[int, int] = (0, 0),
    device: str = "cpu",
) -> KVLayer:
    """What one layer keeps of sequences, zeroed: `num_blocks` blocks of keys and values, `num_states` recurrent
    states (see allocate_states), or both."""
    if not isinstance(state, PagedKV):
        states = None if state is None else allocate_states(state, num_states, num_draft_tokens, device)
        return replace(allocate_kv(0, 1, block_size, 2, dtypes, device), states=states)
    kv = allocate_kv(num_blocks, state.num_heads, block_size, state.head_dim, dtypes, device)
    if state.index_dim:
        stored = state.index_dtype(dtypes[0])
        kv = replace(kv, index=allocate_kv(num_blocks, 1, block_size, state.index_dim, (stored, stored), device).k)
    if state.beside is not None:
        kv = replace(kv, states=allocate_states(state.beside, num_states, num_draft_tokens, device))
    return replace(kv, v=kv.k) if state.shared else kv


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """torch.zeros. On a CPU numpy asks the system for huge pages. They arrive as zeros when they are first used."""
    if holding(device).own_memory:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    whole = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return torch.from_numpy(whole[start : start + num_bytes]).view(dtype).view(shape)


def whole_batch(rows: list[list[int]], block_size: int, device: str = "cpu") -> tuple[BatchInputs, int]:
    """(batch, blocks needed) for whole sequences from position 0 in consecutive blocks, with the logits of every token.

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
        geometries=(BatchGeometry(start.to(device), lens.to(device), tables.to(device), torch.cat(slots).to(device)),),
        rope_lens=lens.to(device),
        logit_rows=torch.arange(int(lens.sum())).to(device),
        logit_start=start.to(device),
    )
    return batch, next_block
