"""Custom tools of the Responses API: the input of a call is one text."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkit.serve.responses.custom import InputText, arguments_of, input_of
from tests.serve.fake_engine import script
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine

PATH = "/v1/responses"
PATCH = '*** Begin\n+ "ü" \\ 🙂\n'
TOOL: Any = {"type": "custom", "name": "patch", "description": "Change files"}


def written(text: str) -> str:
    call = json.dumps({"name": "patch", "arguments": {"input": text}})
    return f"I change it.\n<tool_call>\n{call}\n</tool_call>"


@given(st.text(), st.booleans(), st.integers(1, 9))
def test_the_input_comes_whole_however_its_arguments_are_cut(text: str, ascii_only: bool, size: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = InputText()
    parts = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(parts) == input_of(arguments) == text
    assert not any(0xD800 <= ord(char) < 0xE000 for part in parts for char in part)
    assert json.loads(arguments_of(text)) == {"input": text}
    assert text.startswith(input_of(arguments[: len(arguments) // 2]))


def test_a_call_its_events_and_its_result(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": script([written(PATCH), "Done."])}]
    ask: dict[str, Any] = {"model": "demo", "tools": [TOOL], "max_output_tokens": 300}
    whole = client.responses.create(**ask, input=asked)
    message, call = whole.output
    assert (message.type, call.type, call.name, call.input) == ("message", "custom_tool_call", "patch", PATCH)
    assert whole.tools[0].to_dict() == {"format": {"type": "text"}, **TOOL}
    events = list(client.responses.create(**ask, input=asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == PATCH
    assert events[-1].response.output[-1].input == PATCH
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert (added[-1].type, added[-1].input) == ("custom_tool_call", "")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "RESULT"}
    for history in ({"input": [*asked, *whole.output, result]}, {"input": [result], "previous_response_id": whole.id}):
        assert client.responses.create(**ask, **history).output_text == "Done."  # type: ignore[call-overload]
    assert client.responses.input_items.list(whole.id).data[0].type == "message"


def test_a_pattern_holds_the_input() -> None:
    engine = ScriptedEngine()
    form = {"type": "grammar", "syntax": "regex", "definition": r"[0-9]+ days"}
    body: Any = {
        "model": "model",
        "input": "Hi",
        "tools": [{**TOOL, "format": form}],
    }
    body["tool_choice"] = {"type": "custom", "name": "patch"}
    assert App(engine).post(PATH, body).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert re.search(r"\[0-9\]\+ days", grammar)
    for change, message in (
        ({"definition": "(?=a)b"}, "patch"),
        ({"type": "cfg"}, "grammar"),
    ):
        refused = App(engine).post(PATH, body | {"tools": [{**TOOL, "format": form | change}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools"), refused.text
        assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize(("asked", "told"), [("low", "short"), ("high", "at length"), ("medium", ""), (None, "")])
def test_verbosity_is_told_in_the_prompt(asked: str | None, told: str) -> None:
    engine = ScriptedEngine()
    app, chat = App(engine), [{"role": "user", "content": "Hi"}]
    text = {"verbosity": asked}
    app.post(PATH, {"model": "model", "input": "Hi", "text": text})
    app.post("/v1/chat/completions", {"model": "model", "messages": chat, "verbosity": asked})
    app.post(PATH, {"model": "model", "input": "Hi", "instructions": "Be kind.", "text": text})
    response, chat_prompt, instructed = (TOKENIZER.decode(request.prompt_ids, False) for request in engine.requests)
    assert response == chat_prompt
    assert told in response
    assert response.count("system") == bool(told)
    assert re.search(rf"Be kind\..*{told}", instructed, re.DOTALL)
    assert instructed.count("system") == 1
