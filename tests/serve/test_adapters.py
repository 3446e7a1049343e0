"""Adapters are models of a server, each by its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from lmkit import AsyncPipeline, GenerationConfig, pipeline
from lmkit.models import load_spec
from tests.models import peft_folder
from tests.serve.live import Server

ENGINE = "lmkit.turbo.engine.engine:Engine"
TEXT = "import os\n\ndef main("


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    layer = load_spec(json.loads((demo_model / "config.json").read_text())).layers[0]
    shapes = {f"model.layers.{i}.mlp.down_proj": layer.linears["mlp.down"] for i in range(4)}
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("first", "second")):
        peft_folder.write(root / name, shapes, i, size=2.0)
    return tuple(f"{name}={root / name}" for name in ("first", "second"))


@pytest.fixture(scope="module")
def server(folders: tuple[str, ...]) -> Iterator[Server]:
    options = [word for folder in folders for word in ("--adapters", folder)]
    with Server("--dtype", "float32", "--max-model-len", "256", *options, engine=ENGINE) as running:
        yield running


def test_each_adapter_is_a_model(server: Server, demo_model: Path, folders: tuple[str, ...]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id: getattr(model, "parent", None) for model in client.models.list()}
        assert listed == {"demo": None, "first": "demo", "second": "demo"}

        def text(name: str) -> str:
            answer = client.completions.create(model=name, prompt=TEXT, max_tokens=12, temperature=0)
            assert answer.model == name
            return answer.choices[0].text

        texts = {name: text(name) for name in listed}
        assert len(set(texts.values())) == 3
        chats = {
            name: client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
            ).choices[0].message.content
            for name in listed
        }  # fmt: skip
        assert len(set(chats.values())) == 3
        marks = {client.completions.create(model=name, prompt="a", max_tokens=1).system_fingerprint for name in listed}
        assert len(marks) == 3
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            text("third")
    config = GenerationConfig(max_new_tokens=12, temperature=0.0)
    with pipeline(str(demo_model), dtype="float32", max_model_len=256, adapters=folders) as pipe:
        for name, want in texts.items():
            given = "" if name == "demo" else name
            assert pipe(TEXT, config, do_preprocess=False, adapter_name=given).text == want
        wrong = pipe(TEXT, config, adapter_name="third")
        assert (wrong.error_code, wrong.finish_reason) == ("model_not_found", "error")


def test_async_pipeline(demo_model: Path, folders: tuple[str, ...]) -> None:
    config = GenerationConfig(max_new_tokens=4, temperature=0.0)

    async def answers() -> list[str]:
        async with AsyncPipeline(str(demo_model), max_model_len=128, adapters=folders) as pipe:
            return [(await pipe(TEXT, config, do_preprocess=False, adapter_name=n)).text for n in ("", "first")]

    plain, adapted = asyncio.run(answers())
    assert plain != adapted


def test_a_name_belongs_to_one(folders: tuple[str, ...]) -> None:
    folder = folders[0].partition("=")[2]
    with Server("--adapters", f"demo={folder}", engine=ENGINE) as running:
        assert running.process.wait(30) == 2
    assert "demo: two models or adapters have this name" in running.log


def test_adapters_come_and_go_while_it_runs(folders: tuple[str, ...]) -> None:
    """On both ranks."""
    first = Path(folders[0].partition("=")[2])
    keys = ("--api-key", "boss role=admin", "--api-key", "user")
    options = ("--max-model-len", "128", "--tp", "2", "--adapter-root", str(first.parent), "--max-adapters", "1", *keys)
    boss, user = ({"authorization": f"Bearer {key}"} for key in ("boss", "user"))
    (first.parent / "broken").mkdir()
    with Server(*options, engine=ENGINE) as running:

        def load(name: str, path: str, headers: dict[str, str] = boss, **fields: bool) -> tuple[int, str]:
            body = {"lora_name": name, "lora_path": path, **fields}
            answer = running.post("/v1/load_lora_adapter", body, headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        def unload(name: str) -> int:
            return running.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=boss).status_code

        def text(name: str) -> Any:
            body = {"model": name, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
            answer = running.post("/v1/completions", body, headers=user)
            return answer.json()["choices"][0]["text"] if answer.is_success else answer.status_code

        plain = text("demo")
        assert text("a") == 404
        assert load("a", "first", user)[0] == 403
        assert load("a", str(first))[0] == 200  # an absolute path inside the root
        adapted = text("a")
        assert adapted not in (plain, 404)
        found = running.get("/v1/models", headers=user).json()["data"]
        assert [(model["id"], model["root"], model["parent"]) for model in found] == [
            ("demo", "demo", None),
            ("a", "first", "demo"),  # as lora_path names it
        ]
        assert "already" in load("a", "first")[1]
        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(lambda _: load("b", "first")[0], range(4))) == [200, 400, 400, 400]
        assert text("b") == adapted
        assert load("b", "broken", load_inplace=True)[0] == 400
        assert text("b") == adapted
        assert load("b", "second", load_inplace=True)[0] == 200
        assert [text("b"), text("a")] != [adapted, adapted]  # in turns in the one place
        assert text("a") == adapted
        assert unload("a") == unload("b") == 200
        assert unload("a") == text("a") == 404
        for path in ("..", "../..", "/etc", "nowhere", str(first.parent.parent)):
            assert load("x", path) == (404, f"{path!r} is no folder inside the --adapter-root")
        assert load("x", "broken") == (400, "broken: no adapter_config.json; a LoRA adapter of PEFT has it")
        assert load("demo", "first", load_inplace=True)[0] == load("a=b", "first")[0] == 400
        assert load("a", "first")[0] == 200
        running.worker().kill()
        running.until(lambda: text("a") == adapted, 60)  # a new process has the same adapters
        assert text("demo") == plain


def test_no_root_no_loading(server: Server) -> None:
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
