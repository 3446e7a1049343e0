"""A seeded trace of mixed requests, and the prompt tokens of it that an infinite cache would find."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

VOCAB = 50_000
Tokens = np.ndarray  # int32 [n]


@dataclass(frozen=True)
class Item:
    """A request, its answer, and the index of the item that must be answered before it."""

    prompt: Tokens
    answer: Tokens
    after: int | None = None


@dataclass(frozen=True)
class Mix:
    """The number of requests of each kind. Lengths are log-normal around a middle, with a spread of e^0.5."""

    chats: int = 150  # of 2 to 10 turns: system prompt, then user 60 and answer 60 tokens in turn
    few_shot: int = 600  # template of 1500 tokens, question of 60, answer of 12
    single: int = 400  # system prompt, text of 200, answer of 60
    one_off: int = 300  # text of 600, answer of 60
    systems: int = 8  # prompts of 600 tokens; the n-th most popular is used in proportion to 1 / n
    templates: int = 8  # likewise; every second one begins with half of the one before it
    pause: float = 0.02  # mean time between a chat's turns, as a share of the trace's whole time


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def text(self, middle: int) -> Tokens:
        length = max(1, int(middle * self.random.lognormal(0, 0.5)))
        return self.random.integers(2, VOCAB, length, dtype=np.int32)

    def popular(self, texts: list[Tokens]) -> Tokens:
        weights = 1 / np.arange(1, len(texts) + 1)
        return texts[self.random.choice(len(texts), p=weights / weights.sum())]


def make_trace(mix: Mix, seed: int = 0) -> list[Item]:
    """Items in the order in which they arrive."""
    make = _Maker(seed)
    systems = [make.text(600) for _ in range(mix.systems)]
    templates: list[Tokens] = []
    for index in range(mix.templates):
        shared = templates[-1][: len(templates[-1]) // 2] if index % 2 else np.zeros(0, np.int32)
        templates.append(np.concatenate([shared, make.text(1500 - len(shared))]))
    # (time, unique id, item without its `after`, id of the item before)
    timed: list[tuple[float, int, Tokens, Tokens, int | None]] = []

    def add(time: float, prompt: Tokens, answer: Tokens, after: int | None = None) -> int:
        timed.append((time, len(timed), prompt, answer, after))
        return len(timed) - 1

    for _ in range(mix.few_shot):
        add(make.random.random(), np.concatenate([make.popular(templates), make.text(60)]), make.text(12))
    for _ in range(mix.single):
        add(make.random.random(), np.concatenate([make.popular(systems), make.text(200)]), make.text(60))
    for _ in range(mix.one_off):
        add(make.random.random(), make.text(600), make.text(60))
    for _ in range(mix.chats):
        time, history, last = make.random.random(), make.popular(systems), None
        for _ in range(make.random.integers(2, 11)):
            prompt, answer = np.concatenate([history, make.text(60)]), make.text(60)
            last = add(time, prompt, answer, last)
            history = np.concatenate([prompt, answer])
            time += make.random.exponential(mix.pause)
    timed.sort(key=lambda entry: entry[0])
    place = {entry[1]: index for index, entry in enumerate(timed)}
    return [Item(prompt, answer, None if after is None else place[after]) for _, _, prompt, answer, after in timed]


class InfiniteCache:
    """All sequences so far, sorted. The longest common prefix with any of them is shared with one of the two
    neighbours."""

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def match(self, tokens: Tokens) -> int:
        """The length of the longest prefix of `tokens` with which a known sequence begins as well."""
        key = _sortable(tokens)
        index = bisect.bisect(self._known, key)
        return max((_common(key, other) // 4 for other in self._known[max(index - 1, 0) : index + 1]), default=0)

    def insert(self, tokens: Tokens) -> None:
        bisect.insort(self._known, _sortable(tokens))


def ideal_hits(trace: list[Item]) -> list[int]:
    """Prompt tokens of each item whose KV is known if all items before it are answered and nothing is ever evicted.

    The last prompt token is always computed, for the logits of the next token. An answer's last token is never
    computed.
    """
    cache, hits = InfiniteCache(), list[int]()
    for item in trace:
        hits.append(min(cache.match(item.prompt), len(item.prompt) - 1))
        cache.insert(np.concatenate([item.prompt, item.answer[:-1]]))
    return hits


def distinct_blocks(trace: list[Item], block_size: int) -> int:
    """KV blocks that the trace fills, each prefix counted once."""
    cache, tokens = InfiniteCache(), 0
    for item in trace:
        sequence = np.concatenate([item.prompt, item.answer[:-1]])
        tokens += len(sequence) - cache.match(sequence)
        cache.insert(sequence)
    return tokens // block_size


def _sortable(tokens: Tokens) -> bytes:
    """Bytes in the order of the tokens."""
    return tokens.astype(">u4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
