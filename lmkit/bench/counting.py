"""The number of tokens in each chunk of a stream.

It is computed after the run, so that it does not slow the client down.

A server can report it in three ways. If it does not, the model's tokenizer splits the text; without a tokenizer, all
chunks count alike. Estimates are scaled to the total that the server reports at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lmkit.bench.metrics import Burst
from lmkit.text import Tokenizer

# token_ids, usage (cumulative, in each chunk) and logprobs are the server's own counts. The others are estimates.
CountSource = Literal["token_ids", "usage", "logprobs", "tokenizer", "chunks"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event with text, tokens or the end of the stream."""

    time: float
    text: str
    num_ids: int | None = None  # number of token_ids in it
    usage: int | None = None  # completion tokens so far, according to the chunk
    num_logprobs: int | None = None
    is_last: bool = False  # has the finish_reason


def bursts(chunks: Sequence[Chunk], total: int | None, tokenizer: Tokenizer | None) -> tuple[list[Burst], CountSource]:
    """The arrivals of the tokens. `total`: completion tokens that the server reported at the end, or None."""
    counts, source = _counts(chunks, total, tokenizer)
    return [Burst(c.time, n) for c, n in zip(chunks, counts, strict=True) if n > 0], source


def _counts(chunks: Sequence[Chunk], total: int | None, tokenizer: Tokenizer | None) -> tuple[list[int], CountSource]:
    texts = [chunk for chunk in chunks if chunk.text]
    if texts and all(chunk.num_ids is not None for chunk in texts):
        return [chunk.num_ids or 0 for chunk in chunks], "token_ids"
    if texts and all(chunk.usage is not None for chunk in texts):
        sums = list(accumulate((chunk.usage or 0 for chunk in chunks), max))
        return [after - before for before, after in zip([0, *sums], sums, strict=False)], "usage"
    if texts and all(chunk.num_logprobs is not None for chunk in texts):
        return [chunk.num_logprobs or 0 for chunk in chunks], "logprobs"
    if texts and tokenizer is not None:
        return _scaled(_split(chunks, tokenizer), chunks, total), "tokenizer"
    return _scaled([1 if chunk.text else 0 for chunk in chunks], chunks, total), "chunks"


def _split(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> list[int]:
    """Tokens of the whole text; each belongs to the chunk with its last character."""
    ends = list(accumulate(len(chunk.text) for chunk in chunks))
    encoding = tokenizer.backend.encode("".join(chunk.text for chunk in chunks), add_special_tokens=False)
    counts = [0] * len(chunks)
    for _, end in encoding.offsets:
        counts[bisect_left(ends, max(end, 1))] += 1
    return counts


def _scaled(counts: list[int], chunks: Sequence[Chunk], total: int | None) -> list[int]:
    """`counts` scaled to the sum `total`, rounded so that the first chunk with a token keeps at least one.

    If `total` is one more than the text's tokens, the additional token is the end-of-sequence token of the last
    chunk.
    """
    known = sum(counts)
    if total is None or total == known:
        return counts
    last = next((i for i, chunk in enumerate(chunks) if chunk.is_last), None)
    if last is not None and (total == known + 1 or known == 0):
        return [n + (total - known if i == last else 0) for i, n in enumerate(counts)]
    if known == 0:
        return counts
    sums = [-(-n * total // known) for n in accumulate(counts)]
    return [after - before for before, after in zip([0, *sums], sums, strict=False)]
