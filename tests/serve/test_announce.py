"""A server that registers itself with a proxy, both as real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.formats.fingerprint import fingerprint
from lmkit.models import load_spec
from tests.models import peft_folder
from tests.proxy.fakes import proxy_for
from tests.proxy.test_announce import KEYS
from tests.serve.live import ROOT, Server

ASK = {"model": "demo", "prompt": "x", "max_tokens": 4}


class ProxyProcess:
    def __init__(self, folder: Path, port: int = 0, more: str = "") -> None:
        config = folder / "proxy.yaml"
        config.write_text(f"port: {port}\nhealth_interval: 0.3\napi_keys: [{KEYS[0]}]\n{more}")
        command = [sys.executable, "-m", "lmkit", "proxy", "--config", str(config)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("proxy on ").strip()
        self.port = int(self.url.rpartition(":")[2])

    def healthy(self) -> int:
        return int(httpx.get(self.url + "/health").json()["healthy_nodes"])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_a_server_registers_comes_again_and_leaves(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "state"))
    layer = load_spec(json.loads((demo_model / "config.json").read_text())).layers[0]
    peft_folder.write(tmp_path / "lora", {"model.layers.0.mlp.down_proj": layer.linears["mlp.down"]}, 0)
    adapter = ("--adapters", f"first={tmp_path / 'lora'}")
    proxy = ProxyProcess(tmp_path)
    try:
        key = KEYS[0].partition(" ")[0]
        with Server(
            "--proxy", proxy.url, "--node-key", key, "--api-key", "own", "--node-tag", "cpu", *adapter
        ) as server:
            server.wait_for_line("registered with the proxy")
            server.until(lambda: proxy.healthy() == 1, 30)
            answer = httpx.post(proxy.url + "/v1/completions", json=ASK)  # with a key that the server made for it
            assert answer.status_code == 200
            assert httpx.post(proxy.url + "/v1/completions", json=ASK | {"model": "first"}).json()["model"] == "first"
            proxy.kill()
            proxy = ProxyProcess(tmp_path, proxy.port)
            server.until(lambda: proxy.healthy() == 1, 30)
            assert httpx.post(proxy.url + "/v1/completions", json=ASK).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            assert httpx.get(proxy.url + "/health").json()["nodes"] == 0  # at once, not when the lease ends
    finally:
        proxy.kill()


@pytest.mark.anyio
async def test_a_server_without_a_key_says_why_and_serves() -> None:
    async with proxy_for(api_keys=KEYS) as (proxy, url):
        with Server("--proxy", url, "--node-key", "wrong") as server:
            await asyncio.to_thread(server.wait_for_line, "refuses this server: missing or wrong API key")
            assert server.post("/v1/completions", ASK).status_code == 200
            assert proxy.registry.nodes() == []


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="write the proxy's address"):
        ServerConfig(proxies=("10.0.0.5:8080",))
    with pytest.raises(ConfigError, match="name it with --proxy"):
        ServerConfig(node_key="x")


def test_the_fingerprint_follows_the_weights_and_not_the_folder(tmp_path: Path) -> None:
    prints = []
    for name, weights in (("a", b"x" * (3 << 20)), ("b", b"x" * (3 << 20)), ("c", b"x" * (3 << 20) + b"y")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text("{}")
        prints.append(fingerprint(folder))
    assert prints[0] == prints[1] != prints[2]
