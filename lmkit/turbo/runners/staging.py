"""Staging of a step's inputs for a GPU: they are packed into one piece of pinned memory and moved by one copy.

    token_ids | logit_rows | positions | slots | query_start | logit_start | context_lens | rope_lens | chosen
    | adapters | logit_adapters | states | tables

Slots and block tables are those of every KV group, one after the other. `chosen` has the batch slot of each logit row
whose token a captured step chooses, else -1. Adapters are those of a step in which a row has one. States are
those of a model that has some.

Every step's inputs go to the same buffer on the device. Each field follows the one before and starts at a multiple of
ALIGN bytes. Steps of one shape therefore have their inputs at the same addresses, where a captured graph finds them.
The host is ahead of the device, so it takes turns with several pinned pieces, and waits for a piece that is still being
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import ROW_FIELDS
from lmkit.layers.batch import BatchInputs
from lmkit.turbo.runners.captured_sizes import Size
from lmkit.turbo.runners.device import Event
from lmkit.turbo.runners.gpu import Gpu

NUM_STAGED = 4  # pieces: two steps are under way, one is being written
ALIGN = 256  # bytes; the alignment that kernels may expect of an allocation
MISSING = {"adapters": np.empty(0, np.int32), "logit_adapters": np.empty(0, np.int32),
           "states": np.empty((0, ROW_FIELDS), np.int32)}  # fmt: skip
LONG = ("token_ids", "logit_rows")  # int64, the others int32


class _Field(NamedTuple):
    name: str
    shape: tuple[int, ...]
    start: int
    end: int  # bytes


@lru_cache(1024)  # more than there are captured sizes
def _layout(
    num_tokens: int,
    num_seqs: int,
    num_rows: int,
    num_sampled: int,
    width: int,
    num_groups: int,
    *,
    adapted: bool,
    has_states: bool,
) -> list[_Field]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (num_tokens,),
        "logit_rows": (num_rows,),
        "positions": (num_tokens,),
        **{f"slots.{g}": (num_tokens,) for g in range(num_groups)},
        "query_start": (num_seqs + 1,),
        "logit_start": (num_sampled + 1,),
        "context_lens": (num_seqs,),
        "rope_lens": (num_seqs,),
        "chosen": (num_rows,),
        **({"adapters": (num_tokens,), "logit_adapters": (num_rows,)} if adapted else {}),
        **({"states": (num_seqs, ROW_FIELDS)} if has_states else {}),
        **{f"block_tables.{g}": (num_seqs, width) for g in range(num_groups)},
    }
    fields, start = [], 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * (8 if name in LONG else 4)
        fields.append(_Field(name, shape, start, end))
        start = -(-end // ALIGN) * ALIGN
    return fields


class _Piece:
    """Pinned memory, and the event after the last copy from it."""

    def __init__(self, device: Gpu, num_bytes: int) -> None:
        self.memory = device.staging(num_bytes)
        self.array = self.memory.numpy()
        self.copied: Event = device.event()
        self.is_used = False


class StagedInputs:
    """Copies the persistent batch's inputs to the device. `max_seqs` includes sequences that pad a step. `chosen` is
    that field of the inputs copied last."""

    def __init__(
        self,
        device: Gpu,
        max_tokens: int,
        max_seqs: int,
        width: int,
        num_groups: int = 1,
        *,
        has_states: bool = False,
    ) -> None:
        self._num_groups, self._has_states = num_groups, has_states
        fields = _layout(
            max_tokens, max_seqs, max_tokens, max_seqs, width, num_groups, adapted=True, has_states=has_states
        )
        num_bytes = fields[-1].end
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device.tensors)
        self._pieces = [_Piece(device, num_bytes) for _ in range(NUM_STAGED)]
        self._turn = 0
        # Block tables on the device: sequences, sequences with padding, columns, whether adapters stand before them.
        self._last = (0, 0, 0, False)

    def put(
        self,
        inputs: BatchInputs,
        pad_to: Size | None = None,
        *,
        width: int = 0,
        keeps_tables: bool = False,
        chosen: Sequence[int] = (),
    ) -> BatchInputs:
        """As `copy`. The result is valid up to the next call's place in the stream."""
        return self._views(self.copy(inputs, pad_to, width=width, keeps_tables=keeps_tables, chosen=chosen))

    def copy(
        self,
        inputs: BatchInputs,
        pad_to: Size | None = None,
        *,
        width: int = 0,
        keeps_tables: bool = False,
        chosen: Sequence[int] = (),
    ) -> list[_Field]:
        """Copy `inputs` from the CPU to the device, where a captured step of that size finds them.

        pad_to: the step is padded to that size, and block tables to `width` columns. The added tokens belong to no
        sequence or to one without context, and write nothing.
        keeps_tables: the block tables are the same as in the last call.
        chosen: the batch slots of the logit rows, if the step chooses their tokens.
        """
        num_seqs, used = inputs.geometries[0].block_tables.shape
        num_tokens, num_rows, num_sampled = len(inputs.token_ids), len(inputs.logit_rows), len(inputs.logit_start) - 1
        padded, width = num_seqs, max(width, used)
        adapted = inputs.adapters is not None
        if pad_to is not None:
            num_tokens, padded, adapted, _ = pad_to
            num_rows, num_sampled = pad_to.rows, padded
        fields = _layout(
            num_tokens, padded, num_rows, num_sampled, width, self._num_groups,
            adapted=adapted, has_states=self._has_states,
        )  # fmt: skip
        piece = self._next_piece()
        shape = num_seqs, padded, width, adapted
        is_kept = keeps_tables and shape == self._last
        staged = fields[: -self._num_groups] if is_kept else fields
        tensors = MISSING | inputs.arrays | {"chosen": np.array(chosen, np.int32)}
        for field in staged:
            view = piece.array[field.start : field.end].view(np.int64 if field.name in LONG else np.int32)
            values, flat = tensors[field.name], view.reshape(field.shape)
            if values.ndim == 2 and values.shape[1] < flat.shape[1]:
                flat[:] = 0
                flat[: len(values), : values.shape[1]] = values
                continue
            flat[: len(values)] = values
            if len(values) < len(flat):
                _pad(field.name, flat, values, pad_to or Size(num_tokens, padded))
        end = staged[-1].end
        self._memory[:end].copy_(piece.memory[:end], non_blocking=True)
        piece.copied.record()
        self._last = shape
        return fields

    def _next_piece(self) -> _Piece:
        piece = self._pieces[self._turn % NUM_STAGED]
        self._turn += 1
        if piece.is_used:
            piece.copied.synchronize()
        piece.is_used = True
        return piece

    def _views(self, fields: list[_Field]) -> BatchInputs:
        views: dict[str, Tensor] = {}
        for name, shape, start, end in fields:
            dtype = torch.int64 if name in LONG else torch.int32
            views[name] = self._memory[start:end].view(dtype).view(shape)
        self.chosen = views.pop("chosen")
        return BatchInputs.of(views, self._num_groups)

    def padding(self, size: Size, width: int) -> BatchInputs:
        """A step of nothing but padding. Graphs are captured with it."""
        one, start = torch.zeros(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
        nothing = BatchInputs(
            token_ids=torch.zeros(1, dtype=torch.int64),
            positions=one,
            geometries=self._num_groups
            * (
                BatchGeometry(
                    query_start=start,
                    context_lens=one,
                    block_tables=torch.zeros(1, width, dtype=torch.int32),
                    slots=one - 1,
                ),
            ),
            rope_lens=one,
            logit_rows=torch.zeros(1, dtype=torch.int64),
            logit_start=start,
        )
        return self.put(nothing, size)


def _pad(name: str, flat: np.ndarray, values: np.ndarray, size: Size) -> None:
    """Fill what follows `values` in `flat`. In a decode step, token and logit row s belong to sequence s. In another
    step the added sequences have no tokens, and the added logit rows are computed from the first token: one for each
    of these sequences, or none if sequences have drafts."""
    count = len(values)
    if name.startswith("slots.") or name in ("chosen", "adapters", "logit_adapters", "states"):
        flat[count:] = -1
    elif (name == "logit_start" and not size.drafted) or (size.is_decode and name in ("logit_rows", "query_start")):
        flat[count:] = np.arange(count, len(flat))
    else:
        flat[count:] = values[-1] if name in ("query_start", "logit_start") else 0
