"""Ten turns of tool calls by a library, in the environment of the clients, where lmkit is not installed.

python loops.py CLIENT URL TASK

It runs the task with whole answers and again with streams, and prints as JSON which steps were called and what the
last answer was.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

MODEL = "demo"
MOST_STEPS = 40
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FUNCTION = {"name": "step", "description": "Run a step.", "parameters": NUMBER | {"additionalProperties": False}}
TOOL = {"type": "function", "function": FUNCTION | {"strict": True}}

Step = Callable[[int], str]
Loop = Callable[[str, str, Step, bool], Any]  # (URL, task, tool, whether to stream) -> the last answer


def openai_chat(url: str, task: str, step: Step, streamed: bool) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [TOOL]}
        if streamed:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages += [message, *results(message.tool_calls, step)]
        if not message.tool_calls:
            return message.content


def openai_responses(url: str, task: str, step: Step, streamed: bool) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    items: list[Any] = [{"role": "user", "content": task}]
    while True:
        asked: dict[str, Any] = {"model": MODEL, "input": items, "tools": [{"type": "function", **TOOL["function"]}]}
        if streamed:
            with client.responses.stream(**asked) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            output = step(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def anthropic(url: str, task: str, step: Step, streamed: bool) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": task}]}
    turns = client.beta.messages.tool_runner(**asked, tools=[anthropic.beta_tool(step)], stream=streamed)
    for turn in turns:
        message = turn.get_final_message() if streamed else turn
    return "".join(block.text for block in message.content if block.type == "text")


def langchain_openai(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)


def langchain_ollama(url: str) -> Any:
    from langchain_ollama import ChatOllama

    return ChatOllama(model=MODEL, base_url=url)


def langchain(model_of: Callable[[str], Any]) -> Loop:
    def loop(url: str, task: str, step: Step, streamed: bool) -> Any:
        from langchain.agents import create_agent

        agent, asked = create_agent(model_of(url), tools=[step]), {"messages": [("user", task)]}
        config = {"recursion_limit": MOST_STEPS}
        if not streamed:
            return agent.invoke(asked, config)["messages"][-1].content
        seen = list(agent.stream(asked, config, stream_mode=["messages", "values"]))
        assert sum(kind == "messages" for kind, _ in seen) > MOST_STEPS, "no parts of messages"
        return [state for kind, state in seen if kind == "values"][-1]["messages"][-1].content

    return loop


def llama_index(url: str, task: str, step: Step, streamed: bool) -> Any:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.ollama import Ollama

    agent = FunctionAgent(tools=[step], llm=Ollama(model=MODEL, base_url=url), streaming=streamed)

    async def main() -> str:
        return str(await agent.run(task, max_iterations=MOST_STEPS))

    return asyncio.run(main())


def litellm(url: str, task: str, step: Step, streamed: bool) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks for a list on the internet
    import litellm

    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        asked = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL]}
        found = litellm.completion(**asked, messages=messages, stream=streamed)
        if streamed:
            found = litellm.stream_chunk_builder(list(found), messages=messages)
        message = found.choices[0].message
        messages += [message.model_dump(), *results(message.tool_calls, step)]
        if not message.tool_calls:
            return message.content


def ollama(url: str, task: str, step: Step, streamed: bool) -> Any:
    import ollama

    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        found: Any = client.chat(MODEL, messages, tools=[step], stream=streamed)
        parts = [part.message for part in found] if streamed else [found.message]
        content, thinking = ("".join(getattr(part, name) or "" for part in parts) for name in ("content", "thinking"))
        calls = [call for part in parts for call in part.tool_calls or ()]
        messages.append({"role": "assistant", "content": content, "thinking": thinking, "tool_calls": calls})
        if not calls:
            return content
        for call in calls:
            output = step(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": output})


LOOPS: dict[str, Loop] = {
    "openai": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic,
    "langchain-openai": langchain(langchain_openai),
    "langchain-ollama": langchain(langchain_ollama),
    "llama-index-ollama": llama_index,
    "litellm": litellm,
    "ollama": ollama,
}


def results(calls: Any, step: Step) -> list[dict[str, Any]]:
    """What calls of a chat completion return."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": step(**json.loads(call.function.arguments))}
        for call in calls or ()
    ]


def step_of(seen: list[int]) -> Step:
    """The tool, which notes its calls. Libraries read its signature and its words."""

    def step(number: int) -> str:
        """Run a step.

        Args:
            number: Which one.
        """
        seen.append(number)
        return f"RESULT {number}"

    return step


def main(client: str, url: str, task: str) -> None:
    runs = []
    for streamed in (False, True):
        seen: list[int] = []
        runs.append({"seen": seen, "answer": LOOPS[client](url, task, step_of(seen), streamed)})
    print(json.dumps(runs))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(*sys.argv[1:])
