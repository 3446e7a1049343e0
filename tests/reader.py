"""A reader who types the commands of a document into a shell, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.documents import Command

PORT = re.compile(r"(?<=127\.0\.0\.1:)\d{4,5}|(?<=--port )\d{4,5}|(?<=port: )\d{4,5}")
SERVER = re.compile(r"^(?:\w+=\S+ )*lmkit (?:serve|proxy(?= -|$))")
# What a test adds to a command so that it is done in seconds.
QUICK = {
    "quantize": "--recipe rtn_w4a16_g128 --num-samples 2 --seq-len 64 --no-eval",
    "eval": "--limit 1024",
    "bench online": "--num-prompts 4",
}
CHANGED = ("quantize",)  # its output is another one then
# The address that a command uses if none is given: ports are replaced by free ones.
DEFAULTS = {
    "bench online": ("http", "http://127.0.0.1:8000"),
    "bench agent": ("--url", "--url http://127.0.0.1:8000"),
    "proxy add": ("--proxy", "--proxy http://127.0.0.1:8080"),
    "proxy remove": ("--proxy", "--proxy http://127.0.0.1:8080"),
    "proxy status": ("--proxy", "--proxy http://127.0.0.1:8080"),
}


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that the system gives away."""
    for first in random.Random().sample(range(20000, 32000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process in which `lmkit` and `python` are those of the tests."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("lmkit", "-m lmkit "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (programs / name).chmod(0o755)
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("LMKIT_") or k in ("LMKIT_CACHE_DIR", "LMKIT_CPU_ISA", "LMKIT_STATE_DIR")
    }
    root = str(Path(__file__).parents[1])
    return kept | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def run(command: list[str], folder: Path, variables: Mapping[str, str], *, fails: bool = False) -> str:
    """What a command prints on stdout and stderr. Its exit status must be 0, or another one if it `fails`."""
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert (done.returncode != 0) == fails, f"{command}: exit status {done.returncode}\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def server(command: str, folder: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """What a server prints until it takes requests. It must end with status 0 on SIGTERM."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {command}"],
        cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    printed = ""
    try:
        for line in process.stdout:
            printed += line
            if " on http://" in line:
                break
        else:
            raise AssertionError(f"{command}\n{printed}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield printed
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, command
    finally:
        process.kill()
        process.wait()


class Reader(contextlib.ExitStack):
    """Types commands. The servers among them run until the reader leaves."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.variables = folder, environment(folder)
        self.ports: dict[str, str] = {}

    def type(self, command: Command) -> str:
        """What the command prints. A file that `cat` shows, and that is not there, is one that the reader writes."""
        text = self._with_free_ports(self._completed(command.text))
        shows = re.fullmatch(r"cat (\S+)", text)
        if shows and not (self.folder / shows.group(1)).exists():
            (self.folder / shows.group(1)).write_text(self._with_free_ports("\n".join(command.shown) + "\n"))
        if SERVER.match(text) and not command.is_refused:
            return self.enter_context(server(text, self.folder, self.variables))
        return run(["bash", "-c", text], self.folder, self.variables, fails=command.is_refused)

    def _completed(self, text: str) -> str:
        for name, (part, whole) in DEFAULTS.items():
            if text.startswith(f"lmkit {name}") and part not in text:
                text = f"{text} {whole}"
        for name, options in QUICK.items():
            if text.startswith(f"lmkit {name} "):
                text = f"{text} {options}"
        return text

    def _with_free_ports(self, text: str) -> str:
        return PORT.sub(lambda found: self.ports.setdefault(found.group(), str(free_ports(1))), text)


LOG = re.compile(r"^(\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d")  # a line of the log: it is about the machine
STRING = r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""


def masked(line: str, is_python: bool = False) -> str:
    """A line without what differs from run to run: numbers, ids, an answer's words, the width of a table."""
    line = re.sub(STRING if is_python else r'(?<="content":)"(?:[^"\\]|\\.)*"', "~", line)
    line = re.sub(r"\b[0-9a-f]{8,}\b|(?<=-)[0-9a-f]{8,}|(?<=_)[0-9a-f]{8,}", "~", line)
    line = re.sub(r"[-+]?\d[\d.,]*", "#", line)
    return re.sub(r"[KMGT]iB|[\s─━═┏┓┗┛┡┩┳┻╇┴┬┼┌┐└┘├┤╭╮╰╯▏▎▍▌▋▊▉█]", "", line)


def lacks(printed: str, shown: list[str], *, is_python: bool = False) -> str:
    """The first shown line that was not printed, in this order, or "". `...` stands for anything."""
    lines = [line for line in shown if not LOG.match(line)]
    text = masked("\n".join(line for line in printed.splitlines() if not LOG.match(line)), is_python)
    place = 0
    for piece in (piece for line in lines for piece in line.split("...")):
        found = text.find(masked(piece, is_python), place)
        if found < 0:
            return piece
        place = found + len(masked(piece, is_python))
    return ""
