"""What the server lets the engine compute ahead is how the next prompt begins, in every API and by every template."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import msgspec
import pytest

from lmkit.config import ServerConfig
from lmkit.serve.next_turn import NextTurns
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text.dialects import DIALECTS
from lmkit.turbo.request import TURN, Request, SamplingParams
from tests.proxy.fakes import Exchange, FakeNode, client, nodes, proxy_for
from tests.serve import in_process
from tests.serve.in_process import CHAT_PATH, App, ScriptedEngine
from tests.text.dialects.answers import with_marks

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CALLED = 'So.\n</think>\n\nI look.<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
SAID = "Done.\n</think>\n\nIt is 1."
WORDS = "the answer of 42"
TYPE = "application/json"
# whether reasoning is written: always, never, or until the user speaks again
TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>tools {{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and (WRITTEN) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
RULES = {"kept": "true", "stripped": "false", "until the user speaks": "loop.index > ns.last"}


class Engine(ScriptedEngine):
    """Calls a tool, then answers, and so on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        def answer(request: Request) -> list[int]:
            text = (CALLED, SAID)[len(self.requests) % 2 == 0]
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]

        super().__init__(answer, finish_reason="stop")
        assert self.info is not None
        self.info = msgspec.structs.replace(self.info, vocab_size=tokenizer.vocab_size)
        self.prepared: list[Request] = []

    def prepare(self, request: Request) -> None:
        self.prepared.append(request)


@pytest.fixture(params=RULES)
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    made = with_marks(DIALECTS["hermes"])
    made.chat_template = ChatTemplate(TEMPLATE.replace("WRITTEN", RULES[request.param]))
    monkeypatch.setattr(in_process, "TOKENIZER", made)
    return made


def converse(engine: Engine, path: str, bodies: list[Any], config: ServerConfig | None = None) -> None:
    """Send bodies one after the other, each made from the answer before it, and wait for what is prepared."""
    app = App(engine, config)

    async def main() -> None:
        transport, answer = httpx.ASGITransport(app.app), None
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for make in bodies:
                response = await client.post(path, json=make(answer))
                assert response.status_code == 200, response.text
                answer = response.json() if response.text.startswith("{") else response.text
                if (task := app.serving.next_turns._task) is not None:
                    await task

    asyncio.run(main())


