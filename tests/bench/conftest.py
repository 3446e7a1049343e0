"""A server without a model, one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.fake_server import FakeServer


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.reset()
    return running
