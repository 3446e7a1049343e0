from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve.live import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server without keys and with the default limits."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