def check(engine: Engine, tokenizer: Tokenizer) -> None:
    """All that stands before what came next was prepared."""
    assert len(engine.prepared) == len(engine.requests)
    for before, ahead, after in zip(engine.requests[:-1], engine.prepared, engine.requests[1:], strict=False):
        ids = ahead.prompt_ids
        assert ids[: len(before.prompt_ids) // 2] == before.prompt_ids[: len(before.prompt_ids) // 2]
        assert ids == after.prompt_ids[: len(ids)]
        assert tokenizer.decode(after.prompt_ids[len(ids) :], skip_special_tokens=False).startswith(WORDS)
        assert (ahead.params.max_tokens, ahead.is_ahead, ahead.priority) == (0, True, 0)
        assert (ahead.tenant, ahead.cache_salt) == (before.tenant, before.cache_salt)


@pytest.mark.parametrize("brings", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat(tokenizer: Tokenizer, stream: bool, brings: bool) -> None:
    """A client that brings reasoning back shows it from its second turn on."""
    body: dict[str, Any] = {"model": "model", "tools": [TOOL], "stream": stream, "cache_salt": "s"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    if brings:
        messages += [{"role": "assistant", "content": "x", "reasoning": "y"}, {"role": "user", "content": "And?"}]

    def more(answer: Any) -> dict[str, Any]:
        message = answer["choices"][0]["message"] if isinstance(answer, dict) else streamed(answer)
        kept = ("role", "content", "tool_calls", *(("reasoning",) if brings else ()))
        messages.append({name: message[name] for name in kept if message.get(name)})
        calls = message.get("tool_calls")
        own = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        messages.append({"content": WORDS, **own})
        return body | {"messages": list(messages)}

    engine = Engine(tokenizer)
    converse(engine, CHAT_PATH, [lambda _: body | {"messages": list(messages)}, more, more, more])
    check(engine, tokenizer)
    sessions = [request.session_id for request in engine.prepared]
    assert [session is not None for session in sessions] == [True, False, True, False]
    assert (sessions[0] or "").startswith(TURN)
    assert sessions[2] == sessions[0] or brings


def streamed(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    for line in text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for name in ("content", "reasoning"):
                message[name] += choice["delta"].get(name) or ""
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    message.setdefault("tool_calls", []).append(part)
                else:
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


def test_messages(tokenizer: Tokenizer) -> None:
    tool = {"name": "f", "input_schema": PARAMETERS}
    body = {"model": "model", "max_tokens": 99, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    body |= {"thinking": {"type": "adaptive"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]

    def more(answer: dict[str, Any]) -> dict[str, Any]:
        messages.append({"role": "assistant", "content": answer["content"]})
        used = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        result = [{"type": "tool_result", "tool_use_id": id, "content": WORDS} for id in used]
        messages.append({"role": "user", "content": result or WORDS})
        return body | {"messages": list(messages)}

    engine = Engine(tokenizer)
    converse(engine, "/v1/messages", [lambda _: body | {"messages": list(messages)}, more, more])
    check(engine, tokenizer)


@pytest.mark.parametrize("stored", [True, False])
def test_responses(tokenizer: Tokenizer, stored: bool) -> None:
    tool = {"type": "function", "name": "f", "parameters": PARAMETERS}
    body: dict[str, Any] = {"model": "model", "tools": [tool], "store": stored}
    items: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]

    def more(answer: dict[str, Any]) -> dict[str, Any]:
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        new = [{"type": "function_call_output", "call_id": id, "output": WORDS} for id in calls]
        new = new or [{"role": "user", "content": WORDS}]
        items.extend([*answer["output"], *new])
        return body | ({"input": new, "previous_response_id": answer["id"]} if stored else {"input": list(items)})

    engine = Engine(tokenizer)
    converse(engine, "/v1/responses", [lambda _: body | {"input": list(items)}, more, more])
    check(engine, tokenizer)


def test_behind_a_proxy_the_node_that_answered_has_the_next_turn(tokenizer: Tokenizer) -> None:
    """Two agents on two nodes: each goes on where its next turn was prepared."""
    engines = [Engine(tokenizer), Engine(tokenizer)]
    bodies: list[dict[str, Any]] = [
        {"model": "model", "tools": [TOOL], "messages": [{"role": "user", "content": f"{text} " * 200}]}
        for text in ("Look at all files", "Count the words")
    ]

    def node(engine: Engine, name: str) -> FakeNode:
        app = App(engine)

        async def script(exchange: Exchange) -> None:
            request = exchange.request
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url="http://localhost") as http:
                answer = await http.post(request.target, content=request.body, headers={"content-type": TYPE})
            if (task := app.serving.next_turns._task) is not None:
                await task
            await exchange.reply(answer.status_code, answer.json())

        return FakeNode(name, ("model",), script=script)

    async def main() -> None:
        both = node(engines[0], "a"), node(engines[1], "b")
        async with nodes(*both), proxy_for(*both) as (_, url), client(url) as http:
            for turn, body in itertools.product(range(4), bodies):
                before = [len(engine.requests) for engine in engines]
                response = await http.post(CHAT_PATH, json=body)
                assert response.status_code == 200, response.text
                answer = response.json()["choices"][0]["message"]
                (here,) = [engine for engine, n in zip(engines, before, strict=True) if len(engine.requests) > n]
                ids = here.requests[-1].prompt_ids
                made = [ahead.prompt_ids for ahead in here.prepared]
                known = [len(begin) for begin in made if begin == ids[: len(begin)]]
                assert not turn or tokenizer.decode(ids[max(known) :], skip_special_tokens=False).startswith(WORDS)
                calls = answer.get("tool_calls")
                own = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
                message = {name: answer[name] for name in ("role", "content", "tool_calls") if answer.get(name)}
                body["messages"] += [message, {"content": WORDS, **own}]

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"n": 2}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 50}])
def test_some_conversations_do_not_go_on(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    engine = Engine(tokenizer)
    converse(engine, CHAT_PATH, [lambda _: in_process.CHAT | fields])
    assert not engine.prepared


def test_it_is_an_option(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer)
    converse(engine, CHAT_PATH, [lambda _: in_process.CHAT], ServerConfig(next_turn="off"))
    assert not engine.prepared


def test_a_conversation_is_rendered_when_nothing_is_open_or_at_once() -> None:
    engine = Engine(in_process.TOKENIZER)
    made = [Request(request_id=f"{i}", prompt_ids=[1], params=SamplingParams(max_tokens=0)) for i in range(2)]

    async def main() -> list[list[str]]:
        turns, seen = NextTurns(engine), []

        async def settle() -> None:
            if turns._task is not None:
                await turns._task
            seen.append([request.request_id for request in engine.prepared])

        engine._streams["open"] = None  # type: ignore[assignment]
        turns.add(lambda: made[0], at_once=False)
        await settle()
        turns.add(lambda: made[1], at_once=True)
        await settle()
        del engine._streams["open"]
        turns.look()
        await settle()
        return seen

    assert asyncio.run(main()) == [[], ["1"], ["1", "0"]]
