"""Images over HTTP: in chats, responses and messages, with their tokens in `usage`; and from where they may come."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import typer
from transformers.models.internvl.processing_internvl import InternVLProcessor

from lmkit.cli.replay import replay
from lmkit.config import ServerConfig
from lmkit.errors import ConfigError, RequestError
from lmkit.serve import images as module
from lmkit.serve.images import ImageSources, is_public
from lmkit.text.images import read_image
from lmkit.text.messages import ImagePart
from lmkit.text.tokenizer import Tokenizer
from lmkit.turbo.request import ImageInput
from lmkit.web.receipt import HEADER
from tests.api.test_images import drawn, saved
from tests.models.pictures import chat_checkpoint, expected, tower_of
from tests.serve.live import Server

PNG = saved(drawn(50, 30))
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
OTHER = "data:image/png;base64," + base64.b64encode(saved(drawn(50, 30, 1))).decode()
TOKENS = 24  # cells of 8 x 8 pixels


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    chat_checkpoint(folder / "vl")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(PNG)
    options = ("--image-folder", str(folder / "pictures"), "--max-batch-size", "2", "--no-packed-cache",
               "--receipt-key", str(folder / "receipt.key"))  # fmt: skip
    with Server(*options, model=folder / "vl", engine="lmkit.turbo.engine.engine:Engine") as running:
        running.folder = folder  # type: ignore[attr-defined]
        yield running


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(server.url + path, json=body, timeout=60).json()
    return answer


def chat(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "logit_bias": {"4098": -100, "4099": -100}}
    return post(server, "/v1/chat/completions", body | fields)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_all_apis_show_the_same_image(server: Server) -> None:
    plain = chat(server)["usage"]["prompt_tokens"]
    first = chat(server, image(URL), n=2)
    assert first["usage"]["prompt_tokens"] == plain + TOKENS + 2  # and the marks around it
    text = first["choices"][0]["message"]["content"]
    path = server.folder / "pictures" / "a.png"  # type: ignore[attr-defined]
    again = chat(server, image(f"file://{path}"))
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > plain

    part = {"type": "input_image", "image_url": URL}
    asked = [{"role": "user", "content": [part, {"type": "input_text", "text": "What is it?"}]}]
    body = {"input": asked, "max_output_tokens": 4, "temperature": 0, "store": False}
    response = post(server, "/v1/responses", body)
    assert response["usage"]["input_tokens"] == plain + TOKENS + 2
    counted = post(server, "/v1/responses/input_tokens", {"input": asked})
    assert counted["input_tokens"] == plain + TOKENS + 2

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": blocks}]
    answer = post(server, "/v1/messages", {"model": "vl", "messages": messages, "max_tokens": 4, "temperature": 0})
    usage = answer["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == plain + TOKENS + 2

    of_ollama = {"model": "vl", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
    bare = {"images": [base64.b64encode(PNG).decode()]}
    told = {"messages": [{"role": "user", "content": "What is it?", **bare}]}
    for path, body in (("/api/chat", told), ("/api/generate", bare | {"prompt": "What is it?"})):
        assert post(server, path, of_ollama | body)["prompt_eval_count"] == plain + TOKENS + 2


def test_a_receipt_commits_to_the_images(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token ids of two images are the same. A replay needs the body, and tells another image."""
    pytest.importorskip("cryptography")
    folder: Path = server.folder  # type: ignore[attr-defined]
    ids = {}
    for name, shown in (("a", [image(URL)]), ("other", [image(OTHER)]), ("none", [])):
        content = [*shown, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        body |= {"logit_bias": {"4098": -100, "4099": -100}}
        (tmp_path / name).write_text(json.dumps(body))
        answer = httpx.post(
            server.url + "/v1/chat/completions",
            json=body | {"return_token_ids": True},
            headers={HEADER: "1"},
            timeout=60,
        )
        ids[name] = answer.json()["prompt_token_ids"]
        (tmp_path / "receipt").write_bytes(server.get(f"/receipts/{answer.headers[HEADER]}").content)
        if name == "a":
            (tmp_path / "of a").write_bytes((tmp_path / "receipt").read_bytes())
    assert ids["a"] == ids["other"] != ids["none"]
    (tmp_path / "ids").write_text(json.dumps(ids["a"]))

    def replayed(prompt: str) -> str:
        with pytest.raises(typer.Exit) as end:
            replay(tmp_path / "of a", prompt=tmp_path / prompt, model=str(folder / "vl"))
        return f"{end.value.exit_code} {capsys.readouterr().out}"

    found = replayed("a")
    assert found.startswith("0 "), found
    assert "equal, 6 tokens" in found
    assert "another" not in found
    for prompt, message in (("other", "it shows other images"), ("ids", "the prompt shows images"), ("none", "tokens")):
        with pytest.raises(ConfigError, match=message):
            replayed(prompt)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (image("http://example.com/a.png"), {}, "this server fetches images of no host"),
        (image("file:///etc/passwd"), {}, "no such file in the server's folder"),
        (image("/etc/passwd"), {}, "send a data: URL, or file:///PATH"),
        (image("data:image/png;base64,AAAA"), {}, "no image that can be read"),
        (image(URL), {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens does not go with images"),
        ({"type": "input_audio", "input_audio": {}}, {}, "only parts"),
    ],
)
def test_what_is_refused(server: Server, part: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    error = chat(server, part, **fields)["error"]
    assert message in error["message"]
    assert "passwd" not in error["message"]


def test_tokenize_and_other_roles_refuse_images(server: Server) -> None:
    messages = [{"role": "user", "content": [image(URL)]}]
    assert "images have as many tokens" in post(server, "/tokenize", {"messages": messages})["error"]["message"]
    messages[0]["role"] = "system"
    assert "images belong to messages of the user" in chat(server, messages=messages)["error"]["message"]


class Host(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        big = self.path == "/big"
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", "/a.png")
        self.end_headers()
        self.wfile.write(PNG if not big else bytes(3000))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()


def fetched(url: str, *hosts: str) -> bytes:
    sources = ImageSources(ServerConfig(image_hosts=hosts))
    asyncio.run(sources.fetch([ImagePart(url)]))
    return sources.load(url)


def test_images_of_named_hosts_are_fetched(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(f"http://{host}/a.png", host) == PNG
    with pytest.raises(RequestError, match="answered 302; redirects are not followed"):
        fetched(f"http://{host}/moved", host)
    monkeypatch.setattr(module, "MAX_BYTES", 2000)
    with pytest.raises(RequestError, match="more than 0 MiB"):
        fetched(f"http://{host}/big", host)


@pytest.mark.parametrize(
    ("url", "hosts", "message"),
    [
        ("http://{host}/a.png", (), "fetches images of no host"),
        ("http://{host}/a.png", ("127.0.0.1",), "not one to fetch from"),  # without its port: port 80
        ("http://localhost:{port}/a.png", ("localhost:{port}",), "could not be asked"),  # a name with a private address
        ("http://good.example@{host}/a.png", ("good.example", "{host}"), "not one to fetch from"),
        ("http://{host}\\@good.example/a.png", ("good.example",), "image: "),
        ("http://good.example.evil.example/a.png", ("good.example",), "not one to fetch from"),
        ("http://[::ffff:127.0.0.1]:{port}/", ("good.example",), "not one to fetch from"),
        ("http://2130706433:{port}/", ("good.example",), "not one to fetch from"),
    ],
)
def test_other_hosts_are_not_asked(host: str, url: str, hosts: tuple[str, ...], message: str) -> None:
    port = host.rpartition(":")[2]
    filled = [name.format(host=host, port=port) for name in hosts]
    with pytest.raises(RequestError, match=message):
        fetched(url.format(host=host, port=port), *filled)


def test_private_addresses() -> None:
    private = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1"]
    private += ["fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "::"]
    private += ["64:ff9b::10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::5db8:d822", "::127.0.0.1", "::ffff:0:192.168.0.1"]
    private += ["2001:0:5db8:d822::f5ff:fffe", "2001:db8::1", "2606:2800::5efe:10.0.0.1", "2606:2800::200:5efe:7f00:1"]
    private += ["fec0::1"]
    assert not any(map(is_public, private))
    assert is_public("93.184.216.34")
    assert is_public("64:ff9b::93.184.216.34")
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"a")
    (tmp_path / "b.png").write_bytes(b"b")
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "in" / "circle").symlink_to("circle")
    sources = ImageSources(ServerConfig(image_folder=str(tmp_path / "in")))
    assert sources.load(f"file://{tmp_path}/in/a.png") == b"a"
    for name in ("b.png", "in/../b.png", "in/%2e%2e/b.png", "in/link.png", "in", "in/none.png", "in/circle"):
        with pytest.raises(RequestError, match="no such file"):
            sources.load(f"file://{tmp_path}/{name}")


def of_gemma() -> str:
    """Line breaks before it join those of the template. All tokens are in one step, and see each other."""
    return f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"


def of_internvl() -> str:
    """Of 6 squares and the whole, which have 4 tokens each."""
    tokens = {"start_image_token": "<img>", "image_token": "<IMG_CONTEXT>", "end_image_token": "</img>"}
    processor = SimpleNamespace(image_seq_length=4, **tokens)
    return InternVLProcessor.replace_image_token(processor, {"num_patches": [7]}, 0)


@pytest.mark.parametrize(("name", "cells"), [("gemma3-vision", of_gemma()), ("internvl", of_internvl())])
def test_an_image_beside_a_tower_is_read_as_transformers_reads_it(tmp_path: Path, name: str, cells: str) -> None:
    """The mark of the template becomes the text that transformers' processor writes."""
    model = chat_checkpoint(tmp_path / "model", name)
    with Server(
        "--max-batch-size", "2", "--no-packed-cache", "--kv-dtype", "float32",
        model=tmp_path / "model", engine="lmkit.turbo.engine.engine:Engine",
    ) as running:  # fmt: skip
        answer = chat(running, image(URL), max_tokens=6)
        plain = chat(running)
    tower, tokenizer = tower_of(tmp_path / "model"), Tokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer.encode(f"<|im_start|>user\n{cells}What is it?<|im_end|>\n<|im_start|>assistant\n", False)
    assert answer["usage"]["prompt_tokens"] == len(ids) >= plain["usage"]["prompt_tokens"] + cells.count("><")
    read = read_image(PNG, tower.settings)
    placed = (ImageInput(ids.index(tower.settings.token_id), *read),)
    for _ in range(6):
        logits = expected(model, tower, ids, placed)[-1]
        logits[[4098, 4099]] = -torch.inf
        ids.append(int(logits.argmax()))
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(ids[-6:])
