"""Tokens of each chunk: what the server says first, the tokenizer next."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.bench.counting import Chunk, bursts
from lmkit.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model)


def counted(chunks: list[Chunk], total: int | None = None, tokenizer: Tokenizer | None = None) -> tuple[list[int], str]:
    arrived, source = bursts(chunks, total, tokenizer)
    return [burst.num_tokens for burst in arrived], source


def test_the_servers_own_counts() -> None:
    ids = [Chunk(1, "a b", num_ids=2), Chunk(2, "", num_ids=1), Chunk(3, "c", num_ids=4, is_last=True)]
    assert counted(ids) == ([2, 1, 4], "token_ids")
    usage = [
        Chunk(1, "a", usage=2),
        Chunk(2, "b", usage=2),
        Chunk(3, "c", usage=5),
        Chunk(4, "", is_last=True, usage=6),
    ]
    assert counted(usage) == ([2, 3, 1], "usage")
    logprobs = [Chunk(1, "a", num_logprobs=1), Chunk(2, "b", num_logprobs=3)]
    assert counted(logprobs) == ([1, 3], "logprobs")


def test_a_chunk_without_a_token_is_no_burst() -> None:
    arrived, _ = bursts([Chunk(1, "a", usage=2), Chunk(2, "b", usage=2), Chunk(3, "c", usage=5)], None, None)
    assert [burst.time for burst in arrived] == [1, 3]


def test_the_tokenizer_splits_the_whole_text(tokenizer: Tokenizer) -> None:
    text = "def is_empty(self):\n    return not self._queue  # 日本\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in (1, 7, len(text) // 2):
        pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
        counts, source = counted([Chunk(i, piece) for i, piece in enumerate(pieces)], None, tokenizer)
        assert source == "tokenizer"
        assert sum(counts) == len(ids)
    one_by_one = [tokenizer.decode([i]) for i in tokenizer.encode("return self.name", add_special_tokens=False)]
    chunks = [Chunk(0, one_by_one[0]), Chunk(1, "".join(one_by_one[1:]))]
    assert counted(chunks, None, tokenizer)[0] == [1, len(one_by_one) - 1]


def test_the_end_token_came_with_the_last_chunk() -> None:
    chunks = [Chunk(1, "a"), Chunk(2, "b"), Chunk(3, "", is_last=True)]
    assert counted(chunks, total=3) == ([1, 1, 1], "chunks")
    assert counted([Chunk(1, "", is_last=True)], total=1) == ([1], "chunks")


@pytest.mark.parametrize("total", [4, 9, 10, 17])
def test_estimates_add_up_to_what_the_server_reports(total: int) -> None:
    chunks = [Chunk(i, "x") for i in range(4)] + [Chunk(4, "", is_last=True)]
    counts, source = counted(chunks, total)
    assert source == "chunks"
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    assert counts[0] >= 1


def test_fewer_tokens_than_chunks_still_begin_with_the_first() -> None:
    arrived, _ = bursts([Chunk(i, "x") for i in range(6)], 2, None)
    assert arrived[0].time == 0
    assert sum(burst.num_tokens for burst in arrived) == 2
