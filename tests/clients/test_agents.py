"""Ten turns of each coding agent by its own program, started by `lmkit launch`, against a server with scripted answers.

`make test-clients` installs the agents and runs this. They are no dependencies of the other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lmkit.cli.agents import AGENTS
from tests.clients.packages import PROGRAMS
from tests.serve.fake_engine import script
from tests.serve.live import ROOT, Server

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
TURNS = 10
SECONDS = 240


class Shell(NamedTuple):
    """A client's tool that runs commands, and the words that make it work through a task alone."""

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


def line(turn: int) -> str:
    return f'{turn} "ü" \\'


def answer(shell: Shell, turn: int) -> str:
    """What the model writes in a turn. The command writes a line of a file, and RESULT asks for the next."""
    if turn == TURNS - 1:
        return "<think>\nNow the end.\n</think>\n\nAll done."
    command = f"printf '%s\\n' '{line(turn)}' >> turns; printf 'RES''ULT %s\\n' {turn}"
    call = json.dumps({"name": shell.tool, "arguments": {shell.argument: command}}, ensure_ascii=False)
    return f"<think>\nNow {turn}.\n</think>\n\nI run step {turn}.\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--max-model-len", "131072", "--tool-parser", "hermes", "--reasoning-parser", "think")
    with Server(*options) as running:
        yield running


@pytest.mark.parametrize("client", AGENTS)
def test_ten_turns(client: str, server: Server, tmp_path: Path) -> None:
    if not (PROGRAMS / AGENTS[client].command).exists():
        pytest.skip(f"{client}: `make test-clients` installs it")
    shell, work, home = SHELLS[client], tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    task = f"Do it. {script([answer(shell, turn) for turn in range(TURNS)])}"
    launch = [sys.executable, "-m", "lmkit", "launch", client, "--url", server.url]
    variables = {
        "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(
        [*launch, "--", *shell.before, task, *shell.behind],
        cwd=work, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    shown = f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}\n{server.log[-2000:]}"
    assert ended.returncode == 0, shown
    assert "All done." in ended.stdout, shown
    assert (work / "turns").read_text().splitlines() == [line(turn) for turn in range(TURNS - 1)], shown
