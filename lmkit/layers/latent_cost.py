"""Chunks of prompts over plain keys and values of each head, where latent attention would compute them over the latent.

Over the latent (layers.latent), a query and a key cost 2 x row_dim multiply-adds a head, and nothing is made of the
context. Over plain heads they cost query_dim + v_head_dim, 3.6 times fewer for DeepSeek-V3, but the context's rows are
expanded first: a product with kv_b, and its result is written and read. That pays for many queries.
"""

from __future__ import annotations

from typing import NamedTuple

from lmkit.layers.blocks.latent import SCRATCH_BYTES, LatentSpec

# An H200's, per us: multiply-adds in attention over the latent and over plain heads, in the library, bytes of memory.
LATENT_RATE, PLAIN_RATE, LIBRARY_RATE, MEMORY_RATE = 0.9e8, 1.65e8, 3e8, 4.3e6
FIXED = 60.0  # us of a layer, by which plain heads have to be faster: several launches, and no captured step


class Prompt(NamedTuple):
    """A chunk: its sequence, its first row in the step, its tokens, and those of the sequence up to its end."""

    sequence: int
    start: int
    tokens: int
    length: int


def chunks_of(
    query_start: list[int], context_lens: list[int], spec: LatentSpec, num_heads: int, factor: float = 1.0
) -> list[Prompt]:
    """The chunks of a step that are faster over plain heads. `factor`: what these save, as a multiple of `gain`."""
    found = []
    for b, length in enumerate(context_lens):
        chunk = Prompt(b, query_start[b], query_start[b + 1] - query_start[b], length)
        pays = chunk.tokens > 1 and factor * gain(chunk.tokens, length, spec, num_heads) > FIXED
        if pays and heads_at_once(length, spec, num_heads):
            found.append(chunk)
    return found


def gain(tokens: int, length: int, spec: LatentSpec, num_heads: int) -> float:
    """The us of a layer that `tokens` queries after `length` - `tokens` keys are estimated to save over plain heads,
    without FIXED."""
    pairs = tokens * length - tokens * (tokens - 1) / 2
    part = spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)  # of kv_b, of a head
    width = spec.query_dim + spec.v_head_dim
    latent = 2 * pairs * spec.row_dim / LATENT_RATE + tokens * part / LIBRARY_RATE
    plain = pairs * width / PLAIN_RATE + length * (part / LIBRARY_RATE + 4 * width / MEMORY_RATE)
    return num_heads * (latent - plain)


def heads_at_once(length: int, spec: LatentSpec, num_heads: int) -> int:
    """The heads whose keys and values of a context fit into SCRATCH_BYTES beside the rows that they are made of."""
    left = SCRATCH_BYTES - 2 * length * spec.row_dim
    return max(0, min(num_heads, left // (2 * length * (spec.query_dim + spec.v_head_dim))))
