"""The dashboard of a proxy: its files, its stream of states, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest

from lmkit.proxy.app import Proxy
from lmkit.proxy.dashboard import MAX_WATCHERS, PAGE, figures
from tests.proxy.fakes import CHAT, Exchange, FakeNode, client, nodes, proxy_for

ADMIN = {"authorization": "Bearer admin-key"}
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
METRICS = """# HELP vllm:num_requests_running now
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:kv_cache_usage_perc{model_name="n"} 0.5
vllm:prefix_cache_queries_total{model_name="m"} 80
vllm:prefix_cache_hits_total{model_name="m"} 6e1
"""


async def answer(exchange: Exchange) -> None:
    if exchange.request.target == "/metrics":
        await exchange.reply(200, METRICS.encode(), ("content-type", "text/plain"))
    else:
        await exchange.reply(200, {"usage": {"prompt_tokens": 10, "completion_tokens": 5}})


def test_the_figures_of_a_node() -> None:
    assert figures(METRICS) == {"running": 3, "waiting": 2, "kv_use": 0.5, "queries": 80, "hits": 60}
    assert figures("vllm:num_requests_running nan-\nvllm:num_requests_waiting --\n") == {}


@pytest.mark.anyio
@pytest.mark.parametrize("on", [True, False])
async def test_its_files_are_open_and_its_figures_are_not(on: bool) -> None:
    async with proxy_for(admin_keys=("admin-key",), api_keys=("user",), dashboard=on) as (_, url), client(url) as http:
        page = await http.get("/dashboard", headers={"accept": "text/html"})
        assert page.status_code == (200 if on else 401)
        assert ("default-src 'none'" in page.headers.get("content-security-policy", "")) is on
        assert (await http.get("/dashboard", headers={"accept": "*/*"})).status_code == 401
        assert (await http.get("/dashboard/main.js")).status_code == (200 if on else 401)
        assert (await http.get("/dashboard/index.html")).status_code == 401
        assert (await http.get("/admin/events")).status_code == 401
        refused = await http.get("/admin/events", headers={"authorization": "Bearer user"})
        assert refused.status_code == 403


def test_no_file_makes_markup_of_text_or_names_another_site() -> None:
    wrong = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc")
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not wrong.search(text), path
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w[\w.]+", text), path
        assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src)", text), path


@pytest.mark.anyio
async def test_states_come_as_events_and_watchers_are_bounded() -> None:
    async with (
        nodes(FakeNode(script=answer)) as (node,),
        proxy_for(node, admin_keys=("admin-key",)) as (proxy, url),
        client(url) as http,
    ):
        await http.post(CHAT, json={"model": "m", "messages": []})
        async with http.stream("GET", "/admin/events", headers=ADMIN) as response:
            assert response.headers["content-type"] == "text/event-stream"
            line = await anext(response.aiter_lines())
        state = json.loads(line.removeprefix("data: "))
        assert state["nodes"][0]["figures"]["kv_use"] == 0.5
        assert state["models"] == [{"model": "m", "nodes": 1, "up": 1, "requests": 1, "failed": 0}]
        (decision,) = state["decisions"]
        assert (decision["model"], decision["node"], decision["candidates"]) == ("m", node.url, 1)
        assert decision["reason"]
        dashboard = proxy._dashboard
        async with asyncio.timeout(30):
            while dashboard._watchers:  # a client that left is noticed
                await asyncio.sleep(0.01)
        dashboard._watchers = MAX_WATCHERS
        assert (await http.get("/admin/events", headers=ADMIN)).status_code == 503
        dashboard._watchers = 0
        async with http.stream("GET", "/admin/events", headers=ADMIN) as response:
            proxy.draining = True  # an open dashboard does not hold up the end
            async with asyncio.timeout(30):
                await response.aread()


@dataclass
class Live:
    """A proxy with two nodes in a thread of its own."""

    url: str
    proxy: Proxy
    loop: asyncio.AbstractEventLoop
    ending: asyncio.Event

    def call(self, method: str, path: str, **options: Any) -> Any:
        return httpx.request(method, self.url + path, headers=ADMIN, trust_env=False, verify=False, **options).json()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = tmp_path_factory.mktemp("keys") / "keys.db"
    ready = Queue[Live]()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(store, ready)), daemon=True)
    thread.start()
    running = ready.get(timeout=30)
    yield running
    running.loop.call_soon_threadsafe(running.ending.set)
    thread.join(30)


async def _serve(store: Path, ready: Queue[Live]) -> None:
    fakes = FakeNode(models=("m", EVIL), script=answer), FakeNode("b", script=answer)
    options = {"admin_keys": ("admin-key",), "key_store": str(store), "health_interval": 0.5}
    async with nodes(*fakes) as (a, b), proxy_for(a, b, **options) as (proxy, url):
        ending = asyncio.Event()
        ready.put(Live(url, proxy, asyncio.get_running_loop(), ending))
        await ending.wait()


@pytest.fixture
def page(browser: Any, live: Live) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(30_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda r: problems.append(r.url) if not r.url.startswith(live.url) else None)
    opened.goto(f"{live.url}/dashboard#key=admin-key")
    opened.wait_for_selector("#content:not([hidden])")
    opened.wait_for_selector("#accounts:not([hidden])")
    yield opened
    context.close()
    assert not problems


def test_the_page_shows_nodes_models_decisions_and_asks_for_a_key(browser: Any, page: Any, live: Live) -> None:
    key = live.call("POST", "/admin/keys", json={"name": "shop", "limits": {"tokens/day": 5000}})["key"]
    for model in ("m", EVIL):
        answer = httpx.post(
            live.url + CHAT, json={"model": model, "max_tokens": 9}, headers={"authorization": f"Bearer {key}"},
            trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 200
    page.wait_for_function("() => document.querySelectorAll('#decisions tbody tr').length >= 2")
    assert page.evaluate("location.hash") == ""
    assert page.locator("#nodes tbody tr").count() == 2
    assert "2 of 2 nodes up" in page.locator("#state").inner_text()
    page.wait_for_function("() => document.querySelector('#nodes').textContent.includes('50%')")
    page.wait_for_function("() => document.querySelectorAll('#tiles polyline').length > 2")
    page.wait_for_function("() => document.querySelector('#keys').textContent.includes('tokens/day: 30 of 5,000')")
    other = browser.new_page()
    other.goto(f"{live.url}/dashboard")
    other.wait_for_selector("#key-form:not([hidden])")
    other.fill("#key", "wrong")
    other.press("#key", "Enter")
    other.wait_for_function("() => document.querySelector('#notice').textContent.includes('missing or wrong API key')")
    other.fill("#key", "admin-key")
    other.press("#key", "Enter")
    other.wait_for_selector("#content:not([hidden])")
    other.close()


def test_text_of_others_is_never_markup(page: Any, live: Live) -> None:
    live.call("PATCH", "/admin/teams", params={"name": "team"}, json={})
    key = live.call("POST", "/admin/keys", json={"name": "x", "team": "team", "models": [EVIL]})
    httpx.post(
        live.url + CHAT, json={"model": EVIL}, headers={"authorization": f"Bearer {key['key']}"}, trust_env=False
    )
    page.wait_for_function("text => document.querySelector('#decisions').textContent.includes(text)", arg=EVIL)
    page.wait_for_function("text => document.querySelector('#models').textContent.includes(text)", arg=EVIL)
    assert page.evaluate("[window.hit ?? null, document.querySelectorAll('main img, main script').length]") == [None, 0]


def test_a_node_is_drained_and_used_again_by_keyboard(page: Any, live: Live) -> None:
    url = live.call("GET", "/admin/nodes")["data"][1]["url"]
    page.get_by_label(f"Drain {url}").focus()
    page.keyboard.press("Enter")
    page.get_by_label(f"Use {url} again").wait_for()
    assert live.call("GET", "/admin/nodes")["data"][1]["draining"] is True
    page.get_by_label(f"Use {url} again").focus()
    page.keyboard.press("Space")
    page.get_by_label(f"Drain {url}").wait_for()
    page.get_by_label(f"Remove {url}").click()
    page.get_by_text("Cancel").click()
    assert len(live.call("GET", "/admin/nodes")["data"]) == 2


def test_keys_are_made_and_revoked(page: Any, live: Live) -> None:
    page.get_by_label("Name").fill("till")
    page.get_by_label("Limit").fill("requests/day=7")
    page.get_by_text("Make a key").click()
    page.wait_for_selector("#made:not([hidden])")
    secret = page.locator("#made output").inner_text()
    answer = httpx.get(f"{live.url}/v1/usage", headers={"authorization": f"Bearer {secret}"}, trust_env=False)
    assert answer.json()["limits"] == {"requests/day": 7}
    page.get_by_label("Revoke till").click()
    page.locator("#sure button[value=yes]").click()
    page.get_by_label("Revoke till").wait_for(state="detached")
    answer = httpx.get(f"{live.url}/v1/usage", headers={"authorization": f"Bearer {secret}"}, trust_env=False)
    assert answer.status_code == 401
    page.get_by_label("Name").fill("<wrong>")
    page.get_by_text("Make a key").click()
    page.wait_for_selector("#notice:not([hidden])")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_accessible_in_both_themes_and_on_a_phone(page: Any, live: Live, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    live.call("POST", "/admin/keys", json={"name": "bars", "limits": {"tokens/day": 5}})
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": width, "height": 700})
    if scheme == "dark":
        page.click("#theme-button")
    page.reload()  # the key and the theme last
    page.wait_for_selector("#keys tbody meter")
    found = axe.run(page).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"], item["nodes"][0]["failureSummary"]) for item in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(24, 25, 27)") == (scheme == "dark")
