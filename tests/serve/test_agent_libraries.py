"""Agents written with openai-agents, pydantic-ai and smolagents: loops with tools, and answers of a type.

The libraries are no dependencies of the tests. Those that are not installed are skipped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import BaseModel

from tests.serve.fake_engine import script
from tests.serve.live import Server
from tests.test_end_to_end import running

LIBRARIES = ("agents", "pydantic_ai", "smolagents")
pytestmark = pytest.mark.skipif(not any(map(find_spec, LIBRARIES)), reason="no library of agents is installed")
TURNS = 10


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def turn(number: int) -> str:
    end = f"I run step {number}.\n{call('step', number=number)}" if number < TURNS - 1 else "All done."
    return f"<think>\nNow {number}.\n</think>\n\n{end}"


TASK = f"Do it. {script([turn(number) for number in range(TURNS)])}"


class Steps:
    """The tool of an agent, and what it was called with."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def function(self) -> Callable[[int], str]:
        def step(number: int) -> str:
            """Run a step.

            Args:
                number: Which one.
            """
            self.seen.append(number)
            return f"RESULT {number}"

        return step

    def check(self, answer: object) -> None:
        assert answer == "All done."
        assert self.seen == list(range(TURNS - 1))


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    with Server("--max-model-len", "16384", "--tool-parser", "hermes", "--reasoning-parser", "think") as server:
        yield server.url


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with running("serve", "demo", "--port", "0", "--max-model-len", "1024") as address:
        yield address


def openai_agent(url: str, api: str, **options: Any) -> Any:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = kinds[api](model="demo", openai_client=client)
    return agents.Agent(name="Agent", instructions="Use the tool.", model=model, **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(scripted: str, api: str, stream: bool) -> None:
    agents, steps = pytest.importorskip("agents"), Steps()
    agent = openai_agent(scripted, api, tools=[agents.function_tool(steps.function())])

    async def main() -> object:
        if not stream:
            return (await agents.Runner.run(agent, TASK, max_turns=TURNS)).final_output
        result = agents.Runner.run_streamed(agent, TASK, max_turns=TURNS)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        return result.final_output

    steps.check(asyncio.run(main()))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_with_a_type(scripted: str, api: str) -> None:
    agents = pytest.importorskip("agents")
    agent = openai_agent(scripted, api, output_type=Person)
    said = script([ADA.model_dump_json()])
    assert asyncio.run(agents.Runner.run(agent, said)).final_output == ADA


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_with_the_demo_model(demo: str, api: str) -> None:
    """The small model would never call by itself. What it must call, it calls with arguments that fit."""
    agents, steps = pytest.importorskip("agents"), Steps()
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100)
    tools = [agents.function_tool(steps.function())]
    agent = openai_agent(demo, api, tools=tools, model_settings=settings, tool_use_behavior="stop_on_first_tool")
    assert asyncio.run(agents.Runner.run(agent, "Do step 1.")).final_output == f"RESULT {steps.seen[0]}"


def pydantic_agent(url: str, api: str, **options: Any) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    maker = "anthropic" if api == "messages" else "openai"
    models = pytest.importorskip(f"pydantic_ai.models.{maker}")
    providers = pytest.importorskip(f"pydantic_ai.providers.{maker}")
    if api == "messages":
        client = pytest.importorskip("anthropic").AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        model = models.AnthropicModel("demo", provider=providers.AnthropicProvider(anthropic_client=client))
    else:
        kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
        model = kind("demo", provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return pydantic_ai.Agent(model, **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai(scripted: str, api: str, stream: bool) -> None:
    steps = Steps()
    agent = pydantic_agent(scripted, api, tools=[steps.function()])

    async def main() -> object:
        if not stream:
            return (await agent.run(TASK)).output
        async with agent.iter(TASK) as run:
            async for node in run:
                if agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as parts:
                        async for _ in parts:
                            pass
            return run.result.output

    steps.check(asyncio.run(main()))


@pytest.mark.parametrize("form", ["NativeOutput", "PromptedOutput", "ToolOutput"])
def test_pydantic_ai_with_a_type(scripted: str, form: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    agent = pydantic_agent(scripted, "chat", output_type=getattr(pydantic_ai, form)(Person))
    said = call("final_result", **ADA.model_dump()) if form == "ToolOutput" else ADA.model_dump_json()
    assert agent.run_sync(script([said])).output == ADA


@pytest.mark.slow
def test_pydantic_ai_with_the_demo_model(demo: str) -> None:
    """The output's tool must be called, so even this model's answer has the type."""
    pydantic_ai = pytest.importorskip("pydantic_ai")

    class Choice(BaseModel):
        is_empty: bool

    agent = pydantic_agent(demo, "chat", output_type=pydantic_ai.ToolOutput(Choice, strict=True))
    answer = agent.run_sync("Is [] empty?", model_settings={"temperature": 0, "max_tokens": 100}).output
    assert isinstance(answer, Choice)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
def test_smolagents(scripted: str, kind: str, stream: bool) -> None:
    smolagents, steps = pytest.importorskip("smolagents"), Steps()
    model = smolagents.OpenAIServerModel(model_id="demo", api_base=f"{scripted}/v1", api_key="none")
    numbers = range(TURNS - 1)
    if kind == "CodeAgent":
        said = [f"<code>\nprint(step({number}))\n</code>" for number in numbers]
        said.append('<code>\nfinal_answer("All done.")\n</code>')
    else:
        said = [*(call("step", number=number) for number in numbers), call("final_answer", answer="All done.")]
    tools, options = [smolagents.tool(steps.function())], {"verbosity_level": 0, "max_steps": TURNS}
    agent = getattr(smolagents, kind)(tools=tools, model=model, stream_outputs=stream, **options)
    steps.check(agent.run(script(said)))
