"""The suites, in the order in which a table shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmkit.conform import (  # noqa: F401 - each adds its cases
    accepted,
    agents,
    messages,
    ollama,
    openai,
    responses,
    schemas,
    streams,
    wire,
)
from lmkit.conform.case import CASES, Case, Server

SUITES = ("openai", "responses", "messages", "ollama", "agents")


def outcomes(server: Server, suites: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Each case of these suites and why the server fails it; empty = passed."""
    for suite in suites:
        for case in CASES:
            if case.suite == suite:
                yield case, case.outcome(server)
