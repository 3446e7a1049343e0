"""The `lmkit` command. Each command's module parses, calls one function and prints. It imports the rest only then."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import lmkit
from lmkit import log
from lmkit.cli import (
    advise,
    bench,
    chat,
    conform,
    convert,
    doctor,
    eval,
    inspect,
    launch,
    models,
    proxy,
    quantize,
    replay,
    running,
    serve,
    tune,
    up,
)
from lmkit.cli.settings import ProxyGroup, ServeCommand
from lmkit.cli.usage import Command, Group, Root
from lmkit.config import require_linux
from lmkit.environment import calm_openmp, environment
from lmkit.errors import LMKitError

app = typer.Typer(
    cls=Root,
    help="Quantize large language models and serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
CLASSES = {"serve": ServeCommand}
# A short help is a line of `lmkit --help` that fits 80 columns.
for name, function, short_help in (
    ("quantize", quantize.quantize, "Quantize the weights of a checkpoint, and its KV cache."),
    ("convert", convert.convert, "Write a quantized checkpoint in another format."),
    ("serve", serve.serve, "Serve a model over HTTP with OpenAI's API."),
    ("up", up.up, "Start a proxy and its replicas, and keep them running."),
    ("chat", chat.chat, "Talk to a model or a server."),
    ("launch", launch.launch, "Run a coding agent, such as codex or claude, with a model."),
    ("eval", eval.evaluate, "Measure perplexity, and the distance between two models."),
    ("inspect", inspect.inspect, "Show a checkpoint, and the memory that serving it needs."),
    ("advise", advise.advise, "Show what requests contain, and which settings meet a target."),
    ("conform", conform.conform, "Try what clients send against any server."),
    ("replay", replay.replay, "Check a receipt, and compute its answer again."),
    ("list", models.list_models, "Show the models on this machine."),
    ("pull", models.pull, "Fetch a model from the Hugging Face Hub."),
    ("ps", running.ps, "Show the servers that run on this machine."),
    ("stop", running.stop, "End a server once its requests are answered."),
    ("tune", tune.tune, "Measure plans of a model's products and attention on this GPU."),
    ("doctor", doctor.doctor, "Show what this machine can run."),
):
    app.command(name, cls=CLASSES.get(name, Command), short_help=short_help)(function)
app.add_typer(proxy.app, name="proxy", cls=ProxyGroup, short_help="Put one address in front of many servers.")
app.add_typer(bench.app, name="bench", cls=Group, short_help="Measure the speed of a model or a server.")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(lmkit.__version__)
        raise typer.Exit


def main() -> None:
    """Run a command. A user's mistake is one line on stderr and exit code 2; Ctrl-C is exit code 130."""
    try:
        require_linux()
        calm_openmp()
        log.setup(environment().log_level)
        app(prog_name="lmkit")
    except LMKitError as error:
        print(f"lmkit: {error}", file=sys.stderr)
        sys.exit(2)
