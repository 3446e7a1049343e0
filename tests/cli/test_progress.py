"""One bar for all phases, that ends at 100 %, with the log above it; lines at a modest rate without a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

from lmkit.cli.progress import LINE_SECONDS, ProgressBar, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"), (45, "45 s"), (99, "99 s"), (100, "2 min"), (59 * 60, "59 min"), (3599, "1 h"), (3600, "1 h"),
        (12000, "3 h 20 min"), (86399, "1 d"), (190800, "2 d 5 h"), (1e7, "115 d 18 h"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with ProgressBar(quiet=False, phases={"weights": 1, "layers": 8, "evaluation": 1}, clock=lambda: now) as bar:
        for what in ("weights", "layers", "evaluation"):
            for done in range(100):
                bar.update(what, done, 100)
                now += LINE_SECONDS / 30
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("weights: 3%, ")
    assert shown[-1] == f"done: {duration(now)}"
    shares = [int(line.partition("%")[0].rpartition(" ")[2]) for line in shown[:-1]]
    assert shares == sorted(shares)
    assert len(shown) == 10


def test_a_short_work_and_a_quiet_one_have_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with ProgressBar(quiet=quiet, clock=lambda: 0.0) as bar:
            bar.update("windows", 1, 2)
    assert capsys.readouterr().err == ""


TERMINAL = """
import logging
from lmkit import log
from lmkit.cli.progress import ProgressBar
log.setup("INFO")
with ProgressBar(quiet=False, phases={"layers": 3.0, "evaluation": 1.0}) as bar:
    for done in range(4):
        bar.update("layers", done, 4)
    logging.getLogger("lmkit.quant").info("read back")
    bar.update("evaluation", 1, 2)
"""


def test_a_terminal_has_one_bar_below_the_log() -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=child, stderr=child, env=environment)
    os.close(child)
    parts: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(parent, 4096):
                parts.append(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join(60)
    os.close(parent)
    lines = b"".join(parts).decode().rstrip().splitlines()
    assert any(line.endswith("read back") for line in lines)
    assert "done" in lines[-1] or "done" in lines[-2]
    assert "100 %" in "".join(lines[-2:])
