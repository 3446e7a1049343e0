"""`lmkit launch CLIENT`: a coding agent with a model of a server that runs, or is started for it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer

from lmkit.errors import ConfigError, LMKitError

if TYPE_CHECKING:
    from lmkit.cli.agents import Agent, Target

START_SECONDS = 1800.0  # a large model is packed when it is served for the first time


def launch(
    client: Annotated[Literal["codex", "claude", "opencode", "qwen"], typer.Argument(help="The coding agent.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="For the client, after --.")] = None,
    model: Annotated[
        str | None, typer.Option(help="One that a server here has, or one to serve; default the only one that runs.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="http://HOST:PORT of the server; default one of `lmkit ps`.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For the server; default LMKIT_API_KEY.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print what would be run, and do not run it.")] = False,
) -> None:
    """Run a coding agent with a model of this machine or of a server. A server that is started ends with it."""
    from lmkit.cli.agents import AGENTS
    from lmkit.environment import child_environment, environment

    agent, extra = AGENTS[client], tuple(arguments or ())
    program = shutil.which(agent.command)
    if program is None and not show:
        raise ConfigError(f"{agent.command} is not installed: npm install -g {agent.package}")
    with _server(model, url, may_start=not show) as (address, name):
        settings = agent.settings(_target(agent, address, name, api_key or environment().api_key))
        if show:
            print(settings.shown(agent.command, extra))
            return
        assert program is not None
        status = _run([program, *settings.arguments, *extra], child_environment(**settings.variables))
    raise typer.Exit(status)


def _run(command: list[str], variables: dict[str, str]) -> int:
    """The exit status of a client that has the terminal. Ctrl-C is for it alone."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # the client does not inherit a handler
    try:
        with subprocess.Popen(command, env=variables) as process:
            status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _server(model: str | None, url: str | None, *, may_start: bool) -> Iterator[tuple[str, str | None]]:
    """The address of a server, and the name of its model if it is known. Raises ConfigError, LMKitError."""
    from lmkit.web.running import running

    if url is not None:
        yield url, model
        return
    entries = [entry for entry in running() if entry.url is not None]
    having = [entry for entry in entries if model is None or model in entry.name.split(",")]
    if len(having) == 1:
        yield str(having[0].url), model
    elif having:
        listed = ", ".join(f"{entry.name or 'a proxy'} ({entry.url})" for entry in having)
        raise ConfigError(f"several servers run: {listed}; choose one with --url")
    elif model is None:
        raise ConfigError("no server runs here; name a model to serve with --model, or a server with --url")
    elif not may_start:
        raise ConfigError(
            f"--print: no server here has {model}; `lmkit serve {model}` starts one, or name one with --url"
        )
    else:
        with _started(model) as address:
            yield address, None


@contextlib.contextmanager
def _started(model: str) -> Iterator[str]:
    """A server of a model, out of the terminal's reach, for as long as the block. Raises LMKitError."""
    from lmkit.web.running import running

    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "lmkit", "serve", model, "--port", "0"]
        print(f"serving {model} for this session", file=sys.stderr)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := [one.url for one in running() if one.pid == process.pid and one.url is not None]):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise LMKitError(_reason(log, model))
                time.sleep(0.1)
            yield str(found[0])
        finally:
            process.terminate()
            process.wait()


def _reason(log: IO[str], model: str) -> str:
    """Why a server did not start: its last line."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1].removeprefix("lmkit: ") if lines else f"`lmkit serve {model}` did not start"


def _target(agent: Agent, url: str, model: str | None, api_key: str | None) -> Target:
    """The model of a server, where it has what the client needs. Raises LMKitError."""
    from lmkit.cli.agents import Target
    from lmkit.cli.chat_models import RemoteModel

    with contextlib.closing(RemoteModel.connect(url, model, api_key, {})) as remote:
        name, card = remote.name, remote.card
    context = card.get("max_model_len")
    if isinstance(context, int) and context < agent.min_context:
        raise ConfigError(
            f"{name} is served with a context of {context} tokens, and {agent.title} needs {agent.min_context}: "
            f"serve it with --max-model-len {agent.min_context} or more, or take another model"
        )
    if "tool_parser" in card and card["tool_parser"] is None:
        raise ConfigError(f"{name} is served without calls of tools, which {agent.title} needs; see docs/tools.md")
    return Target(remote.url, name, context or agent.min_context, api_key)
