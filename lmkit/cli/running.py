"""`lmkit ps` and `lmkit stop`: the servers and proxies of this user on this machine."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.errors import ConfigError

if TYPE_CHECKING:
    from lmkit.web.running import Entry


def ps(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the servers and proxies that this user runs on this machine.

    "used" is the memory that a server and its engines have now, "reserved" what they take at most.
    """
    from lmkit.cli.progress import duration
    from lmkit.cli.table import print_table
    from lmkit.turbo.host_memory import gib
    from lmkit.web.running import running

    entries = running()
    if json:
        rows = [
            {
                "pid": entry.pid,
                "kind": entry.kind,
                "model": entry.name or None,
                "url": entry.url,
                "uptime_seconds": round(entry.seconds, 1),
                "memory_bytes": _memory(entry.pid),
                "reserved_bytes": entry.reserved,
            }
            for entry in entries
        ]
        print(jsonlib.dumps(rows, indent=2))
    elif not entries:
        print("nothing runs; `lmkit serve MODEL` starts a server")
    else:
        print_table(
            ("pid", "model", "address", "uptime", "used", "reserved"),
            [
                (
                    str(e.pid),
                    _name(e),
                    e.url or "loading",
                    duration(e.seconds),
                    gib(_memory(e.pid)),
                    "" if e.reserved is None else gib(e.reserved),
                )
                for e in entries
            ],
            right=("pid", "uptime", "used", "reserved"),
        )


def stop(
    which: Annotated[
        str | None, typer.Argument(metavar="NAME|PORT|PID", help="Which server, as `lmkit ps` shows it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All servers and proxies.")] = False,
) -> None:
    """Let a server finish its requests, then end it."""
    from lmkit.web import running

    if (which is None) != every:
        raise ConfigError("stop: name a model, a port or a process id as `lmkit ps` shows them, or --all")
    entries = running.running()
    chosen = entries if which is None else _chosen(which, entries)
    if not chosen:
        print("nothing runs")
        return
    print(f"waiting for running requests, {max(entry.drain_seconds for entry in chosen):g} s at most", flush=True)
    try:
        running.stop(chosen, lambda entry: print(f"stopped {_name(entry)} ({entry.url or entry.pid})", flush=True))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the servers still drain, and end by themselves") from None


def _chosen(which: str, entries: list[Entry]) -> list[Entry]:
    chosen = [entry for entry in entries if which in (_name(entry), entry.url, str(entry.port), str(entry.pid))]
    if len(chosen) == 1:
        return chosen
    listed = ", ".join(f"{_name(e)} (pid {e.pid}, {e.url or 'loading'})" for e in chosen or entries)
    if chosen:
        raise ConfigError(f"stop: {len(chosen)} servers are {which}: {listed}; name one by its port or pid")
    raise ConfigError(f"stop: no server is {which}; {f'there are {listed}' if entries else 'nothing runs'}")


def _name(entry: Entry) -> str:
    return entry.name or "proxy"


def _memory(pid: int) -> int:
    """Resident bytes of a process and its children, for a server's engine is one."""
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.Error:  # it ends this moment
        return 0
