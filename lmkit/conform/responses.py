"""OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

from lmkit.conform.case import Failed, Server, case, need
from lmkit.conform.openai import SCHEMA, check_arguments

PATH = "/v1/responses"
ASK: dict[str, Any] = {"input": "Say hi.", "max_output_tokens": 24}
TOOL = {"type": "function", "name": "choose", "description": "Choose a kind", "parameters": SCHEMA, "strict": False}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "choose"}, "max_output_tokens": 128}
ENDS = ("response.completed", "response.incomplete")


def text_of(response: dict[str, Any]) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


def check_stream(events: list[Any]) -> dict[str, Any]:
    """The response of a stream whose events are in order and add up to it."""
    events = [event for event in events if event != "[DONE]"]
    numbers = [event["sequence_number"] for event in events]
    need(numbers == list(range(numbers[0], numbers[0] + len(numbers))), "sequence_number has gaps")
    kinds = [event["type"] for event in events]
    need(kinds[0] == "response.created", f"the first event is {kinds[0]}")
    need(kinds[-1] in ENDS, f"the last event is {kinds[-1]}")
    response: dict[str, Any] = events[-1]["response"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    need([item["id"] for item in added] == [item["id"] for item in done], "items are added that are not done")
    need(done == response["output"], "the items of the stream are not those of the response")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    need("".join(deltas) == text_of(response), "the deltas do not add up to the text")
    return response


@case("responses", "a whole response")
def whole(server: Server) -> None:
    response = server.post(PATH, ASK | {"instructions": "Be brief."})
    need(response["object"] == "response", "no response")
    need(response["status"] in ("completed", "incomplete"), f"status is {response['status']}")
    need(isinstance(text_of(response), str), "no text")
    usage = response["usage"]
    need(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], "the usage does not add up")


@case("responses", "a streamed response")
def streamed(server: Server) -> None:
    check_stream(server.events(PATH, ASK | {"stream": True}))


@case("responses", "a call that must be made, and its result")
def called(server: Server) -> None:
    response = server.post(PATH, ASK | FORCED)
    (call,) = (item for item in response["output"] if item["type"] == "function_call")
    need(call["name"] == "choose", f"a call of {call['name']}")
    check_arguments(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    again = {"input": [{"role": "user", "content": "Choose."}, *response["output"], result], "tools": [TOOL]}
    server.post(PATH, again | {"max_output_tokens": 4})


@case("responses", "a call, streamed")
def call_streamed(server: Server) -> None:
    events = server.events(PATH, ASK | FORCED | {"stream": True})
    deltas = [e["delta"] for e in events if e != "[DONE]" and e["type"] == "response.function_call_arguments.delta"]
    check_arguments("".join(deltas))
    check_stream(events)


@case("responses", "previous_response_id goes on with a stored response")
def stored(server: Server) -> None:
    first = server.post(PATH, ASK | {"store": True})
    second = server.post(PATH, ASK | {"previous_response_id": first["id"]})
    need(second["usage"]["input_tokens"] > first["usage"]["input_tokens"], "the first turn is not in the prompt")
    need(server.get(f"{PATH}/{first['id']}")["id"] == first["id"], "the response is not found again")


@case("responses", "item_reference names an item of a stored response")
def referred(server: Server) -> None:
    first = server.post(PATH, ASK | {"store": True})
    (item,) = (item for item in first["output"] if item["type"] == "message")
    turn = {"role": "user", "content": "Go on."}
    alone = server.post(PATH, {"input": [turn], "max_output_tokens": 1})
    both = server.post(PATH, {"input": [{"type": "item_reference", "id": item["id"]}, turn], "max_output_tokens": 1})
    need(both["usage"]["input_tokens"] > alone["usage"]["input_tokens"], "the item is not in the prompt")


@case("responses", "a call of a namespace comes back under its names")
def of_namespace(server: Server) -> None:
    space = {"type": "namespace", "name": "files", "description": "Files", "tools": [TOOL]}
    body = {"input": "Say hi.", "tools": [space], "tool_choice": "required", "max_output_tokens": 128}
    calls = [item for item in server.post(PATH, body)["output"] if item["type"] == "function_call"]
    need(calls and all((call["name"], call["namespace"]) == ("choose", "files") for call in calls), f"calls: {calls}")
    check_arguments(calls[0]["arguments"])


@case("responses", "a call of a custom tool is a text")
def of_custom(server: Server) -> None:
    tool = {"type": "custom", "name": "letter", "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]"}}
    body = {"input": "Say hi.", "tools": [tool], "tool_choice": "required", "max_output_tokens": 128}
    calls = [item for item in server.post(PATH, body)["output"] if item["type"] == "custom_tool_call"]
    need(calls and calls[0]["input"] in ("a", "b"), f"calls that do not fit the pattern: {calls}")


@case("responses", "an answer of a JSON schema")
def schema(server: Server) -> None:
    form = {"format": {"type": "json_schema", "name": "kind", "schema": SCHEMA, "strict": True}}
    check_arguments(text_of(server.post(PATH, ASK | {"text": form, "max_output_tokens": 128})))


@case("responses", "errors have OpenAI's form")
def errors(server: Server) -> None:
    error = server.refusal(PATH, {"input": 5}, 400, 422)["error"]
    if not isinstance(error.get("message"), str):
        raise Failed("no message")
