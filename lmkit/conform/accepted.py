"""What changes nothing of an answer and must be accepted: hints, annotations, and items of a history. A table."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from lmkit.conform import messages, openai, responses
from lmkit.conform.case import Server, case, each, need
from lmkit.conform.openai import CALL, CHAT, HI

Bodies = dict[str, dict[str, Any]]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "Say hi."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch", "format": LARK}
SPACE = {"type": "namespace", "name": "files", "description": "Files", "tools": [responses.TOOL]}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
SUMMARY = [{"type": "summary_text", "text": "Think."}]
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "a"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
CALLED = {"type": "function_call", "call_id": "c", "name": "choose", "namespace": "files", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "done"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "choose", "input": {"kind": "a"}}


def said(**fields: Any) -> dict[str, Any]:
    """A history whose answer has these fields."""
    return {"messages": [HI, {"role": "assistant", "content": "Hi.", **fields}, HI]}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    """A history whose call has these fields and this result."""
    call = {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}
    turns = [HI, call, {"role": "tool", "tool_call_id": "call_1", "content": content}]
    return {"messages": turns, "tools": [openai.TOOL]}


def after(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input": [HI, *items, HI], **fields}


def blocks(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", "content": list(content)}, HI], **fields}


def tools(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [responses.TOOL, *kinds]}


class Row(NamedTuple):
    suite: str
    name: str
    path: str
    bodies: Bodies


ROWS = (
    Row("openai", "reasoning_effort of any value", CHAT, {one: {"reasoning_effort": one} for one in EFFORTS}),
    Row("openai", "hints of other servers and clients", CHAT, {
        "prompt_cache_key": {"prompt_cache_key": "k"}, "prompt_cache_retention": {"prompt_cache_retention": "24h"},
        "safety_identifier": {"safety_identifier": "u"}, "service_tier": {"service_tier": "priority"},
        "user": {"user": "u"}, "num_ctx, keep_alive": {"num_ctx": 4096, "keep_alive": "5m"},
        "logprob_start_len": {"logprob_start_len": 0}, "session_id": {"session_id": 7},
        "repeat_penalty 1": {"repeat_penalty": 1.0}, "min_new_tokens": {"min_new_tokens": 1},
    }),
    Row("openai", "what clients hand back in a history", CHAT, {
        "reasoning_content": said(reasoning_content="Think."),
        "thinking_blocks": said(thinking_blocks=[{"type": "thinking", "thinking": "t", "signature": "s"}]),
        "reasoning_details": said(reasoning_details=[{"type": "reasoning.text", "text": "t"}]),
        "provider_specific_fields": said(provider_specific_fields={"refusal": None}),
        "refusal": said(content=None, refusal="no"), "id, timestamp": said(id="m1", timestamp=1),
        "annotations, audio": said(annotations=[], audio=None, function_call=None),
        "cache_control": said(**MARK),
        "cache_control of a part": {"messages": [HI | {"content": [TEXT | MARK]}]},
        "cache_control of a tool": {"messages": [HI], "tools": [openai.TOOL | MARK]},
    }),
    Row("openai", "contents and arguments that are empty", CHAT, {
        "an answer of null": said(content=None), "an answer of ''": said(content=""),
        "an answer of []": said(content=[]), "a user's ''": {"messages": [HI, HI | {"content": ""}]},
        "a system's ''": {"messages": [{"role": "system", "content": ""}, HI]},
        "a result of null": result(None), "a result of ''": result(""),
        "arguments of null": result("x", function={"name": "choose", "arguments": None}),
        "arguments of ''": result("x", function={"name": "choose", "arguments": ""}),
        "extra_content": result("x", extra_content={"google": {"thought_signature": "x"}}),
    }),
    Row("responses", "reasoning.effort and summary of any value", responses.PATH, {
        **{one: {"reasoning": {"effort": one}} for one in EFFORTS},
        **{one: {"reasoning": {"summary": one}} for one in ("auto", "concise", "detailed")},
    }),
    Row("responses", "hints", responses.PATH, {
        "client_metadata": {"client_metadata": {"turn": "1"}}, "service_tier": {"service_tier": "priority"},
        "prompt_cache_key": {"prompt_cache_key": "k"}, "prompt_cache_retention": {"prompt_cache_retention": "24h"},
        "truncation auto": {"truncation": "auto"}, "metadata": {"metadata": {"k": "v"}}, "user": {"user": "u"},
    }),
    Row("responses", "tools that this server cannot run", responses.PATH, {
        kind: tools({"type": kind}) for kind in ("web_search", "image_generation", "tool_search", "local_shell")
    }),
    Row("responses", "tools of a namespace, custom tools, defer_loading", responses.PATH, {
        "namespace": tools(SPACE), "a Lark grammar": tools(PATCH),
        "custom": tools({"type": "custom", "name": "note"}),
        "defer_loading": {"tools": [responses.TOOL | {"defer_loading": True}]},
    }),
    Row("responses", "items of a history", responses.PATH, {
        "web_search_call": after(SEARCHED),
        "reasoning": after({"type": "reasoning", "id": "rs_1", "summary": []}),
        "a summary": after({"type": "reasoning", "summary": SUMMARY}),
        "encrypted_content": after({"type": "reasoning", "summary": [], "encrypted_content": "c2VhbGVk"}),
        "a call of a namespace": after(CALLED, RESULT, **tools(SPACE)),
        "a custom call": after(CUSTOM, CUSTOM_RESULT, **tools(PATCH)),
        "a phase": after({"role": "assistant", "content": "Hi.", "phase": "commentary"}),
    }),
    Row("messages", "output_config.effort of any value", messages.PATH, {
        one: {"output_config": {"effort": one}} for one in EFFORTS[2:]
    }),
    Row("messages", "thinking and other hints", messages.PATH, {
        "adaptive": {"thinking": {"type": "adaptive"}}, "disabled": {"thinking": {"type": "disabled"}},
        "metadata": {"metadata": {"user_id": "u"}}, "service_tier": {"service_tier": "auto"},
        "context_management": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        "cache_control": MARK, "cache_control of a tool": {"tools": [messages.TOOL | MARK]},
        "cache_control of the system": {"system": [TEXT | MARK]},
    }),
    Row("messages", "blocks of a history", messages.PATH, {
        "thinking": blocks({"type": "thinking", "thinking": "t", "signature": "s"}, TEXT),
        "redacted_thinking": blocks({"type": "redacted_thinking", "data": "c2VhbGVk"}, TEXT),
        "cache_control": blocks(TEXT | MARK), "citations": blocks(TEXT | {"citations": None}),
        "a call without a result": blocks(TOOL_USE, tools=[messages.TOOL]),
    }),
    Row("ollama", "hints", "/api/chat", {
        "keep_alive": {"keep_alive": "5m"}, "keep_alive -1": {"keep_alive": -1}, "think": {"think": False},
        "options": {"options": {"num_predict": 1, "num_ctx": 512, "num_gpu": 1, "use_mmap": True}},
    }),
    Row("ollama", "history of calls, results, and thinking", "/api/chat", {
        "a call": {"messages": [
            HI, {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "choose", "arguments": {"kind": "a"}}},
            ]}, {"role": "tool", "content": "done", "tool_name": "choose"},
        ], "tools": [openai.TOOL]},
        "thinking": said(thinking="Think."), "images": said(images=[]),
    }),
)  # fmt: skip

# path -> (fields of a request that says hi, the key of its answer)
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": [HI], "max_tokens": 1}, "choices"),
    responses.PATH: ({"input": "Say hi.", "max_output_tokens": 1, "store": False}, "output"),
    messages.PATH: ({"messages": [HI], "max_tokens": 1}, "content"),
    "/api/chat": ({"messages": [HI], "stream": False, "options": {"num_predict": 1}}, "message"),
}


def accepts(row: Row, server: Server) -> None:
    """Each body is answered, and the answer has the key of its route."""
    plain, key = PLAIN[row.path]

    def answered(name: str) -> None:
        need(key in server.post(row.path, plain | row.bodies[name]), f"an answer without {key}")

    each(row.bodies, answered)


for _row in ROWS:
    case(_row.suite, _row.name)(partial(accepts, _row))
