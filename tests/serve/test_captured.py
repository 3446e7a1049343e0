"""First requests of real clients, with their texts shortened: answered, and no tool loses its schema.

`make test-clients` runs the clients themselves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.serve.in_process import CHAT, CHAT_PATH, TOKENIZER, App, ScriptedEngine

FOLDER = Path(__file__).parent / "captured"
CAPTURED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
IGNORED = {"codex": {"client_metadata", "tools.web_search"}, "claude": {"reasoning_effort"}}
MOST_TOKENS = 1500
CLOSING = frozenset('"}],:')  # without a bias for them a random string has no end; a URI has none without a colon
BITS = np.arange(32, dtype=np.uint32)


def functions(client: str) -> Iterator[dict[str, Any]]:
    """The tools of a request as functions of a chat."""
    for tool in CAPTURED[client]["body"]["tools"]:
        for one in tool.get("tools", [tool]):
            about = one.get("function", one)
            if schema := about.get("parameters") or about.get("input_schema"):
                yield {"name": about["name"], "parameters": schema}


FUNCTIONS = [(client, function) for client in CAPTURED for function in functions(client)]


@pytest.mark.parametrize("client", CAPTURED)
def test_the_first_request_is_answered(client: str) -> None:
    captured, engine = CAPTURED[client], ScriptedEngine(max_model_len=1 << 17)
    body = captured["body"] | {"model": "model"}
    headers = {name: value for name, value in captured["headers"].items() if name.startswith("anthropic")}
    answer = App(engine).request("POST", captured["path"], json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert set(filter(None, answer.headers.get("x-lmkit-ignored", "").split(","))) == IGNORED.get(client, set())
    prompt = TOKENIZER.decode(engine.requests[0].prompt_ids, False)
    assert all(function["name"] in prompt for function in functions(client))


def written(grammar: str, seed: int) -> str:
    """A random text of a grammar."""
    guide, draw, ids = TOKENIZER.grammars(4096).guide(grammar), random.Random(seed), list[int]()
    while len(ids) < MOST_TOKENS:
        allowed = np.flatnonzero((guide.allowed.view(np.uint32)[:, None] >> BITS & 1).ravel()).tolist()
        if 2 in allowed:  # the end of the answer
            break
        some = draw.sample(allowed, min(64, len(allowed)))
        ids.append(draw.choice([token for token in some if CLOSING & set(TOKENIZER.decode([token]))] or allowed))
        guide.advance(ids[-1:])
    return TOKENIZER.decode(ids, False)


@pytest.mark.parametrize("num_seeds", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("client", "function"), FUNCTIONS, ids=[f"{c}-{f['name']}" for c, f in FUNCTIONS])
def test_every_schema_is_held(client: str, function: dict[str, Any], num_seeds: int) -> None:
    forced = {"type": "function", "function": {"name": function["name"]}}
    engine = ScriptedEngine()
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": forced}
    answer = App(engine).post(CHAT_PATH, body)
    assert answer.status_code == 200, answer.text
    assert "x-lmkit-ignored" not in answer.headers, "a part of the schema was left out"
    for seed in range(num_seeds):
        text = written(engine.requests[0].params.grammar, seed)
        call = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
        assert call["name"] == function["name"]
        jsonschema.validate(call["arguments"], function["parameters"])


def test_the_captured_tools_are_all_there() -> None:
    assert len(FUNCTIONS) == 61
