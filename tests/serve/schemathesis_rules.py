"""Hooks for schemathesis: why a body that /openapi.json allows may be refused. Its own rule is that none is.

    SCHEMATHESIS_HOOKS=tests.serve.schemathesis_rules st --config-file tests/serve/schemathesis.toml \\
        run URL/openapi.json --exclude-path /metrics --phases coverage,stateful

A reason is what no schema says: what this model or server has, what a text means, and how many tokens it has.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

REASONS = (
    # of the model and its server
    r"no classes", r"chat template", r"images", r"token id \S+ is not in", r"maximum context length",
    r"the answer could",
    r"adapter", r"a queue's share|queue", r"is not stored here", r"is not supported by this server", r"reads text",
    # of texts
    r"no tokens", r"is empty", r"regex|pattern|grammar|schema|lark|guided|structur|ebnf", r"response_format|format: ",
    r"another server wrote it", r"the last message must be a text", r"are not supported: send",
    r"is not in tools|no tools to choose from|same name",
    # of fields that exclude each other
    r"send one|send either|given twice|differ|go(es)? with|does not go|needs? |leave it out|cannot be streamed",
    r"unknown parameter",  # of /generate, whose body may have fields of several servers
    r"must be in \[0, max_(output_)?tokens\]",
    r"at most|at least|exceeds", r"base64|url|address",
)  # fmt: skip
REASON = re.compile("|".join(REASONS), re.IGNORECASE)


@schemathesis.check
def refusals_have_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """A body that fits the schema is taken, or refused for one of REASONS."""
    mode = case.meta.generation.mode if case.meta is not None else None
    if response.status_code == 400 and mode == schemathesis.GenerationMode.POSITIVE:
        message = response.json()["error"]["message"]
        assert REASON.search(message), message
