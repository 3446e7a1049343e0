"""The files of the chat page: who gets them, and what a browser may do with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.web.chat_page import FOLDER
from tests.cli.commands import mistake
from tests.proxy.fakes import FakeNode, nodes, proxy_for
from tests.serve.in_process import App, StubEngine

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PATHS = ["/", *(f"/page/{path.name}" for path in FOLDER.iterdir() if path.name != "index.html")]


def get(path: str, *, method: str = "GET", headers: dict[str, str] = BROWSER, **config: Any) -> httpx.Response:
    return App(StubEngine(), ServerConfig(**config)).request(method, path, headers=headers)


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_gets_the_page_without_a_key_and_nothing_of_it_may_run_elsewhere(path: str) -> None:
    answer = get(path, api_keys=("secret",))
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["img-src"] == "'self' data:"  # images that are attached
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/html"}
    assert answer.headers["content-type"].startswith(kinds[Path(path).suffix])


def test_a_program_gets_the_routes_with_a_key() -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert get("/", headers=accept, api_keys=("secret",)).status_code == 401
        answer = get("/", headers={**accept, "authorization": "Bearer secret"}, api_keys=("secret",))
        assert "GET /health" in answer.json()["routes"]


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/index.html", "/page/../main.js", "/page/main.jsx", "//page/main.js"]
)
def test_only_the_exact_paths_are_open(path: str) -> None:
    assert get(path, api_keys=("secret",)).status_code == 401


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
def test_other_methods_go_on_to_the_server(method: str) -> None:
    assert get("/page/main.js", method=method, api_keys=("secret",)).status_code == 401


def test_a_page_that_the_browser_has_is_not_sent_again() -> None:
    tag = get("/page/main.js").headers["etag"]
    again = get("/page/main.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"]


def test_it_can_be_switched_off() -> None:
    assert "GET /health" in get("/", chat_page=False).json()["routes"]
    assert get("/page/main.js", chat_page=False).status_code == 404
    assert "use --no-chat-page" in mistake("serve", "demo", "--no-webui")


@pytest.mark.anyio
@pytest.mark.parametrize("on", [True, False])
async def test_the_proxy_has_it_too(on: bool) -> None:
    async with (
        nodes(FakeNode()) as (node,),
        proxy_for(node, api_keys=("secret",), chat_page=on) as (_, url),
        httpx.AsyncClient(base_url=url) as client,
    ):
        page = await client.get("/", headers=BROWSER)
        assert page.status_code == (200 if on else 401)
        assert ("Content-Security-Policy" in page.headers) is on
        assert (await client.get("/page/main.js")).status_code == (200 if on else 401)
        assert (await client.get("/", headers={"accept": "*/*"})).status_code == 401
        listed = await client.get("/", headers={"authorization": "Bearer secret"})
        assert "GET /health" in listed.json()["routes"]


def test_no_file_makes_markup_of_text_or_names_another_site() -> None:
    """The browser's tests show what happens. This one names the line that would change it."""
    wrong = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc")
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not wrong.search(text), path
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w[\w.]+", text), path
        assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src)", text), path
        assert len(text.splitlines()) <= 400, path
