"""A conversation of 16 turns after a long system prompt, with and without the prefix cache."""

from __future__ import annotations

import random

from benchmarks.kv.common import Client, Row, Setting, Timing, checkpoint, geometric_mean, random_tokens
from benchmarks.random_llama import Shape

SHAPE = Shape(512, 2048, 2, 8, 2, 64, 8192, 16384)  # 16M parameters
TURNS, SYSTEM, USER, ANSWER = 16, 4096, 100, 150  # turns, and tokens
GOAL = 10.0


def cases(setting: Setting) -> list[Row]:
    """Time to first token without the cache, divided by the time with it: the geometric mean over all turns but the
    first.

    Both engines answer each turn, one after the other, and must agree.
    """
    turns, system = (3, 512) if setting.quick else (TURNS, SYSTEM)
    path, generator = checkpoint(setting, SHAPE), random.Random(0)
    clients = {
        cached: Client(path, prefix_cache=cached, max_batch_size=2, num_threads=setting.threads)
        for cached in (False, True)
    }
    history = random_tokens(generator, system, SHAPE.vocab)
    asked: list[dict[bool, Timing]] = []
    for turn in range(turns):
        history += random_tokens(generator, USER, SHAPE.vocab)
        order = sorted(clients, reverse=turn % 2 == 1)
        asked.append({cached: clients[cached].ask(history, ANSWER) for cached in order})
        if asked[-1][True].tokens != asked[-1][False].tokens:
            raise RuntimeError(f"turn {turn + 1}: the cache changed the answer")
        history += asked[-1][True].tokens
    return [row(asked)]


def row(asked: list[dict[bool, Timing]]) -> Row:
    """The row of a conversation, from the answers of each turn with and without the cache."""
    later = asked[1:]
    speedups = [turn[False].seconds / turn[True].seconds for turn in later]
    facts = {
        "turns": len(asked),
        "slowest": min(speedups),
        "ms_without": [round(1000 * turn[False].seconds, 2) for turn in asked],
        "ms_with": [round(1000 * turn[True].seconds, 2) for turn in asked],
        "cached_tokens": [turn[True].cached for turn in asked],
    }
    return Row("time to first token of a 16-turn chat", geometric_mean(speedups), GOAL, facts)
