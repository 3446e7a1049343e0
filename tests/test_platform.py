"""lmkit runs on Linux only, and says so in one line."""

from __future__ import annotations

import sys

import pytest

import lmkit
from lmkit.cli.main import main
from lmkit.errors import UnsupportedError


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")])
def test_other_systems_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], platform: str, name: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "argv", ["lmkit", "serve", "demo"])
    line = f"Linux only, and this is {name}; use a Linux machine, a container or WSL 2"
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"lmkit: {line}\n"
    monkeypatch.delitem(vars(lmkit), "pipeline", raising=False)
    with pytest.raises(UnsupportedError, match=line):
        lmkit.pipeline("demo")
