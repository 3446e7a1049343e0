"""`lmkit launch`: what a client is given, which server it gets, and what is said where that cannot work."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmkit.cli.agents import AGENTS, Target
from lmkit.cli.launch import _reason
from lmkit.cli.main import app
from lmkit.web.running import registered
from tests.cli.commands import mistake
from tests.serve.live import FAKE, ROOT

pytestmark = pytest.mark.slow
DOCS = (ROOT / "docs" / "agents.md").read_text()
# A client that writes down what it was given, and asks the server for its models.
CLIENT = """#!{python}
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/models"
models = json.load(urllib.request.urlopen(url))
print(json.dumps({{"words": sys.argv[1:], "variables": dict(os.environ), "url": url, "models": models}}))
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only qwen is installed, and no server runs."""
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "state"))
    program = tmp_path / "qwen"
    program.write_text(CLIENT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("client", AGENTS)
def test_the_documents_show_what_is_set(client: str) -> None:
    agent, target = AGENTS[client], Target("http://127.0.0.1:8000", "qwen3", 65_536)
    assert f"```sh\n{agent.settings(target).shown(agent.command)}\n```" in DOCS
    assert f"| {agent.title} | `{agent.package}` |" in DOCS
    assert f"| {agent.min_context:,} |" in DOCS


@pytest.mark.parametrize("client", AGENTS)
def test_a_printed_command_is_one_of_a_shell(client: str) -> None:
    """A shell gives the client what `launch` gives it, whatever a name or key has in it."""
    agent, target = AGENTS[client], Target("http://h:1", "a 'b' \"c\" $d", 50_000, "k $(e)")
    settings = agent.settings(target)
    shown = settings.shown("show", ("-x", "two words"))
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    shell = f"show() {{ {sys.executable} -c '{code}' \"$@\"; }}\n{shown}"
    words, variables = json.loads(subprocess.check_output(["/bin/sh", "-c", shell], text=True))
    assert words == [*settings.arguments, "-x", "two words"]
    assert variables.items() >= settings.variables.items()


@pytest.fixture
def served() -> Iterator[str]:
    """The address of something that lists models, and stands in the list of servers twice."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            cards = [
                {"id": "demo", "max_model_len": 40_000, "tool_parser": "hermes"},
                {"id": "small", "max_model_len": 4096},
                {"id": "silent", "max_model_len": 40_000, "tool_parser": None},
            ]
            self.wfile.write(json.dumps({"data": cards}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server, registered("serve", "demo,small,silent", 0.0) as tell:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tell(url := f"http://127.0.0.1:{server.server_port}")
        yield url
        server.shutdown()


def launch(*words: str) -> int:
    return CliRunner().invoke(app, ["launch", *words]).exit_code


def test_a_running_server_is_found(served: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch("qwen", "--model", "demo", "--api-key", "k", "--", "-p", "Hi") == 7, "the client's own status"
    seen = json.loads(capfd.readouterr().out)
    assert seen["words"] == ["--auth-type", "openai", "--model", "demo", "-p", "Hi"]
    assert seen["url"] == f"{served}/v1/models"
    assert (seen["variables"]["OPENAI_API_KEY"], seen["variables"]["HOME"]) == ("k", os.environ["HOME"])
    assert "49152" in mistake("launch", "claude", "--model", "demo", "--print")
    assert "4096 tokens" in mistake("launch", "qwen", "--model", "small")
    assert "calls of tools" in mistake("launch", "qwen", "--model", "silent")
    assert "choose one with --model" in mistake("launch", "qwen")
    assert "npm install -g @openai/codex" in mistake("launch", "codex", "--model", "demo")
    assert "`lmkit serve big`" in mistake("launch", "qwen", "--print", "--model", "big")
    (file,) = (tmp_path / "state" / "run").glob("*.json")
    shutil.copy(file, file.with_name("other.json"))
    assert mistake("launch", "qwen").startswith("several servers run: ")


def test_a_server_is_started_and_ends_with_the_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "--model" in mistake("launch", "qwen"), "no server runs"
    monkeypatch.setenv("LMKIT_ENGINE", FAKE)
    monkeypatch.setenv("LMKIT_MAX_MODEL_LEN", "40000")
    assert launch("qwen", "--model", "demo") == 7
    assert json.loads(capfd.readouterr().out)["models"]["data"][0]["id"] == "demo"
    assert not list((tmp_path / "state" / "run").iterdir())


def test_a_server_that_does_not_start_says_why() -> None:
    assert _reason(io.StringIO("a line\nlmkit: m: no such folder\n\n"), "m") == "m: no such folder"
    assert "lmkit serve m" in _reason(io.StringIO(), "m")
