"""Sizes of captured steps. No torch: the memory plan counts them."""

from __future__ import annotations

from typing import NamedTuple

from lmkit.turbo.plan import CAPTURED_TOKENS, DRAFTED_TOKENS

MIXED_TOKENS = 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024  # larger steps take the GPU longer than the host
MIXED_SEQS = (8, 32, 128)
DRAFT_SEQS = (1, 4, 16, 64)


class Size(NamedTuple):
    """What a captured step is padded to. With one token for each sequence it is a decode step. A logit row of each
    sequence is computed, or of each token if sequences have drafts."""

    tokens: int
    seqs: int
    adapted: bool = False  # rows may have adapters
    drafted: bool = False

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.seqs

    @property
    def rows(self) -> int:
        """Logit rows."""
        return self.tokens if self.drafted else self.seqs


def decode_sizes(max_batch_size: int) -> list[Size]:
    """Sizes of decode steps, ascending: 1, 2, 4, multiples of 8, above 256 multiples of 64, and the largest batch."""
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, max_batch_size, 64)]
    return [Size(n, n) for n in (*(n for n in counts if n < max_batch_size), max_batch_size)]


def mixed_sizes(max_batch_size: int, max_tokens: int) -> list[Size]:
    """Sizes of steps with prompt tokens, ascending. Each has more tokens than sequences."""
    seqs = [count for count in MIXED_SEQS if count < max_batch_size] + [max_batch_size]
    assert max(MIXED_TOKENS) <= CAPTURED_TOKENS, "the memory plan has room for less"
    return [Size(tokens, count) for tokens in MIXED_TOKENS for count in seqs if count < tokens <= max_tokens]


def draft_sizes(max_batch_size: int, max_tokens: int, longest: int) -> list[Size]:
    """Sizes of steps with drafts of up to `longest` tokens, ascending. Tokens double up to the most that so many
    sequences can have."""
    counts = sorted({min(count, max_batch_size) for count in DRAFT_SEQS})
    most = min(DRAFTED_TOKENS, max_tokens)
    sizes = [
        Size(1 << power, count, drafted=True)
        for power in range(most.bit_length())
        for count in counts
        if count < 1 << power < 2 * count * (1 + longest)
    ]
    return sizes if longest else []
