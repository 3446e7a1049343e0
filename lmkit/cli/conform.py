"""`lmkit conform URL`: what clients depend on, tried against any server."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer

Suite = Literal["openai", "responses", "messages", "ollama", "agents"]


def conform(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT of any server.")],
    suite: Annotated[Suite | None, typer.Option(help="One of the suites alone.")] = None,
    model: Annotated[str | None, typer.Option(help="A model of the server; default the only one it lists.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For the server; default LMKIT_API_KEY.")] = None,
) -> None:
    """Try what clients send, and show what the server passes and why it fails the rest. Status 1 if it fails any."""
    import httpx

    from lmkit.cli.chat_models import RemoteModel
    from lmkit.cli.table import print_table
    from lmkit.conform.case import Server
    from lmkit.conform.suites import SUITES, outcomes
    from lmkit.environment import environment
    from lmkit.web.client import client_options

    key = api_key or environment().api_key
    with closing(RemoteModel.connect(url, model, key, {})) as remote:
        name = remote.name
    with httpx.Client(**client_options(url, key, timeout=600)) as http:
        found = list(outcomes(Server(http, name), [suite] if suite else SUITES))
    print_table(
        ("suite", "case", "result", "reason"),
        [(case.suite, case.name, "failed" if reason else "passed", reason) for case, reason in found],
    )
    passed = sum(not reason for _, reason in found)
    print(f"{passed} of {len(found)} passed")
    raise typer.Exit(0 if passed == len(found) else 1)
