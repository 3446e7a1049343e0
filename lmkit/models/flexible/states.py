"""What transformers keeps of sequences in caches of its own, by the rows of kernels.recurrent, and its snapshots."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.kernels.ops import BatchGeometry
from lmkit.layers.batch import BatchInputs
from lmkit.models.flexible.caches import Store, paged_cache
from lmkit.models.flexible.trace import Trace


@dataclass(frozen=True)
class Part:
    """Tokens of a step that one pass computes: of all its sequences, or of one."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    geometries: tuple[BatchGeometry, ...]
    past: int = 0  # tokens of the sequence before these
    adapters: Tensor | None = None  # int32 [T], see AdapterRows
    # Of a step with tokens of images:
    embeddings: Tensor | None = None  # float32 [T, hidden * (1 + deep layers)], see BatchInputs.image_values
    is_image: Tensor | None = None  # bool [T]
    places: Tensor | None = None  # int32 [3, T]

    @classmethod
    def whole(cls, batch: BatchInputs, embeddings: Tensor | None) -> Part:
        """All tokens of a step. With tokens of images it has the `embeddings` of all."""
        part = cls(batch.token_ids, batch.positions, batch.geometries, adapters=batch.adapters)
        if batch.image_rows is None:
            return part
        is_image = torch.zeros(len(batch.token_ids), dtype=torch.bool)
        is_image[batch.image_rows] = True
        return replace(part, embeddings=embeddings, is_image=is_image, places=batch.places)

    @classmethod
    def sequences(cls, batch: BatchInputs, embeddings: Tensor | None) -> Iterator[Part]:
        """A part for each sequence of a step."""
        whole, lens = cls.whole(batch, embeddings), batch.geometries[0].context_lens.tolist()
        starts = batch.geometries[0].query_start.tolist()
        for index, (start, end) in enumerate(pairwise(starts)):
            tables = (replace(g, block_tables=g.block_tables[index : index + 1]) for g in batch.geometries)
            yield replace(whole, geometries=tuple(tables)).cut(start, end, max(0, lens[index] - (end - start)))

    def cut(self, start: int, end: int, past: int) -> Part:
        """Its tokens start .. end, after `past` others of their sequence."""
        count = end - start
        edges, length = torch.tensor([0, count], dtype=torch.int32), torch.tensor([past + count], dtype=torch.int32)
        geometries = tuple(
            replace(g, query_start=edges, context_lens=length, slots=g.slots[start:end]) for g in self.geometries
        )
        adapters = None if self.adapters is None else self.adapters[start:end]
        part = Part(self.token_ids[start:end], self.positions[start:end], geometries, past, adapters)
        if self.embeddings is None or self.is_image is None or not self.is_image[start:end].any():
            return part
        places = None if self.places is None else self.places[:, start:end]
        return replace(part, embeddings=self.embeddings[start:end], is_image=self.is_image[start:end], places=places)

    def after(self, first: Part) -> Part:
        """These tokens with those before them in one part."""
        slots = (
            replace(g, slots=torch.cat([h.slots, g.slots]))
            for h, g in zip(first.geometries, self.geometries, strict=True)
        )
        ids = torch.cat([first.token_ids, self.token_ids])
        adapters = None if self.adapters is None else self.adapters[:1].repeat(len(ids))  # a sequence has one
        whole = Part(ids, torch.cat([first.positions, self.positions]), tuple(slots), adapters=adapters)
        return whole.cut(0, len(ids), self.past - len(first.token_ids))

    def kept(self) -> Part:
        """The same in memory of its own: a step's is written anew by the next one."""
        slots = (replace(g, slots=g.slots.clone()) for g in self.geometries)
        return replace(
            self, token_ids=self.token_ids.clone(), positions=self.positions.clone(), geometries=tuple(slots)
        )


class OwnStates:
    """Caches by row, and the draft tokens of the step before by slot."""

    def __init__(self, module: nn.Module, seen: Trace, stored: Mapping[int, Store]) -> None:
        self._config, self._pages, self._stored = module.config, {call.layer for call in seen.calls}, stored
        self._rows: dict[int, Any] = {}
        self._drafts: dict[int, Part] = {}

    def fresh(self) -> Any:
        """The cache of a sequence of which nothing is computed. None: the module makes its own."""
        pages, stored = self._pages, self._stored
        return paged_cache(self._config, pages, stored) if pages or stored else None

    def take(self, row: int, slot: int) -> Any:
        """The state that a slot's sequence goes on from. Its own is changed in place, a snapshot is copied."""
        if row < 0 or row not in self._rows:
            return self.fresh()
        return self._rows[row] if row == slot else copy.deepcopy(self._rows[row])

    def put(self, row: int, cache: Any, *, copied: bool) -> None:
        """Keep a state in a row. `copied`: the pass goes on and changes it."""
        self._rows[row] = copy.deepcopy(cache) if copied else cache

    def accepted(self, slot: int, count: int) -> Part | None:
        """The first draft tokens of the step before, which the state takes first."""
        return self._drafts[slot].cut(0, count, 0) if count else None

    def draft(self, slot: int, part: Part) -> None:
        """Keep draft tokens, which are not known to be right."""
        self._drafts[slot] = part.kept()
