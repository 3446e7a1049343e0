"""`lmkit chat TARGET`: chat with a server, a proxy, or a checkpoint in this process."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit.cli.chat_conversation import Conversation, execute
from lmkit.cli.chat_models import LocalModel, RemoteModel, printable
from lmkit.cli.options import fields_of, takes
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError

FOLDER = ("kv_dtype", "kv_memory", "max_model_len", "generation_config")  # what is for a folder alone


@takes(of_folder=fields_of(EngineConfig, *FOLDER, group="Model in a folder", is_partial=True))
def chat(
    target: Annotated[
        str, typer.Argument(help='http://HOST:PORT of a server or proxy, a folder, a .gguf file, or "demo".')
    ],
    model: Annotated[str | None, typer.Option(help="A model of the server; default the only one it serves.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Answer this and exit; text piped to stdin works the same.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 = greedy; default the model's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="The most likely tokens alone; 0 = all.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="A share of the likeliest token's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of a text piped in is a message or a command of one chat.")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="For a server; default LMKIT_API_KEY.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, not as Markdown.")] = False,
    *,
    of_folder: dict[str, Any],
) -> None:
    """Talk to a model: interactively, or once with --prompt or piped text."""
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    options |= {"max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if any(not math.isfinite(value) for value in given.values()):
        raise ConfigError("--temperature, --top-p and --min-p must be finite numbers")
    from lmkit.web.listen import ADDRESS

    if ADDRESS.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"{target} is not a folder; for a server write http://{target}")
    if target.startswith(("http://", "https://")):
        from lmkit.environment import environment

        if of_folder:
            option = next(iter(of_folder)).replace("_", "-")
            raise ConfigError(f"--{option} is for a folder; {target} has its own")
        with closing(RemoteModel.connect(target, model, api_key or environment().api_key, given)) as remote:
            _talk(Conversation(remote, system), prompt, plain, lines=lines)
        return
    if model is not None or api_key is not None:
        raise ConfigError(f"--model and --api-key are for a server; {target} is a folder")
    from lmkit.turbo.transport.deferred import quick_start

    with quick_start():
        from lmkit import pipeline

        pipe = pipeline(target, log_level="WARNING", **of_folder)
    with pipe:
        if not pipe.engine.info.has_head:
            raise ConfigError(f"{target} generates no text; `lmkit serve {target}` serves its embeddings or classes")
        _talk(
            Conversation(LocalModel(pipe, given), system), prompt, plain, pipe.engine.info.sampling.text(), lines=lines
        )


def _talk(conversation: Conversation, prompt: str | None, plain: bool, note: str = "", *, lines: bool = False) -> None:
    if prompt is None and sys.stdin.isatty():
        from lmkit.cli.chat_terminal import Terminal

        Terminal(conversation, plain=plain).run(note)
        return
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty")
    for message in filter(str.strip, text.splitlines()) if lines and prompt is None else (text,):
        if message.strip() == "/exit" and lines:
            return
        before = None
        if message.startswith("/") and lines:
            said, message, before = execute(conversation, message.strip())
            print(shown(said), end="\n" if said else "")
        if message:
            _answer(conversation, message, before)


def _answer(conversation: Conversation, message: str, before: int | None) -> None:
    for piece in conversation.ask(message, before):
        if not piece.is_thought:
            print(shown(piece.text), end="", flush=True)
    print()


def shown(text: str) -> str:
    """An answer without control characters, which a terminal could take as commands."""
    return printable(text) if sys.stdout.isatty() else text
