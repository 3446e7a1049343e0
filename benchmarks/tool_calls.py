"""Calls of tools that must be valid: `tool_choice: required` on the demo model, whole and streamed.

    python -m benchmarks.tool_calls [--requests 1000] [--json FILE]

The demo model knows nothing of tools, so the grammar alone makes the calls valid. It asks for one call, because this
model would write calls until its tokens end. Each request draws with its own seed and is sent twice: the stream must
say what the whole answer says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from benchmarks.report import save
from benchmarks.resilience.processes import serving

AT_ONCE = 16
TASKS = ("Book a table.", "Turn the lights on.", "How warm is it?", "Plan a trip and pay for it.", "Call back later.")


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Book(Arguments):
    name: Annotated[str, Field(max_length=12)]
    people: Annotated[int, Field(ge=1, le=20)]


class Lights(Arguments):
    room: Literal["kitchen", "hall", "cellar"]
    on: bool


class Account(Arguments):
    iban: Annotated[str, Field(pattern="^[A-Z]{2}[0-9]{4}$")]


class Pay(Arguments):
    amount: Annotated[float, Field(ge=0, le=1000)]
    to: Account


class Trip(Arguments):
    stops: Annotated[list[Annotated[str, Field(max_length=8)]], Field(min_length=1, max_length=3)]


class Now(Arguments):
    pass


KINDS: dict[str, type[Arguments]] = {"book": Book, "lights": Lights, "pay": Pay, "trip": Trip, "now": Now}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": kind.model_json_schema()}}
    for name, kind in KINDS.items()
]


def body(number: int) -> dict[str, Any]:
    """The request of this number: some of the tools, or one by name."""
    rng = random.Random(number)
    tools = rng.sample(TOOLS, rng.randint(1, len(TOOLS)))
    named = rng.random() < 0.2
    choice = {"type": "function", "function": {"name": tools[0]["function"]["name"]}} if named else "required"
    return {
        "model": "demo", "messages": [{"role": "user", "content": rng.choice(TASKS)}], "tools": tools, "seed": number,
        "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 600,
    }  # fmt: skip


def fault(request: dict[str, Any], message: dict[str, Any], finish_reason: str) -> str:
    """What is wrong with an answer; "" if its calls are valid."""
    calls = message.get("tool_calls") or []
    allowed = {tool["function"]["name"] for tool in request["tools"]}
    if isinstance(request["tool_choice"], dict):
        allowed = {request["tool_choice"]["function"]["name"]}
    if finish_reason != "tool_calls" or not calls:
        return f"finish_reason {finish_reason}"
    if message.get("content"):
        return "text beside calls"
    if len(calls) > 1:
        return "several calls"
    for call in calls:
        function = call["function"]
        if function["name"] not in allowed:
            return "a function that is not allowed"
        try:
            KINDS[function["name"]].model_validate_json(function["arguments"])
        except ValidationError:
            return "arguments that do not fit"
    return ""


async def streamed(response: httpx.Response) -> tuple[dict[str, Any], str]:
    """(the message that the deltas add up to, the finish_reason)."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = ""
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        delta, reason = choice["delta"], choice["finish_reason"] or reason
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": part["function"]["name"], "arguments": ""}})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, reason


async def one(http: httpx.AsyncClient, number: int, faults: Counter[str]) -> None:
    request = body(number)
    response = await http.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    faults[fault(request, choice["message"], choice["finish_reason"])] += 1
    async with http.stream("POST", "/v1/chat/completions", json=request | {"stream": True}) as response:
        message, _ = await streamed(response)
        whole = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        faults["streams that differ"] += [call["function"] for call in message["tool_calls"]] != whole


async def measure(url: str, num_requests: int) -> Counter[str]:
    """The number of answers by fault, with "" for valid ones, and that of streams that differ."""
    faults: Counter[str] = Counter()
    numbers = iter(range(num_requests))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            await one(http, number, faults)

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="each is sent whole and streamed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with serving() as server:
        faults = asyncio.run(measure(server.url, arguments.requests))
    valid = faults.pop("")
    Console().print(
        f"{valid} of {arguments.requests} calls are valid, {time.perf_counter() - start:.0f} s; {dict(faults)}"
    )
    if arguments.json:
        save(arguments.json, "tool_calls", [{"requests": arguments.requests, "valid": valid, **faults}])


if __name__ == "__main__":
    main()
