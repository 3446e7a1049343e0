"""The first tokens of a loaded module, as lmkit computes them and as transformers does.

Two sequences of which one goes on in a chunk and one in a token: what mixes sequences, counts positions otherwise or
does not take a prompt in chunks is found at the start, and not in answers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.kernels.ops import BatchGeometry
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import BatchInputs
from lmkit.log import get_logger
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.flexible.module import foreign
from lmkit.models.kv_storage import KVStorage, allocate

log = get_logger(__name__)

LENGTHS = 70, 40  # of the sequences
CUTS = 33, 39  # the tokens that the first step computes
BLOCK = 128
TOLERANCE = 1e-3  # of a length of states
# The same if linears round their inputs, which then differ in steps. Wrong states are off by about 1.
ROUGH = 0.2
SHARE = 0.9  # of a step's states that may be off: experts chosen otherwise by a last bit


def checked(decoder: FlexibleDecoder) -> FlexibleDecoder:
    """The decoder, if it gives the states that transformers does. Raises UnsupportedError otherwise."""
    name = decoder.spec.architecture
    with foreign(name, "cannot compute its first tokens"), torch.inference_mode():
        rows = [[1 + i % (decoder.spec.vocab_size - 1) for i in range(7, 7 + n)] for n in LENGTHS]
        wanted = [decoder.plain(torch.tensor([row])) for row in rows]
        limit = limit_of(decoder)
        _check_head(decoder, rows[0], wanted[0], limit)
        error = _error(decoder, rows, wanted)
        if error >= TOLERANCE and not decoder.seen.packs:
            decoder.one_by_one = True
            single = _error(decoder, rows, wanted)
            decoder.one_by_one = single < error / 2
            error = min(error, single) if decoder.one_by_one else error
        if decoder.one_by_one:
            log.info("%s: transformers continues its states one token at a time: prompts are slow", name)
        if error < limit:
            return decoder
    raise UnsupportedError(f"{name}: with lmkit's attention its states are not those of transformers")


def limit_of(decoder: FlexibleDecoder) -> float:
    """How far states may be off."""
    return ROUGH if any(getattr(part, "rounds", False) for part in decoder.module.modules()) else TOLERANCE


def _check_head(decoder: FlexibleDecoder, row: list[int], states: Tensor, limit: float) -> None:
    """Raise UnsupportedError if logits are not those that transformers makes of the same tokens."""
    right = decoder.plain_logits(torch.tensor([row]))
    if difference(decoder.head(states, None), right) >= limit:
        name = decoder.spec.architecture
        raise UnsupportedError(f"{name}: transformers' head reads more than the states after the layers")


def _error(decoder: FlexibleDecoder, rows: list[list[int]], wanted: list[Tensor]) -> float:
    """How far states are off those wanted, of two steps: see `difference`."""
    spec = decoder.spec
    storages = [KVStorage(FLOAT32, FLOAT32)] * spec.num_layers
    kv = allocate(spec.layers, storages, len(rows), BLOCK, BLOCK, num_states=len(rows))
    kv = [kv[layer.index] for layer in decoder.layers]
    found = []
    for edges in (tuple((0, cut) for cut in CUTS), tuple(zip(CUTS, LENGTHS, strict=True))):
        states, _ = decoder.hidden(step(rows, edges), kv)
        found.append(
            difference(states, torch.cat([x[start:end] for x, (start, end) in zip(wanted, edges, strict=True)]))
        )
    log.debug("%s: errors of states: %s", spec.architecture, found)
    return max(found)


def difference(found: Tensor, right: Tensor) -> float:
    """By which part of its length a vector is off at most, but for SHARE of them; infinity for what is no number."""
    errors = (found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-9)
    return float(errors.nan_to_num(math.inf).quantile(SHARE, interpolation="higher"))


def step(rows: list[list[int]], edges: tuple[tuple[int, int], ...]) -> BatchInputs:
    """A step with the tokens start .. end of each row, whose block has its number."""
    counts = [end - start for start, end in edges]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    places = [(b, at) for b, (start, end) in enumerate(edges) for at in range(start, end)]
    lens = torch.tensor([end for _, end in edges], dtype=torch.int32)
    tables = torch.arange(len(rows), dtype=torch.int32)[:, None]
    slots = torch.tensor([b * BLOCK + at for b, at in places], dtype=torch.int32)
    return BatchInputs(
        token_ids=torch.tensor([rows[b][at] for b, at in places]),
        positions=torch.tensor([at for _, at in places], dtype=torch.int32),
        geometries=(BatchGeometry(starts, lens, tables, slots),),
        rope_lens=lens,
        logit_rows=starts[1:].long() - 1,
        logit_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        states=torch.tensor([[b, b if start else -1, -1, 0, 0, 0] for b, (start, _) in enumerate(edges)]).int(),
    )
