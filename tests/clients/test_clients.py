"""Ten turns of each client by its own code against a server with scripted answers: agents by `lmkit launch`, libraries
by loops.py and loops.mjs.

`make test-clients` installs the clients and runs this. They are no dependencies of the other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmkit.cli.agents import AGENTS
from tests.clients.conftest import Record
from tests.clients.packages import CLIENTS, FOLDER, NPM, PROGRAMS, PYTHON
from tests.serve.fake_engine import script
from tests.serve.live import ROOT, Server

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
TURNS = 10
SECONDS = 240
END = "All done."
LOOPS = Path(__file__).parent


class Shell(NamedTuple):
    """An agent's tool that runs commands, and the words that make it work through a task alone."""

    tool: str
    argument: str
    before: tuple[str, ...]
    behind: tuple[str, ...] = ()


SHELLS = {
    "codex": Shell("exec_command", "cmd", ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")),
    "claude": Shell("Bash", "command", ("-p",), ("--allowedTools", "Bash")),
    "opencode": Shell("bash", "command", ("run",)),
    "qwen": Shell("run_shell_command", "command", ("--yolo", "-p")),
}


def task(calls: list[dict[str, Any]]) -> str:
    """A prompt that the scripted model answers with a thought, a sentence and a call in each turn, and then with END.

    A call's result has the word RESULT, which asks for the next answer.
    """
    written = [f"I run it.\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    answers = [f"<think>\nNow {turn}.\n</think>\n\n{text}" for turn, text in enumerate([*written, END])]
    return f"Do it. {script(answers)}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--max-model-len", "131072", "--tool-parser", "hermes", "--reasoning-parser", "think")
    with Server(*options) as running:
        yield running


def run(command: list[Any], server: Server, **options: Any) -> str:
    """What a client prints. It must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)
    shown = f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}\n{server.log[-2000:]}"
    assert ended.returncode == 0, shown
    return ended.stdout


def require(client: str) -> None:
    if CLIENTS[client].missing:
        pytest.skip(f"{client}: `make test-clients` installs it")


def line(turn: int) -> str:
    return f'{turn} "ü" \\'


@pytest.mark.parametrize("client", AGENTS)
def test_an_agent(client: str, server: Server, tmp_path: Path, record: Record) -> None:
    """Each command writes a line of a file."""
    require(client)
    shell, work, home = SHELLS[client], tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    commands = [f"printf '%s\\n' '{line(turn)}' >> turns; printf 'RES''ULT %s\\n' {turn}" for turn in range(TURNS - 1)]
    asked = task([{"name": shell.tool, "arguments": {shell.argument: command}} for command in commands])
    launch = [sys.executable, "-m", "lmkit", "launch", client, "--url", server.url]
    variables = {
        "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    words = [*launch, "--", *shell.before, asked, *shell.behind]
    shown = run(words, server, cwd=work, env=variables, stdin=subprocess.DEVNULL)
    assert END in shown
    assert (work / "turns").read_text().splitlines() == [line(turn) for turn in range(TURNS - 1)], shown
    record(client, TURNS)


@pytest.mark.parametrize("client", [client for client in CLIENTS if client not in AGENTS])
def test_a_library(client: str, server: Server, record: Record) -> None:
    require(client)
    asked = task([{"name": "step", "arguments": {"number": turn}} for turn in range(TURNS - 1)])
    if CLIENTS[client].registry == NPM:  # a module of standard input finds packages where it is run
        source = (LOOPS / "loops.mjs").read_text()
        command = ["node", "--input-type=module", "-", client, server.url, asked]
        printed = run(command, server, cwd=FOLDER, input=source)
    else:
        printed = run([PYTHON, LOOPS / "loops.py", client, server.url, asked], server)
    whole, streamed = json.loads(printed.splitlines()[-1])
    assert whole == streamed == {"seen": list(range(TURNS - 1)), "answer": END}
    record(client, 2 * TURNS)
