"""A field that changes nothing of an answer is left out and named; one that would change it is refused by name."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from typing import Any

import pytest

from lmkit.config import ServerConfig
from lmkit.text.chat.style import nearest_effort
from lmkit.text.template import ChatTemplate
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

IGNORED = "x-lmkit-ignored"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ITEMS: dict[str, Any] = {"model": "model", "input": "Hi", "store": False}
TURNS: dict[str, Any] = {"model": "model", "max_tokens": 4, "messages": CHAT["messages"]}
BODIES = {CHAT_PATH: CHAT, TEXT_PATH: TEXT, RESPONSES: ITEMS, MESSAGES: TURNS}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MARKED = {"type": "text", "text": "x", "cache_control": {}}
HI = {"role": "user", "content": "Hi"}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "x"}
USED: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
PART = {"type": "text", "text": "a"}


def names(path: str, change: dict[str, Any]) -> set[str]:
    """What is left out of a body that is answered."""
    answer = App(ScriptedEngine()).post(path, BODIES[path] | change)
    assert answer.status_code == 200, answer.text
    return set(answer.headers.get(IGNORED, "").split(",")) - {""}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [("client_metadata", {"turn": "t"}), ("num_ctx", 8192), ("keep_alive", "5m"), ("request_id", "r"), ("nonsense", 1)],
)
def test_a_field_that_changes_nothing_is_left_out_and_named(path: str, field: str, value: Any) -> None:
    assert names(path, {field: value}) == {field}
    strict = App(ScriptedEngine(), ServerConfig(strict_fields=True)).post(path, BODIES[path] | {field: value})
    assert strict.status_code == 400
    assert field in strict.text


@pytest.mark.parametrize("kind", [[], {}, None, 5, "nonsense"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_no_known_kind_is_refused(role: str, kind: Any) -> None:
    turns = [{"role": role, "content": [{"type": kind}]}, {"role": "user", "content": "Hi"}]
    answer = App(ScriptedEngine()).post("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"messages": turns})
    assert answer.status_code == 400
    assert "only parts" in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["stop_words", "max_length", "beam_width", "bad_words_ids", "temprature", "tenant"])
def test_a_field_that_would_change_the_answer_is_refused(path: str, field: str) -> None:
    engine = ScriptedEngine()
    answer = App(engine).post(path, BODIES[path] | {field: 3})
    if field == "bad_words_ids":  # nobody's field over HTTP
        assert answer.headers[IGNORED] == field
        return
    assert answer.status_code == 400
    assert field in answer.text
    assert not engine.requests


def test_the_header_has_no_characters_of_a_client_that_do_harm_and_an_end() -> None:
    many = {f"x{i}\r\nset-cookie: a=b": i for i in range(30)}
    answer = App(ScriptedEngine()).post(CHAT_PATH, CHAT | many)
    assert answer.headers[IGNORED].startswith("x0??set-cookie??a?b,")
    assert answer.headers[IGNORED].endswith(",...")
    assert "set-cookie" not in answer.headers
    too_many = App(ScriptedEngine()).post(CHAT_PATH, CHAT | {f"y{i}": i for i in range(300)})
    assert too_many.status_code == 400


def test_metrics_count_what_was_left_out() -> None:
    app = App(ScriptedEngine())
    for _ in range(3):
        app.post(CHAT_PATH, CHAT | {"client_metadata": {}, "surprise": 1})
    text = app.request("GET", "/metrics").text
    assert 'lmkit:ignored_fields_total{model_name="model"} 6.0' in text
    app.post(CHAT_PATH, CHAT | {"reasoning_effort": "high"})  # which is only seen while the prompt is written
    assert 'lmkit:ignored_fields_total{model_name="model"} 7.0' in app.request("GET", "/metrics").text


def test_other_names_of_our_fields_are_honoured() -> None:
    engine = ScriptedEngine()
    body = CHAT | {"min_new_tokens": 2, "repeat_penalty": 1.5, "session_id": 7, "logprob_start_len": 0}
    answer = App(engine).post(CHAT_PATH, body)
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers
    params = engine.requests[0].params
    assert (params.min_tokens, params.repetition_penalty) == (2, 1.5)
    assert engine.requests[0].session_id is not None
    differing = App(engine).post(CHAT_PATH, CHAT | {"min_new_tokens": 2, "min_tokens": 3})
    assert "differ" in differing.json()["error"]["message"]


def test_a_stream_may_be_asked_for_in_words() -> None:
    kinds = [App(ScriptedEngine()).post(CHAT_PATH, CHAT | {"stream": word}).headers["content-type"]
             for word in ("true", "false")]  # fmt: skip
    assert [kind.partition(";")[0] for kind in kinds] == ["text/event-stream", "application/json"]
    assert App(ScriptedEngine()).post(CHAT_PATH, CHAT | {"stream": "yes"}).status_code == 400


def test_mistrals_word_for_a_call_that_must_be_made() -> None:
    engine = ScriptedEngine()
    for choice in ("any", "required"):
        assert App(engine).post(CHAT_PATH, CHAT | {"tools": [TOOL], "tool_choice": choice}).status_code == 200
    first, second = engine.requests
    assert first.params.grammar == second.params.grammar != ""
    custom = App(engine).post(CHAT_PATH, CHAT | {"tools": [{"type": "custom", "custom": {"name": "f"}}]})
    assert custom.status_code == 400


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", "content": "a", **fields}, HI]}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}
    return {"tools": [TOOL], "messages": [HI, call, {"role": "tool", "tool_call_id": "c1", "content": content}]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (assistant(reasoning_content="r"), set()),
        (assistant(thinking_blocks=[{"type": "thinking", "thinking": "t"}]), {"thinking_blocks"}),
        (assistant(provider_specific_fields={"refusal": None}), {"provider_specific_fields"}),
        (assistant(reasoning_details=[{"type": "reasoning.text"}]), {"reasoning_details"}),
        (assistant(content=None, refusal="no"), set()),
        (assistant(reasoning={"text": "t"}), set()),
        (assistant(reasoning_content=[{"type": "text", "text": "t"}]), set()),
        (assistant(content=[{"type": "text", "text": None}]), set()),
        (assistant(id="m1", timestamp=1), {"id", "timestamp"}),
        (assistant(content=[{"type": "thinking", "thinking": "t", "signature": "s"}, PART]), set()),
        (assistant(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, PART]), set()),
        (assistant(content=[{"type": "redacted_thinking", "data": "x"}, PART]), {"content.thinking"}),
        (assistant(content=[{"type": "refusal", "refusal": "no"}]), set()),
        (assistant(content=[{"type": "output_text", "text": "a", "annotations": []}]), {"annotations"}),
        ({"messages": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]}, set()),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning.summary", "reasoning_effort"}),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, {"thinking.clear_thinking"}),
        (assistant(content=None), set()),
        (assistant(content=[]), set()),
        ({"messages": [{"role": "user", "content": None}, HI]}, set()),
        ({"messages": [HI | {"reasoning_content": "r"}]}, {"reasoning_content"}),
        ({"messages": [{"role": "user", "content": [MARKED]}]}, {"cache_control"}),
        ({"messages": [{"role": "user", "content": [PART | {"fps": 2}]}]}, {"fps"}),
        ({"messages": [HI | {"cache_control": {}}]}, {"cache_control"}),
        ({"tools": [TOOL | {"cache_control": {}}]}, {"cache_control"}),
        (result("x", extra_content={"google": {}}), {"extra_content"}),
        (result(None), set()),
        (result("x", function={"name": "f", "arguments": None}), set()),
        ({"reasoning_effort": "high"}, {"reasoning_effort"}),
        ({"reasoning_effort": 5}, {"reasoning_effort"}),
        ({"reasoning_effort": "as much as there is"}, {"reasoning_effort"}),
        ({"reasoning_format": "parsed", "models": ["a", "b"]}, {"models"}),
        ({"repeat_last_n": 64, "image_data": []}, {"repeat_last_n"}),
        ({"tools": [TOOL, {"type": "web_search", "web_search": {}}]}, {"tools.web_search"}),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}], "metadata": []}, set()),
    ],
)  # fmt: skip
def test_notes_of_the_history_do_not_end_a_conversation(change: dict[str, Any], named: set[str]) -> None:
    assert names(CHAT_PATH, change) == named


def test_thoughts_among_the_parts_of_a_turn_are_its_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", ChatTemplate(source))
    app = App(ScriptedEngine())
    told = [{"type": "thinking", "thinking": "t"}, {"type": "reasoning", "text": "u"}]
    for content in ([*told, PART], [PART, {"type": "thinking", "thinking": [{"type": "text", "text": "tu"}]}]):
        tokens = app.post("/tokenize", {"model": "model", **assistant(content=content)}).json()["tokens"]
        assert "[tu|a]" in TOKENIZER.decode(tokens, False)
    users = app.post(CHAT_PATH, CHAT | {"messages": [HI | {"content": [*told, PART]}]})
    assert users.status_code == 400


def test_a_refusal_is_the_text_of_its_turn() -> None:
    app = App(ScriptedEngine())
    said, refused = (
        app.post("/tokenize", {"model": "model", **assistant(**fields)}).json()["tokens"]
        for fields in ({"content": "no"}, {"content": None, "refusal": "no"})
    )
    assert said == refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": [SHELL, {"type": "web_search"}]}, {"tools.web_search"}),
        ({"tools": [SHELL | {"defer_loading": True}]}, {"defer_loading"}),
        ({"input": [HI, {"type": "web_search_call", "id": "w", "action": {}}, HI]}, {"input.web_search_call"}),
        ({"input": [{"type": "item_reference", "id": "x"}, HI]}, {"input.item_reference"}),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, HI]}, {"encrypted_content"}),
        ({"reasoning": {"effort": "xhigh", "summary": "detailed"}}, {"reasoning_effort"}),
        ({"reasoning": {"effort": 3, "summary": True, "context": "all_turns"}},
         {"reasoning_effort", "reasoning.summary", "reasoning.context"}),
        ({"tools": [SHELL, {"type": "mcp"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "shell"}, {"type": "mcp", "server_label": "x"}]}}, {"tools.mcp"}),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [SHELL, {"type": "mcp"}]}]}, {"tools.mcp"}),
        ({"input": [HI, CALLED | {"arguments": None}, RESULT | {"output": None}]}, set()),
        ({"input": [HI, CALLED | {"arguments": {"c": "x"}}, RESULT | {"output": {"content": "x"}}]}, set()),
        ({"input": [HI, {"role": "assistant", "content": None}, HI]}, set()),
        ({"service_tier": "priority", "prompt_cache_retention": "24h"}, {"service_tier", "prompt_cache_retention"}),
        ({"truncation": "auto"}, {"truncation"}),
        ({"input": [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, HI]}, set()),
        ({"include": ["reasoning.encrypted_content", "new.thing"]}, {"include.new.thing"}),
    ],
)  # fmt: skip
def test_what_other_servers_do_is_left_out_of_responses(change: dict[str, Any], named: set[str]) -> None:
    assert names(RESPONSES, change) == named


@pytest.mark.parametrize("reasoning", [{"context": "all_turns"}, {"summary": True}, {"effort": 3}])
def test_hints_about_reasoning_are_refused_where_fields_are_strict(reasoning: dict[str, Any]) -> None:
    strict = App(ScriptedEngine(), ServerConfig(strict_fields=True))
    assert strict.post(RESPONSES, ITEMS | {"reasoning": reasoning}).status_code == 400


def test_a_reference_is_the_item_of_a_stored_response() -> None:
    engine = ScriptedEngine()
    app = App(engine)
    first = app.post(RESPONSES, ITEMS | {"store": True}).json()
    (item,) = first["output"]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        answer = app.post(RESPONSES, ITEMS | {"store": True, "input": [HI, reference, HI]})
        assert IGNORED not in answer.headers
        said = [HI, {"role": "assistant", "content": item["content"][0]["text"]}, HI]
        assert engine.requests[-1].prompt_ids == TOKENIZER.encode_chat(said)
    listed = app.request("GET", f"{RESPONSES}/{answer.json()['id']}/input_items").json()["data"]
    assert [one["type"] for one in listed] == ["message"] * 3
    count = app.post(f"{RESPONSES}/input_tokens", {"model": "model", "input": [HI, reference, HI]}).json()
    assert count["input_tokens"] == len(engine.requests[-1].prompt_ids)
    strict = App(ScriptedEngine(), ServerConfig(strict_fields=True))
    unknown = strict.post(RESPONSES, ITEMS | {"input": [HI, {"type": "item_reference", "id": "msg_x"}]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "input")
    assert "msg_x" in unknown.text


def test_a_long_prompt_is_said_in_the_words_of_the_messages_api() -> None:
    app = App(ScriptedEngine())
    for words in (5000, 500_000):  # the second is too long for any tokenizing
        answer = app.post(MESSAGES, TURNS | {"messages": [HI | {"content": "word " * words}]})
        assert answer.status_code == 400
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 4096 maximum", answer.json()["error"]["message"])


def test_a_tool_that_is_left_out_cannot_be_forced() -> None:
    body = ITEMS | {"tools": [SHELL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    assert App(ScriptedEngine()).post(RESPONSES, body).status_code == 400


def test_calls_of_a_namespace_carry_its_name() -> None:
    written = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"c": "x"}}\n</tool_call>'
    engine = ScriptedEngine(lambda request: TOKENIZER.encode(written, False))
    space = {"type": "namespace", "name": "mcp__files", "tools": [SHELL | {"name": "read"}]}
    past = {"type": "function_call", "call_id": "c", "name": "read", "namespace": "mcp__files", "arguments": "{}"}
    history = [HI, past, {"type": "function_call_output", "call_id": "c", "output": "ok"}]
    body = ITEMS | {"tools": [SHELL, space], "input": history, "max_output_tokens": 60}
    answer = App(engine).post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    prompt = TOKENIZER.decode(engine.requests[0].prompt_ids, False)
    assert prompt.count("mcp__files__read") >= 2, "the tool and the past call"
    (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
    assert (call["name"], call["namespace"]) == ("read", "mcp__files")


@pytest.mark.parametrize(("definition", "is_held"), [('start: "a" | "b"', True), ('start: "a" start | "b"', False)])
def test_a_lark_grammar_is_told_to_the_model_and_held_where_a_pattern_says_it(definition: str, is_held: bool) -> None:
    engine = ScriptedEngine()
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    tool = {"type": "custom", "name": "apply_patch", "description": "d", "format": form}
    choice = {"type": "custom", "name": "apply_patch"}
    answer = App(engine).post(RESPONSES, ITEMS | {"tools": [tool], "tool_choice": choice})
    assert answer.headers.get(IGNORED) == (None if is_held else "tools.format.lark")
    assert "start:" in TOKENIZER.decode(engine.requests[0].prompt_ids, False)
    assert ('"pattern": ' in engine.requests[0].params.grammar) == is_held


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, {"reasoning_effort"}),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"tools.web_search_20250305"}),
        ({"messages": [HI, {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "gAAA"}, {"type": "server_tool_use", "id": "s"},
            {"type": "text", "text": "a"}]}, HI]}, {"redacted_thinking", "messages.server_tool_use"}),
        ({"messages": [HI, {"role": "assistant", "content": []}, HI]}, set()),
        ({"messages": [HI, {"role": "assistant", "content": None}, HI]}, set()),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "a", "citations": [{}]}]}, HI]},
         {"citations"}),
        ({"messages": [HI, {"role": "assistant", "content": [USED | {"input": None}]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
            ]}]}]}, set()),
        ({"thinking": {"type": "auto"}}, {"thinking.type"}),
        ({"thinking": {"type": "enabled"}}, {"thinking.budget_tokens"}),
        ({"service_tier": "priority", "speed": "fast"}, {"speed"}),
    ],
)  # fmt: skip
def test_what_other_servers_do_is_left_out_of_messages(change: dict[str, Any], named: set[str]) -> None:
    assert names(MESSAGES, change) == named


def schema_of(prop: dict[str, Any]) -> dict[str, Any]:
    kind = {"type": "string", "enum": ["x"]}
    return {"type": "object", "properties": {"kind": kind, "a": prop}, "required": ["kind", "a"]}


@pytest.mark.parametrize(
    ("prop", "named"),
    [
        ({"type": "string", "format": "path"}, set()),
        ({"type": "string", "format": "regex", "contentEncoding": "base64"}, set()),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": True}, set()),
        ({"type": "object", "dependentRequired": {}, "minProperties": 0, "unevaluatedProperties": True}, set()),
        ({"type": "string", "not": {"type": "null"}}, set()),
        ({"type": "array", "uniqueItems": False}, set()),
        ({"type": "array", "uniqueItems": True}, {"schema.uniqueItems"}),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"schema.propertyNames"}),
        ({"type": "string", "pattern": "^(?=a)b"}, {"schema.pattern"}),
        ({"type": "string", "pattern": "^\\bab?$"}, {"schema.pattern"}),
        ({"type": "string", "pattern": "(["}, {"schema.pattern"}),
        ({"type": "string", "pattern": "^\\p{L}\\x{61}$"}, set()),
        ({"type": "any"}, {"schema.type"}),
        ({"type": ["string", "file"]}, {"schema.type"}),
        ({"$ref": "https://example.com/x.json"}, {"schema.$ref".replace("$", "?")}),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, {"schema.if", "schema.then"}),
        ({"type": "object", "properties": {"uniqueItems": {"type": "integer"}}}, set()),
    ],
)
def test_a_schema_loses_only_what_no_grammar_holds(prop: dict[str, Any], named: set[str]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema_of(prop)}}
    assert names(CHAT_PATH, {"response_format": form}) == named
    engine = ScriptedEngine()
    tool = {"type": "function", "function": {"name": "f", "parameters": schema_of(prop)}}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert App(engine).post(CHAT_PATH, CHAT | forced).status_code == 200
    assert "kind" in engine.requests[0].params.grammar, "the rest of the schema is held"
    form["json_schema"]["strict"] = True  # type: ignore[index]
    strict = App(ScriptedEngine()).post(CHAT_PATH, CHAT | {"response_format": form})
    assert strict.status_code == (400 if named else 200)


def test_an_effort_becomes_the_nearest_that_the_template_names() -> None:
    source = "{% if reasoning_effort == 'minimal' %}"
    for asked, found in (
        ("none", "minimal"),
        ("minimal", "minimal"),
        ("xhigh", "high"),
        ("max", "high"),
        ("low", "low"),
    ):
        assert nearest_effort(asked, source) == found
    assert nearest_effort("none", "") == "low"
    assert nearest_effort("my own", "") == "my own"


def test_a_byte_order_mark_may_stand_before_a_body() -> None:
    body, headers = codecs.BOM_UTF8 + json.dumps(CHAT).encode(), {"content-type": "application/json"}
    assert App(ScriptedEngine()).request("POST", CHAT_PATH, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_packed_bodies_are_unpacked_within_the_limit(coding: str) -> None:
    pack = gzip.compress if coding == "gzip" else zlib.compress
    headers = {"content-type": "application/json", "content-encoding": coding}
    app = App(ScriptedEngine(), ServerConfig(max_body_bytes=4096, body_memory=8192))
    body = json.dumps(CHAT).encode()
    assert app.request("POST", CHAT_PATH, content=pack(body), headers=headers).status_code == 200
    bomb = app.request("POST", CHAT_PATH, content=pack(body + b" " * (1 << 20)), headers=headers)
    assert bomb.status_code == 413
    assert "--max-body" in bomb.text
    two = pack(body[:9]) + pack(body[9:])  # members of gzip
    assert app.request("POST", CHAT_PATH, content=two, headers=headers).status_code == 200
    many = pack(b"") * 100 + pack(body)  # what follows each is copied
    for damaged in (body, pack(body)[:-9], many):
        assert app.request("POST", CHAT_PATH, content=damaged, headers=headers).status_code == 400
    other = app.request("POST", CHAT_PATH, content=body, headers=headers | {"content-encoding": "zstd"})
    assert other.status_code == 415
    assert "gzip" in other.text
