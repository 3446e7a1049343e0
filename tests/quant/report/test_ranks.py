"""Processes that share an evaluation: how one of them ended is said."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from lmkit.errors import EngineLostError
from lmkit.quant.report.ranks import others


def end(rank: int, shared: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def evaluated(spec: Any) -> None:
    with others(end, 2, 4, spec) as shared:
        while not shared.is_lost:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("kills", "said"),
    [(1, "process 1 was killed by the kernel for lack of memory; use fewer"), (0, "process 1 was ended by SIGKILL")],
)
def test_a_rank_that_ends_is_named(monkeypatch: pytest.MonkeyPatch, kills: int, said: str) -> None:
    counts = chain([0], repeat(kills))  # before the process starts, and then
    monkeypatch.setattr("lmkit.ended._kills", lambda root: next(counts))
    spec: Any = SimpleNamespace(hidden_size=8, vocab_size=16)
    with pytest.raises(EngineLostError, match=said):
        evaluated(spec)
