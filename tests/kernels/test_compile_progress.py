"""A kernel says that it is being compiled, and nothing when it is read from the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkit.kernels.cpu import jit


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {record.getMessage()}")

    handler, logger = Handler(), logging.getLogger("lmkit.kernels.cpu.jit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(jit._Progress, "count", 0)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def _nothing(number: int) -> None:
    pass


def _nothing_more(number: int) -> None:
    pass


def test_compiling_is_announced_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    jit.compiled("void(int64)", _nothing)
    jit.compiled("void(int64)", _nothing_more)
    first, *kernels = messages
    assert first.startswith("WARNING compiling kernels for")
    assert "once on this machine" in first
    assert [line.partition(" (")[0] for line in kernels] == [
        "INFO compiling kernel 1: _nothing", "INFO compiling kernel 2: _nothing_more",
    ]  # fmt: skip
    messages.clear()
    jit.compiled("void(int64)", _nothing)
    assert not messages
