"""The `lmkit` command. Each command's module parses, calls one function and prints. It imports the rest only then."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import lmkit
from lmkit import log
from lmkit.cli import bench, chat, convert, doctor, eval, inspect, proxy, quantize, serve
from lmkit.cli.settings import ServeCommand
from lmkit.config import environment
from lmkit.errors import LMKitError

app = typer.Typer(
    help="Quantize large language models and serve them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("quantize")(quantize.quantize)
app.command("convert")(convert.convert)
app.command("serve", cls=ServeCommand)(serve.serve)
app.add_typer(proxy.app, name="proxy")
app.command("chat")(chat.chat)
app.command("eval")(eval.evaluate)
app.add_typer(bench.app, name="bench")
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(lmkit.__version__)
        raise typer.Exit


def main() -> None:
    """Run a command. A user's mistake is one line on stderr and exit code 2; Ctrl-C is exit code 130."""
    try:
        log.setup(environment().log_level)
        app()
    except LMKitError as error:
        print(f"lmkit: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("lmkit: interrupted", file=sys.stderr)
        sys.exit(130)
