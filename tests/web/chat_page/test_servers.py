"""The chat page of a real server, and of a proxy in front of it: they take every field that the page sends."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.live import ROOT, Server

VALUES = {
    "temperature": "0.5", "top_p": "0.9", "top_k": "20", "min_p": "0.1", "max_tokens": "24", "frequency_penalty": "0.5",
    "presence_penalty": "0.5", "repetition_penalty": "1.1", "seed": "0", "system": "be brief",
    "more": '{"stop": ["zzz"]}',
}  # fmt: skip


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[str]:
    with Server() as running:
        yield running.url


@pytest.fixture(scope="module")
def proxy(server: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lmkit", "proxy", "--port", "0", "--node", server]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"proxy on (\S+)", line)))
        yield found[1]
        process.terminate()


@pytest.mark.parametrize("where", ["server", "proxy"])
def test_every_setting_is_taken(browser: Any, where: str, request: pytest.FixtureRequest) -> None:
    page = browser.new_page()
    page.goto(request.getfixturevalue(where))
    page.wait_for_selector("#model:enabled")
    page.click("#settings-button")
    assert {field.get_attribute("name") for field in page.locator("#fields [name]").all()} == {*VALUES, "key"}
    for name, value in VALUES.items():
        page.fill(f"#field-{name}", value)
    page.keyboard.press("Escape")
    for count in (1, 2):
        page.fill("#prompt", "Hi")
        page.press("#prompt", "Enter")
        answer = page.locator("#messages > li.assistant").nth(count - 1)
        page.locator("#messages > li.assistant:not(.busy)").nth(count - 1).wait_for()
        assert answer.locator(".problem").inner_text() == ""
        assert "The quick brown fox" in answer.locator(".text").inner_text()
        assert answer.locator(".figures").inner_text().startswith("24 tokens · ")
        assert answer.locator(".figures").inner_text().endswith(" · length limit · demo")
    page.close()
