"""A headless Chromium. Tests that need it skip themselves where Playwright or the browser is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests are marked `anyio` and run on asyncio. The pytest plugin of anyio comes with httpx."""
    return "asyncio"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed with the module: while it is open, no event loop can be started beside Playwright's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()
