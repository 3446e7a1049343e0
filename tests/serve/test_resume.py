"""A stream that goes on behind any of its outputs is the same stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.resilience.failover import asked, merged, path_of
from lmkit.config import ServerConfig
from lmkit.serve.resume import replayed
from lmkit.turbo.request import Request as EngineRequest
from lmkit.turbo.request import SamplingParams, StepOutput
from lmkit.turbo.transport.output import OutputProcessor
from lmkit.web.resume import Known
from tests.serve.in_process import CHAT, CHAT_PATH, TOKENIZER, App, ScriptedEngine
from tests.serve.live import Server

KEY, HEADER, WHOLE = "k" * 16, "x-lmkit-stream", "x-lmkit-whole"
ID = "0123456789abcdef0123456789abcdef 1700000000"
ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "List two numbers."}],
    "max_tokens": 12,
}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12}
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": X}}
ONE_OF = {"type": "object", "properties": {"a": {"enum": ["left", "right"]}}, "required": ["a"]}
MESSAGE: dict[str, Any] = {"model": "demo", "max_tokens": 12, "stop_sequences": ["@@"],
                           "messages": [{"role": "user", "content": "List two numbers."}]}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "greedy": TEXT | {"temperature": 0},
    "seeded": TEXT | {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "no seed": ASK | {"temperature": 1.0},
    "logprobs": ASK | {"temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2},
    "text logprobs, echo": TEXT | {"temperature": 1.0, "seed": 3, "logprobs": 2, "echo": True, "n": 2},
    "n": ASK | {"temperature": 1.0, "seed": 9, "n": 3, "max_tokens": 8},
    "stop string": TEXT | {"temperature": 0, "stop": ["return a"], "max_tokens": 40},
    "json": ASK | {"temperature": 1.0, "seed": 2, "max_tokens": 40,
                   "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ONE_OF}}},
    "tool": ASK | {"temperature": 1.0, "seed": 4, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    "generate": {"text": ["def add(a, b):", "import"], "temperature": 1.0, "max_new_tokens": 8, "n": 2,
                 "return_logprob": True},
    "responses": {"model": "demo", "input": "List two numbers.", "temperature": 1.0, "max_output_tokens": 12},
    "responses, tool": {"model": "demo", "input": "Call f.", "max_output_tokens": 60, "tool_choice": "required",
                        "tools": [{"type": "function", "name": "f", "parameters": X}]},
    "messages": MESSAGE | {"temperature": 1.0},
    "messages, tool": MESSAGE | {"max_tokens": 60, "tools": [{"name": "f", "input_schema": X}],
                                 "tool_choice": {"type": "any"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Iterator[Server]:
    with Server(
        "--api-key", f"{KEY} role=proxy", "--api-key", "user", engine="lmkit.turbo.engine.engine:Engine"
    ) as server:
        yield server


def ask(
    node: Server, body: dict[str, Any], *stream: str, known: list[Any] | None = None, key: str = KEY
) -> httpx.Response:
    content = json.dumps(asked(body)).encode()
    journal = b"" if known is None else json.dumps(known).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    if stream:
        headers[HEADER] = " ".join([*stream, *([str(len(journal))] if known is not None else [])])
    return httpx.post(node.url + path_of(body), content=journal + content, headers=headers, timeout=60)


def parts(text: str) -> tuple[list[str], list[Any]]:
    """The events of each output and after the last one, and the notes."""
    *pieces, last, rest = re.split(r"^: lmkit (.*)\n\n", text, flags=re.MULTILINE)
    assert (last, rest) == ("end", "")
    return pieces[::2], [json.loads(note) for note in pieces[1::2]]


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_behind_each_of_its_outputs(node: Server, name: str) -> None:
    body = BODIES[name]
    whole = ask(node, body, ID)
    assert whole.status_code == 200, whole.text
    pieces, notes = parts(whole.text)
    events, fingerprint = "".join(pieces), whole.headers[HEADER]
    assert notes
    for count in range(1, len(notes) + 1, 1 + len(notes) // 14):
        resumed = ask(node, body, ID, fingerprint, known=notes[:count])
        assert resumed.status_code == 200, resumed.text
        later, _ = parts(resumed.text)
        assert merged("".join(pieces[:count]) + "".join(later)) == merged(events), count


@pytest.mark.parametrize("name", [name for name in BODIES if "logprob" not in str(BODIES[name])])
def test_an_answer_that_is_no_stream_goes_on_after_its_notes(node: Server, name: str) -> None:
    def told(known: list[Any] | None = None, *more: str) -> tuple[list[Any], dict[str, Any], str]:
        journal = b"" if known is None else json.dumps(known).encode()
        stream = " ".join([ID, *more, *([str(len(journal))] if known is not None else [])])
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", HEADER: stream}
        body = {key: value for key, value in asked(BODIES[name]).items() if key not in ("stream", "stream_options")}
        content = journal + json.dumps(body).encode()
        url = node.url + path_of(BODIES[name])
        reply = httpx.post(url, content=content, headers=headers | {WHOLE: "1"}, timeout=60)
        assert (reply.status_code, reply.headers[WHOLE]) == (200, "1"), reply.text
        notes = re.findall(r"^: lmkit (\[.*)\n\n", reply.text, flags=re.MULTILINE)
        ((answer,),) = [re.findall(r"^data: (.*)\n\n: lmkit end\n\n$", reply.text, flags=re.MULTILINE)]
        return [json.loads(note) for note in notes], settled(json.loads(answer)), reply.headers[HEADER]

    notes, answer, fingerprint = told()
    assert notes
    for count in {1, (len(notes) + 1) // 2, len(notes)}:
        assert told(notes[:count], fingerprint)[1] == answer, count


def settled(answer: Any) -> Any:
    """Without times and the random ids of items."""
    if isinstance(answer, list):
        return [settled(value) for value in answer]
    if not isinstance(answer, dict):
        return answer
    left_out = {"completed_at", "e2e_latency", "call_id", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
    nested = isinstance(answer.get("id"), str) and "object" not in answer and answer.get("type") != "message"
    return {
        name: settled(value) for name, value in answer.items() if name not in left_out | ({"id"} if nested else set())
    }


def test_answers_with_log_probabilities_are_not_told_as_notes(node: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}", HEADER: ID, WHOLE: "1"}
    reply = httpx.post(node.url + path_of(ASK), json=ASK | {"logprobs": True}, headers=headers, timeout=60)
    assert WHOLE not in reply.headers
    assert reply.json()["choices"][0]["logprobs"]["content"]


def test_a_stream_goes_on_within_its_reasoning_and_behind_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    ids = TOKENIZER.encode("<think>\nOne and two.\n</think>\n\nThey are:\n" + call, add_special_tokens=False)
    ids.append(TOKENIZER.eos_token_ids[0])
    engine = ScriptedEngine(lambda request: ids[len(request.known_ids) :], finish_reason="stop")
    config = ServerConfig(api_keys=(f"{KEY} role=proxy",), reasoning_parser="think", tool_parser="hermes")
    app = App(engine, config)
    body = json.dumps(CHAT | {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}).encode()

    def streamed(stream: str, known: bytes = b"") -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", HEADER: stream}
        return app.request("POST", CHAT_PATH, content=known + body, headers=headers)

    whole = streamed(ID)
    pieces, notes = parts(whole.text)
    events = "".join(pieces)
    assert sum(len(tokens) for _, tokens, *_ in notes) == len(ids)
    for part in ('"reasoning":"', '"content":"', '"tool_calls"', '"reasoning_tokens":'):
        assert part in events
    for count in range(1, len(notes) + 1):
        known = json.dumps(notes[:count]).encode()
        later, _ = parts(streamed(f"{ID} {whole.headers[HEADER]} {len(known)}", known).text)
        assert merged("".join(pieces[:count]) + "".join(later)) == merged(events), count


def test_only_the_role_proxy_may_resume(node: Server) -> None:
    first = ask(node, TEXT, ID, key="user")
    assert HEADER not in first.headers
    assert "lmkit" not in first.text
    resumed = ask(node, TEXT, ID, "fp_0123456789ab", known=[[0, [70]]], key="user")
    assert resumed.status_code == 403
    assert "role proxy" in resumed.text


def test_a_server_without_keys_believes_the_proxy_that_it_gave_its_own_key() -> None:
    app = App(ScriptedEngine(), ServerConfig(proxy_key=KEY))
    body = json.dumps(CHAT | {"stream": True}).encode()

    def streamed(stream: str, key: str, known: bytes = b"") -> httpx.Response:
        headers = {"content-type": "application/json", HEADER: stream, "x-lmkit-tenant": "0" * 32}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        return app.request("POST", CHAT_PATH, content=known + body, headers=headers)

    first = streamed(ID, KEY)
    _, notes = parts(first.text)
    known = json.dumps(notes[:1]).encode()
    later = f"{ID} {first.headers[HEADER]} {len(known)}"
    assert streamed(later, KEY, known=known).status_code == 200
    for key in ("", "k" * 15):
        answer = streamed(ID, key)
        assert (answer.status_code, HEADER in answer.headers) == (200, False)
        assert streamed(later, key, known=known).status_code == 403


@pytest.mark.parametrize(
    "known",
    [[[9, [70]]], [[0, [1 << 20]]], [[0, [-1]]], [{"a": 1}], [[0, [70] * 12]]],
    ids=lambda known: str(known)[:20],
)
def test_known_outputs_that_do_not_fit_are_refused(node: Server, known: list[Any]) -> None:
    fingerprint = ask(node, TEXT, ID).headers[HEADER]
    assert ask(node, TEXT, ID, fingerprint, known=known).status_code == 400
    assert ask(node, TEXT, ID, "fp_000000000000", known=[[0, [70]]]).status_code == 404
    assert ask(node, TEXT, "nonsense").status_code == 400


def test_a_response_is_stored_once_under_the_id_that_the_proxy_chose(node: Server) -> None:
    body = {"model": "demo", "input": "hi", "max_output_tokens": 4}
    own = "resp_" + "1" * 32
    headers = {"authorization": f"Bearer {KEY}", HEADER: f"{'1' * 32} 1700000000"}
    answers = [httpx.post(node.url + "/v1/responses", json=body, headers=headers, timeout=60).json() for _ in range(2)]
    assert [answer["id"] for answer in answers] == [own, own]
    assert answers[0]["output"] == answers[1]["output"]  # of the same seed, with the same ids
    stored = httpx.get(f"{node.url}/v1/responses/{own}", headers=headers)
    assert stored.json()["output"] == answers[1]["output"]
    httpx.delete(f"{node.url}/v1/responses/{own}", headers=headers)
    assert httpx.get(f"{node.url}/v1/responses/{own}", headers=headers).status_code == 404


def test_all_log_probabilities_at_the_end_stay_with_their_node(node: Server) -> None:
    body = {"model": "demo", "input": "hi", "max_output_tokens": 4, "include": ["message.output_text.logprobs"]}
    assert HEADER not in ask(node, body, ID).headers
    assert ask(node, body, ID, "fp_0123456789ab", known=[]).status_code == 400


def test_a_resumed_answer_says_where_its_prompts_kv_came_from() -> None:
    processor = OutputProcessor(TOKENIZER, EngineRequest(request_id="", prompt_ids=[1, 2], params=SamplingParams()))
    replayed([processor], [Known(0, [300], cached_tokens=1)], 4096)
    first = StepOutput(request_id="", token_ids=[301], cached_tokens=0, kv=[(2, "computed")])
    processor.process(first)
    later = processor.process(StepOutput(request_id="", token_ids=[302]))
    assert (later.kv, later.num_cached_tokens) == ([(2, "computed")], 1)
