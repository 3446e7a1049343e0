"""OpenAI's Responses API with the official client: whole and streamed answers, stored conversations, refusals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import pytest
from pydantic import BaseModel

from lmkit.config import ServerConfig
from tests.serve.fake_engine import script
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine
from tests.serve.test_openai_client import text

PATH = "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": "demo", "input": "Hello", "max_output_tokens": 9}
    return client.responses.create(**defaults | options, extra_body={"seed": 0})


def prompt_tokens(*messages: tuple[str, str]) -> int:
    return len(TOKENIZER.encode_chat([{"role": role, "content": content} for role, content in messages]))


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be brief", metadata={"a": "b"}, temperature=0.5)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.output_text) == ("response", "demo", text(9))
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert item.id.startswith("msg_")
    num_prompt = prompt_tokens(("system", "Be brief"), ("user", "Hello"))
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (num_prompt, 9)
    assert answer.usage.total_tokens == num_prompt + 9
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief", {"a": "b"}, 0.5)
    assert (answer.store, answer.background, answer.tools, answer.tool_choice) == (True, False, [], "auto")
    ended = ask(client, input="EOS", max_output_tokens=None)
    assert (ended.status, ended.incomplete_details, ended.output[0].status) == ("completed", None, "completed")


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert deltas
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == text(9)
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert len({event.item_id for event in events[3:-2]}) == 1
    assert events[-1].response.output == [events[-2].item]
    whole = ask(client)
    same = {"id", "output", "created_at"}
    assert events[-1].response.to_dict().keys() == whole.to_dict().keys()
    assert {k: v for k, v in events[-1].response if k not in same} == {k: v for k, v in whole if k not in same}


def test_the_prompt_and_the_model_s_text_as_they_are(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "Hello", "max_output_tokens": 9}
    asked = {"seed": 0, "enable_response_messages": True}
    whole = client.responses.create(**body, extra_body=asked).to_dict()
    last = list(client.responses.create(**body, extra_body=asked, stream=True))[-1].response.to_dict()
    prompt = TOKENIZER.encode_chat([{"role": "user", "content": "Hello"}])
    for answer in (whole, last):
        (read,), (written,) = answer["input_messages"], answer["output_messages"]
        assert read == {
            "type": "raw_message_tokens",
            "message": TOKENIZER.decode(prompt, skip_special_tokens=False),
            "tokens": prompt,
        }
        assert (written["message"], len(written["tokens"])) == (text(9), 9)
    assert "input_messages" not in ask(client).to_dict()


def test_the_client_s_stream_helper_builds_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="EOS", extra_body={"seed": 0}) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (text(5), "completed")


def test_log_probabilities_on_request(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    content = ask(client, **options).output[0].content[0]
    assert "".join(entry.token for entry in content.logprobs) == content.text
    assert {len(entry.top_logprobs) for entry in content.logprobs} == {2}
    events = list(ask(client, **options, stream=True))
    streamed = [entry.token for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert streamed == [entry.token for entry in content.logprobs]


def test_a_conversation_goes_on_from_its_last_response(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Only now")
    second = ask(client, input=[{"role": "user", "content": "More"}], previous_response_id=first.id)
    third = ask(client, input="Yet more", previous_response_id=second.id, stream=True)
    last = list(third)[-1].response
    turns = [("user", "Hello"), ("assistant", text(9)), ("user", "More"), ("assistant", text(9)), ("user", "Yet more")]
    assert last.usage.input_tokens == prompt_tokens(*turns)  # instructions are not carried over
    counted = client.responses.input_tokens.count(model="demo", input="Yet more", previous_response_id=second.id)
    assert counted.input_tokens == last.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not stored here") as gone:
        ask(client, previous_response_id=last.id)
    assert gone.value.param == "previous_response_id"


def test_stored_responses_are_fetched_listed_and_deleted(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    answer = ask(client, input=items)
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    listed = client.responses.input_items.list(answer.id, order="asc", limit=1)
    assert [item.content[0].text for item in listed.data] == ["Be kind"]  # type: ignore[union-attr]
    assert listed.has_more
    assert [item.content[0].text for item in listed] == ["Be kind", "Hello"]  # type: ignore[union-attr]
    assert [item.role for item in client.responses.input_items.list(answer.id)] == ["user", "system"]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


def until(client: openai.OpenAI, id: str, *states: str) -> Any:
    """The response, once it is in one of these states."""
    deadline = time.monotonic() + 30
    while (response := client.responses.retrieve(id)).status not in states:
        assert time.monotonic() < deadline, response.status
        time.sleep(0.02)
    return response


def test_a_response_is_made_in_the_background(client: openai.OpenAI) -> None:
    plain = ask(client)
    answer = ask(client, background=True)
    assert (answer.status, answer.background, answer.output, answer.usage) == ("queued", True, [], None)
    ended = until(client, answer.id, "incomplete")
    assert ended.output_text == plain.output_text
    assert ended.usage.to_dict() == plain.usage.to_dict() | {"input_tokens_details": ANY}
    assert client.responses.cancel(answer.id) == ended, "it has ended, so it stays as it is"
    again = ask(client, input="More", previous_response_id=answer.id)
    assert again.usage.input_tokens > ended.usage.input_tokens
    failed = ask(client, input="REFUSE", background=True)
    error = until(client, failed.id, "failed").error
    assert (error.code, error.message) == ("server_error", "the queue is full")


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    answer = ask(client, input="SLOW", max_output_tokens=4000, background=True)
    until(client, answer.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        ask(client, previous_response_id=answer.id)
    assert client.responses.cancel(answer.id).status == "cancelled"
    assert client.responses.cancel(answer.id).status == "cancelled"
    other = ask(client, input="SLOW", max_output_tokens=4000, background=True)
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    load = httpx.get(str(client.base_url).removesuffix("/v1/") + "/load")
    assert load.json() == {"server_load": 0}, "nothing runs on"
    assert client.responses.retrieve(answer.id).status == "cancelled"


def test_a_response_in_the_background_ends_with_its_server(tmp_path: Path) -> None:
    """Its task is gone with the event loop of the first request."""
    app = App(ScriptedEngine(lambda request: [70] * 4000), ServerConfig(data_dir=str(tmp_path)))
    id = app.post(PATH, {"model": "model", "input": "Hi", "background": True}).json()["id"]
    response = app.request("GET", f"{PATH}/{id}").json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    answer = ask(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    off = App(ScriptedEngine(), ServerConfig(response_store=0)).post(PATH, {"model": "model", "input": "Hi"}).json()
    assert off["store"] is False


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    """The scripted engine follows none; the schema is checked when the request comes."""
    form: Any = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}}
    assert ask(client, text=form).text.format.schema_ == {"type": "object"}
    form["format"]["schema"] = {"not": {}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format: .*not") as wrong:
        ask(client, text=form)
    assert wrong.value.param == "text.format"


class Person(BaseModel):
    name: str
    age: int


def test_parse_gives_the_client_s_own_type(client: openai.OpenAI) -> None:
    said = script(['{"name": "Ada", "age": 36}'])
    answer = client.responses.parse(model="demo", input=said, text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    assert answer.text is not None
    assert answer.text.to_dict()["format"]["type"] == "json_schema"  # type: ignore[index]
    echoed: list[Any] = [{"role": "user", "content": said}, *answer.output, {"role": "user", "content": "More"}]
    again = client.responses.parse(model="demo", input=echoed, text_format=Person)
    assert again.output_parsed == answer.output_parsed


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"background": True, "store": False}, "background", "needs store"),
        ({"background": True, "stream": True}, "background", "without stream"),
        ({"conversation": "conv_x", "previous_response_id": "x"}, "previous_response_id", "not both"),
        ({"conversation": {"id": "conv_x", "x": 1}}, "conversation", "string"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", "too long is refused"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' are not supported"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "'mcp' are not supported"),
        ({"text": {"verbosity": "much"}}, "text", "low"),
        ({"include": ["everything"]}, "include", "include"),
        ({"metadata": {"a": 1}}, "metadata", "string"),
        ({"metadata": {f"{i}": "" for i in range(17)}}, "metadata", "16"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 10**6}, "input", "lower max_output_tokens"),
        ({"temperature": -1}, "temperature", "in "),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}] * 8192}]}, "input", "at most 8192"),
        ({"input": [{"type": "reasoning", "summary": [{}] * 8192}]}, "input", "at most 8192"),
        ({"tools": [{"type": "function", "name": "f"}] * 1025}, "tools", "at most 1024"),
        ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "file_id", "unknown"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "images are not supported: this model reads text"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input", "images belong to messages of the user"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "encrypted_content", "another server"),
        ({"nonsense": 1}, "nonsense", "unknown"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "False"),
    ],
)
def test_what_cannot_be_honoured_is_refused_where_every_field_counts(
    fields: dict[str, Any], param: str, message: str
) -> None:
    engine = ScriptedEngine()
    answer = App(engine, ServerConfig(strict_fields=True)).post(PATH, {"model": "model", "input": "Hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert not engine.requests


def test_fields_of_lmkit_and_of_others_that_ask_for_nothing() -> None:
    engine = ScriptedEngine()
    app = App(engine)
    ours = {"top_k": 5, "seed": 7, "logit_bias": {"70": 2}, "priority": 3, "session_id": "s", "repetition_penalty": 1.5}
    nothing = {
        "background": False,
        "n_predict": -1,
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "service_tier": "auto",
    }
    body = {"model": "model", "input": "Hi", **ours, **nothing, "reasoning": {"summary": "auto", "effort": None}}
    assert app.post(PATH, body).status_code == 200
    (request,) = engine.requests
    params = request.params
    assert (params.top_k, params.seed, params.logit_bias, params.repetition_penalty) == (5, 7, {70: 2.0}, 1.5)
    assert (request.priority, request.session_id, params.max_tokens) == (3, "s", None)


def test_each_key_has_its_own_responses() -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("one", "two")))
    mine = app.post(PATH, {"model": "model", "input": "Hi"}, key="one").json()["id"]
    for key, status in (("two", 404), ("one", 200)):
        bearer = {"authorization": f"Bearer {key}"}
        assert app.request("GET", f"{PATH}/{mine}", headers=bearer).status_code == status
        assert app.request("GET", f"{PATH}/{mine}/input_items", headers=bearer).status_code == status
        follow = {"model": "model", "input": "Hi", "previous_response_id": mine}
        assert app.post(PATH, follow, key=key).status_code == (200 if status == 200 else 400)
    assert app.request("DELETE", f"{PATH}/{mine}", headers={"authorization": "Bearer two"}).status_code == 404


def test_a_proxy_s_clients_have_their_own_responses() -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("node",)))
    mine = {"authorization": "Bearer node", "x-lmkit-tenant": "a" * 32}
    id = app.request("POST", PATH, json={"model": "model", "input": "Hi"}, headers=mine).json()["id"]
    assert app.request("GET", f"{PATH}/{id}", headers=mine).status_code == 200
    for other in ({"authorization": "Bearer node"}, mine | {"x-lmkit-tenant": "b" * 32}):
        assert app.request("GET", f"{PATH}/{id}", headers=other).status_code == 404


def test_a_conversation_has_the_bytes_of_a_body_at_most() -> None:
    app = App(ScriptedEngine(), ServerConfig(max_body_bytes=4000, body_memory=8000))
    id = None
    for _ in range(9):
        body = {"model": "model", "input": "x " * 400, "previous_response_id": id}
        answer = app.post(PATH, body)
        if answer.status_code != 200:
            break
        id = answer.json()["id"]
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "previous_response_id")
    assert app.serving.bodies.used == 0


def test_a_failure_in_the_middle_of_a_stream_is_an_event(client: openai.OpenAI) -> None:
    events = ask(client, input="SLOW", max_output_tokens=None, stream=True)
    while next(events).type != "response.output_text.delta":
        pass
    with pytest.raises(openai.InternalServerError):
        ask(client, input="CRASH")
    last = list(events)[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert last.response.output[0].status == "incomplete"
    assert "secret" not in last.to_json()


def test_a_failure_before_the_first_event_has_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as busy:
        ask(client, input="REFUSE", stream=True)
    assert busy.value.code == "queue_full"


def test_stored_responses_survive_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    app = App(ScriptedEngine(), config)
    id = app.post(PATH, {"model": "model", "input": "Hi"}).json()["id"]
    app.app.state.data.close()
    again = App(ScriptedEngine(), config)
    assert again.request("GET", f"{PATH}/{id}").json()["id"] == id
    assert again.post(PATH, {"model": "model", "input": "Hi", "previous_response_id": id}).status_code == 200


def test_the_route_that_compacts_is_named() -> None:
    answer = App(ScriptedEngine()).post(f"{PATH}/compact", {"model": "model", "input": "Hi"})
    assert answer.status_code == 404
    assert "/v1/responses/compact is not supported by this server" in answer.json()["error"]["message"]
