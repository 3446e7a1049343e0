"""Names of a model in requests, its revision, and a chat template in place of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig, ServerConfig
from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.hub import resolve_model_path
from lmkit.text import Tokenizer
from tests.serve.fake_engine import DEMO
from tests.serve.in_process import CHAT, TEXT, App, ScriptedEngine

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_answers_have_the_name_that_was_asked_for() -> None:
    app = App(ScriptedEngine(), ServerConfig(served_model_name=("model", "gpt-4", "org/long")))
    for name in ("model", "gpt-4", "org/long"):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            answer = app.post(path, body | {"model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert app.request("GET", f"/v1/models/{name}").json()["id"] == name
        stream = app.post("/v1/chat/completions", CHAT | {"model": name, "stream": True}).text
        assert f'"model":"{name}"' in stream
    assert app.post("/v1/completions", TEXT | {"model": "gpt-5"}).status_code == 404
    listed = app.request("GET", "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["model", "gpt-4", "org/long"]
    assert 'model_name="gpt-4"' not in app.request("GET", "/metrics").text


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    text = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (file := tmp_path / "own.jinja").write_text(text)
    for given in (text, str(file)):
        tokenizer = Tokenizer.from_pretrained(DEMO, given)
        assert tokenizer.render_chat(MESSAGES) == "<Hi>"
        tokenizer.check_template()
    assert Tokenizer.from_pretrained(DEMO).render_chat(MESSAGES) != "<Hi>"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("no-such-file.jinja", "chat_template 'no-such-file.jinja': there is no such file"),
        (str(DEMO), "cannot read"),
        ("{% for %}", "chat template: does not compile"),
    ],
)
def test_a_wrong_template_is_one_line_at_the_start(given: str, error: str) -> None:
    command = [sys.executable, "-m", "lmkit", "serve", "demo", "--port", "0", "--chat-template", given]
    command += ["--engine", "tests.serve.fake_engine:FakeEngine", "--log-level", "ERROR"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert error in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_revision_comes_from_the_cache_of_the_hub(tmp_path: Path) -> None:
    """Without a network. A revision that is not there is one clear line."""
    pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--name"
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (snapshot / file).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    code = "import sys; from lmkit.formats.hub import resolve_model_path; "
    code += "print(resolve_model_path('org/name', revision=sys.argv[1]))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}

    def ask(revision: str) -> Any:
        command = [sys.executable, "-c", code, revision]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)

    assert ask("v1").stdout.strip() == ask(commit).stdout.strip() == str(snapshot)
    missing = ask("v2").stderr.splitlines()[-1]
    assert missing.startswith("lmkit.errors.CheckpointError: org/name: no such folder, and it cannot be fetched")


def test_a_folder_has_no_revision() -> None:
    with pytest.raises(CheckpointError, match="--revision v1 is for a model of the Hub"):
        resolve_model_path(DEMO, revision="v1")
    with pytest.raises(ConfigError, match="has no field revision: give the folder of a downloaded snapshot"):
        EngineConfig(revision="v1")  # type: ignore[call-arg]
