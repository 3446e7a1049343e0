"""The servers and proxies of this user that run on this machine: a file for each, while it runs.

A process id alone can come to belong to another process. A file therefore has the process' start time and the machine's
boot as well, and no signal goes to a process that does not match both.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from lmkit.environment import environment
from lmkit.errors import JSON_ERRORS, LMKitError
from lmkit.log import get_logger
from lmkit.web.listen import is_loopback

Kind = Literal["serve", "proxy", "up"]

logger = get_logger(__name__)


class Tell(Protocol):
    def __call__(self, url: str, reserved: int | None = None) -> None: ...


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process, as its file has it."""

    kind: Kind
    pid: int
    start: int  # of the process, in clock ticks after the boot
    boot: str
    host: str  # of the machine: a home folder may be shared by several
    name: str  # the model's; empty for a proxy
    url: str | None = None  # None while the model loads
    reserved: int | None = None  # bytes of memory that a server takes at most; None while the model loads
    drain_seconds: float
    admin_key: str | None = None  # of a proxy that was given none
    proxy_key: str | None = None  # of a server without keys: a proxy of this user shows by it that it is one

    @property
    def port(self) -> int | None:
        return None if self.url is None else int(self.url.rpartition(":")[2])

    @property
    def file(self) -> str:
        return f"{self.host}-{self.pid}.json"

    @property
    def seconds(self) -> float:
        """How long the process has run."""
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - self.start / os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def registered(
    kind: Kind, name: str, drain_seconds: float, admin_key: str | None = None, proxy_key: str | None = None
) -> Iterator[Tell]:
    """Keep a file for this process, readable by its user alone. The function that it gives tells the server's URL, and
    the bytes of memory that it takes at most.

    A folder that cannot be written is a warning: the server runs, and others do not find it.
    """
    folder, pid = _folder(), os.getpid()
    entry = Entry(
        kind=kind,
        pid=pid,
        start=_start(pid) or 0,
        boot=_boot(),
        host=socket.gethostname(),
        name=name,
        drain_seconds=drain_seconds,
        admin_key=admin_key,
        proxy_key=proxy_key,
    )

    def write(entry: Entry) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(folder, entry)
        except OSError as error:
            logger.warning("%s cannot be written (%s): `lmkit ps` does not show this process", folder, error.strerror)

    write(entry)
    try:
        yield lambda url, reserved=None: write(msgspec.structs.replace(entry, url=url, reserved=reserved))
    finally:
        with contextlib.suppress(OSError):
            (folder / entry.file).unlink()


def running() -> list[Entry]:
    """All processes that have a file and still run, the oldest first. Files of processes that ended are removed."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue  # in a folder that others may write to, only our own files say whom to signal
            entry = msgspec.json.decode(path.read_bytes(), type=Entry)
        except (OSError, *JSON_ERRORS):
            continue  # it ended this moment, or the file is of another version
        if entry.boot == _boot() and _start(entry.pid) == entry.start:
            found.append(entry)
        elif entry.host == socket.gethostname():
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda entry: entry.start)


def admin_key_at(address: str) -> str | None:
    """The admin key that a proxy of this user and machine made for itself, if it listens at this address."""
    return next((entry.admin_key for entry in _listening_at(address, running()) if entry.admin_key), None)


def proxy_key_at(address: str, among: Iterable[Entry]) -> str | None:
    """The key by which a server of this user and machine, if it listens at this address, knows a proxy.

    `among` are processes that run. The key ends with its process: what takes over the port learns nothing of use.
    """
    return next((entry.proxy_key for entry in _listening_at(address, among) if entry.proxy_key), None)


def _listening_at(address: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    try:
        named = urlsplit(address)
        port, host = named.port, named.hostname or ""
    except ValueError:
        return
    for entry in entries:
        if entry.url is not None and (is_loopback(host) or host == urlsplit(entry.url).hostname) and entry.port == port:
            yield entry


def stop(entries: list[Entry], ended: Callable[[Entry], None], *, extra_seconds: float = 30.0) -> None:
    """Send SIGTERM to each process at once and wait for their drains. `ended` is told each one that has ended.

    Raises LMKitError if one still runs `extra_seconds` after its drain, or cannot be signalled.
    """
    with contextlib.ExitStack() as stack:
        waiting = {}
        for entry in entries:
            try:
                process = os.pidfd_open(entry.pid)
                stack.callback(os.close, process)
                if _start(entry.pid) != entry.start:  # looked at after pidfd_open, which holds on to the process
                    raise ProcessLookupError
                signal.pidfd_send_signal(process, signal.SIGTERM)
            except ProcessLookupError:
                ended(entry)
            except OSError as error:
                raise LMKitError(f"process {entry.pid} cannot be stopped: {error.strerror}") from None
            else:
                waiting[process] = entry
        for process, entry in waiting.items():
            seconds = entry.drain_seconds + extra_seconds
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if not poll.poll(1000 * seconds):
                raise LMKitError(
                    f"process {entry.pid} still runs after {seconds:g} s; stop it once more to cut its requests off"
                )
            ended(entry)


def _folder() -> Path:
    """Not in XDG_RUNTIME_DIR, which is emptied at a logout that a server may outlive."""
    return environment().state_dir / "run"


def _write(folder: Path, entry: Entry) -> None:
    """Whole or not at all."""
    new = folder / f"{entry.file}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(msgspec.json.encode(entry))
    new.rename(folder / entry.file)


def _start(pid: int) -> int | None:
    """The start time of a process in clock ticks after the boot, or None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # Z: it ended, and its parent has not looked yet


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # hidden in some sandboxes
        return ""
