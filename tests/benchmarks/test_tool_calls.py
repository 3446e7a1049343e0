import asyncio

from benchmarks import tool_calls
from tests.serve.live import Server


def test_required_calls_are_valid_and_stream_the_same() -> None:
    with Server(engine="lmkit.turbo.engine.engine:Engine") as server:
        faults = asyncio.run(tool_calls.measure(server.url, 6))
    assert faults[""] == 6
    assert sum(faults.values()) == 6


def test_faults_are_seen() -> None:
    request = tool_calls.body(0) | {"tools": tool_calls.TOOLS, "tool_choice": "required"}
    call = {"function": {"name": "lights", "arguments": '{"room": "hall", "on": true}'}}
    assert tool_calls.fault(request, {"tool_calls": [call]}, "tool_calls") == ""
    assert tool_calls.fault(request, {"tool_calls": [call, call]}, "tool_calls") == "several calls"
    assert tool_calls.fault(request, {"tool_calls": [call], "content": "x"}, "tool_calls") == "text beside calls"
    wrong = {"function": {"name": "lights", "arguments": '{"room": "attic", "on": true}'}}
    assert tool_calls.fault(request, {"tool_calls": [wrong]}, "tool_calls") == "arguments that do not fit"
    assert tool_calls.fault(request, {"content": "no"}, "stop") == "finish_reason stop"
