"""A node that computes prompts and one that decodes, behind a proxy, as real processes: the answers of one engine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.turbo.transport.messages import ENGINE
from lmkit.web.pair import PAIR_HEADER
from tests.cli.commands import mistake
from tests.proxy.test_announce import KEYS
from tests.serve import in_process
from tests.serve.in_process import App, ScriptedEngine
from tests.serve.live import Server
from tests.serve.test_announce import ProxyProcess

TEXT = "def add(first, second):\n    total = first + second\n    return total\n\n" * 12
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
USAGE = {"include_usage": True}
SAMPLED = {"temperature": 1.0, "seed": 11}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0.0,
        **fields,
    }


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": text, "max_tokens": 12, "temperature": 0.0, **fields}


ASKED = {
    "greedy": (COMPLETIONS, prompt("# greedy\n" + TEXT)),
    "seeded choices": (CHAT, chat("# choices\n" + TEXT, n=3, logprobs=True, top_logprobs=2, **SAMPLED)),
    "grammar": (CHAT, chat("# grammar\n" + TEXT, response_format=FORMAT, **SAMPLED)),
    "prompts": (COMPLETIONS, prompt([f"# {name}\n{TEXT}" for name in "abc"], logprobs=1)),  # type: ignore[arg-type]
    "messages": (MESSAGES, chat("# messages\n" + TEXT)),
    "stream": (COMPLETIONS, prompt("# stream\n" + TEXT, stream=True, stream_options=USAGE)),
}


class Pair:
    """Both nodes and their proxy."""

    def __init__(self, folder: Path) -> None:
        key = folder / "kv.key"
        key.touch(0o600)
        key.write_text("0123456789abcdef" * 2)
        self.proxy = ProxyProcess(folder, more="pair_tokens: 64\nnode_wait: 5\n")
        both = ["--proxy", self.proxy.url, "--node-key", KEYS[0].partition(" ")[0], "--kv-key-file", str(key)]
        both += ["--num-threads", "1", "--max-step-tokens", "64"]
        prefill = ["--role", "prefill", "--kv-listen", "127.0.0.1:0", "--kv-host-memory", "64M"]
        self.prefill = Server(*both, *prefill, engine=ENGINE)
        self.decode = Server(*both, "--role", "decode", engine=ENGINE)
        self.decode.until(lambda: self.proxy.healthy() == 2, 30)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.proxy.url + path, json=body, timeout=60)

    def alone(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """After the other node's end: the decode node computes it all, because the salt hides what was cached."""
        return self.post(path, body | {"cache_salt": "other"})

    def paired(self) -> float:
        text = httpx.get(self.proxy.url + "/metrics").text
        found = re.search(r'^lmkit_proxy_pairs_total{outcome="paired"} (\S+)', text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextmanager
def running(folder: Path) -> Iterator[Pair]:
    pair = Pair(folder)
    try:
        yield pair
    finally:
        for server in (pair.prefill, pair.decode):
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
        pair.proxy.kill()


def told(answer: httpx.Response) -> tuple[str, list[int]]:
    """What an answer says, and the numbers of tokens whose KV was found."""
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"(id|created|system_fingerprint)": ?("[^"]*"|\d+)', "", answer.text)
    counts = re.findall(r'"cache(?:d|_read_input)_tokens": ?(\d+)', text)
    text = re.sub(r'"(cached|cache_read_input|input|prompt)_tokens": ?\d+', "", text)
    text = re.sub(r"^: .*\n\n", "", text, flags=re.MULTILINE)  # comments while a node is slow or another one is found
    if text.startswith("data: "):  # where events are cut depends on the time
        text = "".join(re.findall(r'"text":"(.*?)","logprobs"', text)) + text[text.index('"usage":{') :]
    return text, [int(count) for count in counts]


@pytest.mark.slow
def test_a_pair_answers_as_one_engine_and_outlives_its_prefill_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "state"))
    with running(tmp_path) as pair:
        texts = []
        for number, (name, (path, body)) in enumerate(ASKED.items(), 1):
            text, cached = told(pair.post(path, body))
            texts.append(text)
            assert max(cached) >= 64, name
            assert pair.paired() == number, name
        pair.post(COMPLETIONS, prompt("short"))
        assert pair.paired() == len(ASKED)

        bodies = [prompt(f"# {number}\n{TEXT}", stream=True, stream_options=USAGE, **SAMPLED) for number in range(4)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(pair.post, COMPLETIONS, body) for body in bodies]
            pair.decode.until(lambda: pair.paired() > len(ASKED))
            os.killpg(pair.prefill.process.pid, signal.SIGKILL)
            answers = [told(answer.result())[0] for answer in asked]
        assert answers == [told(pair.alone(COMPLETIONS, body))[0] for body in bodies]
        for (name, (path, body)), text in zip(ASKED.items(), texts, strict=True):
            assert told(pair.alone(path, body))[0] == text, name
        assert pair.paired() <= len(ASKED) + len(bodies)


@pytest.mark.parametrize("value", ["prefill -", f"prefill {32 * 'a'}", "decode 10.0.0.1:1"])
def test_a_plain_key_may_not_name_the_other_node(value: str) -> None:
    keys = ("plain", "admin-key role=admin", "proxy-key role=proxy")
    app = App(ScriptedEngine(), ServerConfig(api_keys=keys))

    def answer(key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}", PAIR_HEADER.decode(): value}
        return app.request("POST", in_process.CHAT_PATH, json=in_process.CHAT, headers=headers)

    for key in ("plain", "admin-key"):
        refused = answer(key)
        assert refused.status_code == 403, refused.text
        assert refused.json()["error"]["code"] == "permission_denied"
    assert answer("proxy-key").status_code == 200


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--role", "prefill"], "add --kv-listen"),
        (["--role", "prefill", "--kv-listen", "127.0.0.1:0", "--kv-peer", "127.0.0.1:1"], "leave out --kv-peer"),
        (["--role", "decode", "--kv-listen", "127.0.0.1:0"], "leave out --kv-listen"),
        (["--role", "decode", "--kv-key-file", "k"], "name the engine that computes prompts"),
        (["--role", "decode", "--kv-peer", "127.0.0.1:1"], "add --kv-key-file"),
        (["--role", "decode", "--proxy", "http://127.0.0.1:1"], "add --kv-key-file"),
        (["--role", "sleep"], "prefill"),
        (["--role", "decode", "--dp", "2", "--kv-key-file", "k"], "replicas are alike"),
        (["other", "--role", "decode", "--kv-key-file", "k", "--proxy", "http://127.0.0.1:1"], "of one model"),
        (["--kv-peer", "named"], "or --role decode"),
    ],
)
def test_roles_that_make_no_sense_are_refused(words: list[str], part: str) -> None:
    assert part in mistake("serve", "demo", *words)
