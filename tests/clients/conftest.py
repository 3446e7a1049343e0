"""A table of the clients that did their turns.

With LMKIT_CLIENTS_TABLE=FILE it is written to FILE, as a page of the documents.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmkit.cli.agents import AGENTS
from tests.clients.packages import CLIENTS, version

_turns: dict[str, int] = {}

Record = Callable[[str, int], None]  # (client, turns that it did)

HEAD = """# Clients that were tried

`make test-clients` installed these versions and wrote this page on {date}. Each client did ten turns against a
scripted model by its own code: nine calls of a tool, and a last answer. A library did them twice, with whole answers
and with streams. [Agents](agents.md) were started by `lmkit launch`.
"""


def table() -> str:
    rows = [["client", "packages", "API", "turns"], ["---"] * 4]
    for name, client in CLIENTS.items():
        if name in _turns:
            shown = [f"`{package}` {version(client.registry, package)}" for package in client.packages]
            title = AGENTS[name].title if name in AGENTS else name
            rows.append([title, f"{client.registry}: {', '.join(shown)}", client.api, str(_turns[name])])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{HEAD.format(date=datetime.date.today())}\n{lines}\n"


@pytest.fixture(scope="session")
def record() -> Record:
    def add(client: str, turns: int) -> None:
        _turns[client] = turns
        if target := os.environ.get("LMKIT_CLIENTS_TABLE"):
            Path(target).write_text(table())

    return add
