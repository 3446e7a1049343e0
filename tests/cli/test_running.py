"""`lmkit ps` and `lmkit stop` with real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.turbo.host_memory import gib
from tests.cli.commands import mistake
from tests.serve.live import Server

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path))


def lmkit(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_nothing_runs() -> None:
    assert lmkit("ps") == "nothing runs; `lmkit serve MODEL` starts a server\n"
    assert lmkit("ps", "--json") == "[]\n"
    assert lmkit("stop", "--all") == "nothing runs\n"
    assert mistake("stop", "demo") == "stop: no server is demo; nothing runs"
    assert "--all" in mistake("stop")
    assert "--all" in mistake("stop", "demo", "--all")


def test_two_servers_are_shown_and_stopped() -> None:
    with Server() as first, Server() as second:
        rows = json.loads(lmkit("ps", "--json"))
        assert [row["url"] for row in rows] == [first.url, second.url]
        assert [row["pid"] for row in rows] == [first.process.pid, second.process.pid]
        assert all(row["model"] == "demo" and row["memory_bytes"] > 10 << 20 for row in rows)
        engine = 300 << 20  # that the fake engine reserves; the front end has some more
        assert all(engine + (10 << 20) < row["reserved_bytes"] < engine + (1 << 30) for row in rows)
        table = lmkit("ps").splitlines()
        assert table[0].split() == ["PID", "MODEL", "ADDRESS", "UPTIME", "USED", "RESERVED"]
        assert table[1].split()[:3] == [str(first.process.pid), "demo", first.url]
        assert table[1].endswith(gib(rows[0]["reserved_bytes"]))

        assert "2 servers are demo" in mistake("stop", "demo")
        port = first.url.rpartition(":")[2]
        assert lmkit("stop", port).splitlines()[-1] == f"stopped demo ({first.url})"
        assert first.process.wait(5) == 0
        assert len(json.loads(lmkit("ps", "--json"))) == 1
        lmkit("stop", "--all")
        assert second.process.wait(5) == 0
        assert lmkit("ps", "--json") == "[]\n"
