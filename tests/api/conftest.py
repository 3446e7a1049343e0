"""A pipeline of the demo model for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkit import Pipeline, pipeline


@pytest.fixture(scope="module")
def pipe(demo_model: Path) -> Iterator[Pipeline]:
    with pipeline(str(demo_model), dtype="float32", max_model_len=512, max_batch_size=8, max_queue=2) as opened:
        yield opened
    assert not opened.engine.has_work()
    opened.engine.check_integrity()
