"""Forms with an audio: their fields are read and changed as those of JSON bodies, and the file stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.errors import RequestError
from lmkit.proxy.config import NodeConfig
from lmkit.web.form import Form
from tests.proxy.fakes import Exchange, FakeNode, client, eventually, nodes, proxy_for
from tests.proxy.test_keys import managed
from tests.text.test_audio import wav

pytestmark = pytest.mark.anyio
PATH = "/v1/audio/transcriptions"
AUDIO = bytes(range(256)) * 8 + b"\r\n--" + b"x" * 20


def form(**fields: Any) -> dict[str, Any]:
    return {"files": {"file": ("a.wav", AUDIO, "audio/wav")}, "data": {"model": "m"} | fields}


def received(node: FakeNode) -> Form:
    request = node.requests[-1]
    return Form([(name.lower().encode(), value.encode()) for name, value in request.headers], request.body)


async def test_the_model_of_a_form_picks_the_node() -> None:
    async with (
        nodes(FakeNode(), FakeNode(models=("w",), api_key="node-key")) as (other, node),
        proxy_for(other, node, aliases={"whisper": "w"}) as (proxy, url),
        client(url) as http,
    ):
        config = NodeConfig(url=node.url, models=("w",), api_key="node-key", tenants="cache_salt")
        proxy.registry.add(config, "config")
        lists = {"model": "whisper", "timestamp_granularities[]": ["segment"], "stream": "false", "prompt": 'a"b\r\nc'}
        assert (await http.post(PATH, **form(**lists))).status_code == 200
        assert (await http.post(PATH, files={"file": b"a"}, data={})).status_code == 400
        assert (await http.post(PATH, json={"model": "w"})).status_code == 400
    assert (len(other.requests), len(node.requests)) == (0, 1)
    found = received(node)
    assert found.file == AUDIO
    expected = {"model": "w", "timestamp_granularities": ["segment"], "stream": False, "prompt": 'a"b\r\nc'}
    assert {name: value for name, value in found.fields.items() if name != "cache_salt"} == expected


@pytest.mark.parametrize("told", ["header", "json"])
async def test_what_is_heard_is_charged(tmp_path: Path, told: str) -> None:
    async def answer(exchange: Exchange) -> None:
        if told == "header":
            await exchange.reply(200, b"WEBVTT\n\n", ("x-lmkit-usage", "1504 0 7"))
        else:
            await exchange.reply(
                200, {"text": "", "usage": {"type": "tokens", "input_tokens": 1504, "output_tokens": 7}}
            )

    audio = {"files": {"file": ("a.wav", wav(bytes(300_000), 16))}, "data": {"model": "m"}}
    async with managed(tmp_path, FakeNode(script=answer)) as proxy:
        _, headers = await proxy.key(limits={"tokens/day": 100_000})
        answered = await proxy.http.post(PATH, headers=headers, **audio)
        assert answered.status_code == 200, answered.text
        assert await proxy.used() == [["m", 1, 1504, 0, 7]]
        _, poor = await proxy.key(limits={"tokens/day": 1000})
        assert (await proxy.http.post(PATH, headers=poor, **audio)).status_code == 429


async def test_what_a_client_left_is_charged_as_heard(tmp_path: Path) -> None:
    """By the node's comments, and by the length of the audio until the first."""
    data = wav(bytes(32_000 * 40), 16)

    async def answer(exchange: Exchange) -> None:
        await exchange.start_events()
        if len(node.requests) > 1:
            await exchange.chunk(b'data: {"type":"transcript.text.delta","delta":"a"}\n\n: usage 3004 0 70\n\n')
        await exchange.chunk(b": keep-alive\n\n")
        await exchange.until_left()

    node = FakeNode(script=answer)
    async with managed(tmp_path, node) as proxy:
        _, headers = await proxy.key()
        for _ in range(2):
            request = {"files": {"file": ("a.wav", data)}, "data": {"model": "m", "stream": "true"}}
            async with proxy.http.stream("POST", PATH, headers=headers, **request) as streamed:
                lines = streamed.aiter_lines()
                assert "keep-alive" in "".join([await anext(lines) for _ in range(1 if len(node.requests) == 1 else 3)])
        await eventually(lambda: proxy.proxy.active == 0)
        assert dict(received(node).fields)["stream"] is True
        ((_, requests, heard, _, written),) = await proxy.used()
    assert requests == 2
    assert heard >= 3004 + 2000
    assert written == 70


def body(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
                    for head, data in parts) + b"--b--\r\n"  # fmt: skip


FILE = ('name="file"; filename="a"', b"123")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (body(), "one file"), (body(("name=model", b"m")), "one file"), (body(FILE, FILE), "one file"),
        (body(FILE, ('name="other"; filename="b"', b"1")), "one file"), (body(('name="file"', b"text")), "one file"),
        (body(FILE, ("name=model", b"m"), ("name=model", b"n")), "twice"), (body(FILE)[:-6], "cut off"),
        (body(FILE, ("name=seed", b"x")), "seed"), (body(FILE, ("name=prompt", bytes(70_000))), "65536 bytes"),
        (body(FILE, *[(f"name=a{i}", b"") for i in range(40)]), "more than 32 fields"), (b"nothing", "not multipart"),
    ],
)  # fmt: skip
def test_forms_that_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        Form([(b"content-type", b"multipart/form-data; boundary=b")], content)
    assert refused.value.status == 400


def test_httpx_writes_what_is_read() -> None:
    request = httpx.Request("POST", "http://a", **form(temperature="0.5"))
    found = Form([(b"content-type", request.headers["content-type"].encode())], request.read())
    assert (found.file, found.fields) == (AUDIO, {"model": "m", "temperature": 0.5})
    again = Form([(b"content-type", request.headers["content-type"].encode())], found.written(found.fields))
    assert (again.file, again.fields) == (found.file, found.fields)
