"""The measuring side of the protocol. Engines are processes, and they are stopped while another engine computes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.peers.protocol import Facts, Options
from lmkit.errors import ConfigError

SETTLE_SECONDS, IDLE_SHARE = 30.0, 0.02  # some engines' threads never rest
ROOT = Path(__file__).resolve().parents[2]


class EngineFailed(Exception):
    """An engine's process ended or could not carry out a command. The message is the last line that it wrote."""


class PeerProcess:
    """One engine's process. `facts` is set by `ready`. Between commands the process is stopped, so that it cannot
    spin."""

    facts: Facts

    def __init__(self, python: str, module: str, options: Options, log: Path, isa: str = "") -> None:
        arguments = [str(options.model)]
        for name in ("threads", "max_batch", "max_context", "vocab", "drafts"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, "-m", module, "run", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(options.threads) | ({"LMKIT_CPU_ISA": isa} if isa else {}),
                start_new_session=True,  # a process group of its own, which is stopped as one
            )

    def ready(self) -> Facts:
        """Wait until the engine has loaded its model, and has ended what it does in the background after that (lmkit
        reads its weights once more): a stopped engine would go on with it in its first measurements. Raises
        EngineFailed."""
        self.facts = Facts(**self._read())
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end and self._busy_share() > IDLE_SHARE:
            pass
        self._signal(signal.SIGSTOP)
        return self.facts

    def _busy_share(self) -> float:
        """Of one core, over half a second."""
        try:
            return self.usage().cpu_percent(0.5) / 100
        except psutil.NoSuchProcess:
            return 0.0

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises EngineFailed."""
        assert self.process.stdin
        with self._awake():
            try:
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise EngineFailed(_end(self.process.wait(), self._log)) from None
            return self._read()

    def usage(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise EngineFailed(_end(self.process.wait(), self._log))
        answer: dict[str, Any] = json.loads(line)
        return answer

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def prepare(python: str, module: str, source: Path, out: Path, log: Path) -> None:
    """Let an engine make its own form of a checkpoint. Raises EngineFailed."""
    command = [python, "-m", module, "prepare", str(source), str(out)]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, cwd=ROOT, env=environment(None), check=False)
    if done.returncode:
        raise EngineFailed(last_line(log))


def parse_pythons(entries: list[str], known: Collection[str]) -> dict[str, list[str]]:
    """`NAME=PYTHON[,PYTHON]` -> interpreters by the name of an engine or tool. Raises ConfigError."""
    pythons = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if name not in known:
            raise ConfigError(f"--peer {entry}: there is no {name!r}, only {', '.join(known)}")
        pythons[name] = text.split(",")
        for python in pythons[name]:
            if not python or shutil.which(python) is None:
                raise ConfigError(f"--peer {entry}: {python!r} is not a program; write --peer {name}=/path/to/python")
    return pythons


def can_import(python: str, packages: tuple[str, ...]) -> bool:
    """Whether all packages are installed. They are not imported."""
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {packages!r})))"
    try:
        return subprocess.run([python, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def _end(code: int, log: Path) -> str:
    """Why a process ended. A crash writes no last line of its own."""
    return last_line(log) if code >= 0 else f"killed by {signal.Signals(-code).name} after: {last_line(log)}"


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it ended without a word"


def environment(threads: int | None) -> dict[str, str]:
    """The environment of a process that imports this repository's benchmarks. It sets the number of OpenMP threads."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return os.environ | {"PYTHONPATH": path} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
