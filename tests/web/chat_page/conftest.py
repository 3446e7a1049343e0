"""The chat page in a browser, with scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.chat_page.scripted import Scripted, serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def url(scripted: Scripted) -> Iterator[str]:
    with serving(scripted.app) as address:
        yield address


@pytest.fixture
def page(browser: Any, url: str, scripted: Scripted) -> Iterator[Any]:
    """The open page of a new visitor. At the end, nothing may have failed or been asked of another site."""
    scripted.__init__()  # type: ignore[misc]
    context = browser.new_context(
        viewport={"width": 1000, "height": 700}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(10_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    for end in ("requestfinished", "requestfailed"):
        opened.on(end, lambda request: problems.append(request.url) if _is_foreign(request, url) else None)
    opened.goto(url)
    yield opened
    context.close()
    assert not problems


def _is_foreign(request: Any, url: str) -> bool:
    """Whether a request went to another site. One that the page's policy refused did not."""
    return not request.url.startswith((url, "blob:")) and request.failure != "csp"
