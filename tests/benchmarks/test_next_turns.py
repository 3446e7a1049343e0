"""The interval holds the mean, and a window has the same chats whenever it is asked for."""

from __future__ import annotations

import asyncio
import random

from benchmarks.next_turns import CHATS, interval, window


def test_the_interval_holds_the_mean() -> None:
    mean, low, high = interval([0.0, 0.2, -0.1, 0.1, 0.05], random.Random(0))
    assert low < mean < high
    assert interval([0.3] * 5, random.Random(0)) == (0.3, 0.3, 0.3)


def test_a_window_is_the_same_each_time() -> None:
    async def texts() -> list[str]:
        sent: list[str] = []

        async def send(text: str) -> None:
            sent.append(text)

        assert await window(send, 7, 1e6) >= 0
        return sent

    first, second = asyncio.run(texts()), asyncio.run(texts())
    assert sorted(first) == sorted(second)
    assert len(set(first)) == CHATS
