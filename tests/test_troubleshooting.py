"""docs/troubleshooting.md: the messages that it lists are messages of lmkit, and the options that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import typer

from lmkit.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
FIELDS = r"N|M|X|URL|FOLDER|MODEL|datasets|dense|device cuda|127\.0\.0\.1:8000"
PLACES = re.compile(rf"\.\.\.|'X'|\b(?:{FIELDS})\b|'lmkit.*|, once.*")  # what differs from case to case
OF_THE_SYSTEM = ("Address already in use", "No space left on device")
OF_OTHERS = {"--cpus", "--cpuset-cpus", "--cpunodebind", "--membind"}  # docker's and numactl's


def texts() -> str:
    """Every string of the package; those of an f-string are the parts between its fields."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "lmkit").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def messages() -> list[str]:
    """The code in the first column of tables, without the parts that differ from case to case."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if " " in code and "docker" not in code]
    pieces = [piece.strip(" :;,(") for code in codes for piece in PLACES.split(code)]
    return [piece for piece in pieces if len(piece) > 5 and not piece.endswith(OF_THE_SYSTEM)]


def option_names(command: Any) -> set[str]:
    own = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return own.union(*(option_names(sub) for sub in getattr(command, "commands", {}).values()))


def test_messages_are_those_of_the_code() -> None:
    said = texts()
    assert len(messages()) > 30
    assert not [message for message in messages() if message not in said]


def test_options_exist() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - OF_OTHERS
    assert len(named) > 15
    assert named <= option_names(typer.main.get_command(app))
