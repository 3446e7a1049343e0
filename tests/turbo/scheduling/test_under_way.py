"""The index of prompts under way against a comparison with each of them."""

from __future__ import annotations

import random
from array import array

from lmkit.turbo.scheduling.under_way import PromptsUnderWay
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import request


def sequence(rng: random.Random, known: list[list[int]]) -> Sequence:
    tokens = [rng.choice([1, 2, 256, 1 << 24]) for _ in range(rng.randint(1, 6))]
    if known and rng.random() < 0.8:
        prefix = rng.choice(known)
        tokens = prefix[: rng.randint(0, len(prefix))] + tokens[: rng.randint(1, 6)]
    known.append(tokens)
    seq = Sequence(request("x", tokens), 0, 0.0, 0.0, array("i", tokens), 100, ())
    seq.num_completed = rng.choice([0, 0, rng.randint(0, len(tokens))])
    return seq


def common(seq: Sequence, other: Sequence) -> int:
    pairs = zip(seq.token_ids[:-1], other.request.prompt_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(seq.num_tokens - 1, other.num_prompt_tokens))


def test_the_index_finds_what_a_comparison_with_each_finds() -> None:
    rng = random.Random(0)
    known: list[list[int]] = []
    found = 0
    for _ in range(400):
        spaces = [("a", ""), ("b", "")]
        first = [(rng.choice(spaces), sequence(rng, known)) for _ in range(rng.randint(0, 9))]
        later = [(rng.choice(spaces), sequence(rng, known)) for _ in range(rng.randint(0, 9))]
        index = PromptsUnderWay(first)
        for namespace, seq in later:
            index.add(namespace, seq)
        for namespace in spaces:
            seq, least = sequence(rng, known), rng.randint(1, 8)
            others = [
                other for space, other in first + later
                if space == namespace and other.num_completed < other.num_prompt_tokens
            ]  # fmt: skip
            assert (namespace in index) == bool(others)
            wanted = any(common(seq, other) >= max(least, other.num_completed + 1) for other in others)
            assert index.will_compute(namespace, seq, least) == wanted
            found += wanted
    assert 40 < found < 700
