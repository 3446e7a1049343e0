"""An agent's turns up to the model's context: how much of each prompt was cached, and its time to the first token.

    python -m benchmarks.agent_turns [MODEL ...] [--turns 40] [--wait 1] [--json FILE]

Templates write each answer otherwise than the model did, as those that strip reasoning or write calls anew: `stripped`
leaves out an answer's first 40 characters, `calls` indents the arguments of calls. Each agent runs with and without
next turns. Beside it a conversation of token ids grows by as many tokens; nothing of it is written anew, and each of
its turns brings 32 new tokens. All take turns on one server in this process, so other work slows all alike.

share: cached tokens of those that were known when the answer had ended, mean and least over the turns after the first.
ttft, of_32: median milliseconds of the prompt in the engine over the second half of the turns, and the median of its
ratios to the turn of 32 new tokens beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.http_path import prompts
from benchmarks.next_turns import served
from lmkit.bench.agent import TOOL
from lmkit.serve.pool import PooledModel
from lmkit.turbo.request import Request

NEW, ANSWER = 32, 40  # tokens of a turn of the plain conversation, and of answers
WORDS = 9  # of a user's message or a tool's result: about 32 tokens with those of the template
HEAD = "{% if tools %}<|im_start|>tools {{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}"
CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson(indent=2) }}}\n'
    "</tool_call>"
)
TEMPLATE = (
    HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ (m.content or '')[40:] }}"
    "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Prepared:
    """The beginning of the next prompt, as the front end lets the engine compute it."""

    def __init__(self, model: PooledModel) -> None:
        self.ids: list[int] = []
        self._send = model.engine.prepare
        self.is_on = True
        model.engine.prepare = self  # type: ignore[assignment]

    def __call__(self, request: Request) -> None:
        self.ids = request.prompt_ids
        if self.is_on:
            self._send(request)


class Agent:
    def __init__(self, client: httpx.AsyncClient, prepared: Prepared, salt: str, *, calls: bool, is_on: bool) -> None:
        self._client, self._prepared, self._is_on, self._calls = client, prepared, is_on, calls
        self._fields: dict[str, Any] = {"cache_salt": salt, "max_tokens": ANSWER, "timings_per_token": True}
        self._fields |= {"tools": [TOOL], "tool_choice": "required"} if calls else {"ignore_eos": True}
        self.messages: list[dict[str, Any]] = []
        self._known: list[int] = []
        self.shares: list[float] = []
        self.times: list[float] = []

    async def turn(self, text: str, wait: float) -> bool:
        """False: the context is full."""
        last = self.messages[-1].get("tool_calls") if self.messages else None
        own = {"role": "tool", "tool_call_id": last[0]["id"]} if last else {"role": "user"}
        self.messages.append({**own, "content": text})
        self._prepared.is_on, self._prepared.ids = self._is_on, []
        response = await self._client.post("/v1/chat/completions", json=self._fields | {"messages": self.messages})
        if response.status_code == 400:
            return False
        answer = response.raise_for_status().json()
        if self._known:
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.shares.append(min(cached / len(self._known), 1.0))
        self.times.append(answer["timings"]["prompt_ms"])
        message = answer["choices"][0]["message"]
        self.messages.append({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
        await asyncio.sleep(wait)
        self._known = self._prepared.ids
        return True


class Plain:
    """A conversation of token ids."""

    def __init__(self, client: httpx.AsyncClient, salt: str, seed: int) -> None:
        self._client, self._salt, self._rng = client, salt, random.Random(seed)
        self._ids: list[int] = []
        self.times: list[float] = []

    async def turn(self, grow_to: int) -> None:
        """A turn of NEW tokens, after one that brings the conversation to the length of the agents'."""
        for count in (max(grow_to - NEW - len(self._ids), 1), NEW):
            self._ids += [self._rng.randrange(300, 3000) for _ in range(count)]
            body = {"prompt": self._ids, "max_tokens": 1, "cache_salt": self._salt, "timings_per_token": True}
            answer = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()
        self.times.append(answer["timings"]["prompt_ms"])


async def measure(model: str, turns: int, wait: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        async with served(model, chat_template=str(template), max_batch_size=4) as (client, pool):
            prepared = Prepared(pool.models[0])
            rows = []
            for name, calls in (("stripped", False), ("calls", True)):
                agents = {on: Agent(client, prepared, f"{name} {on}", calls=calls, is_on=on) for on in (False, True)}
                plain = Plain(client, f"{name} plain", 1)
                await _run(agents, plain, turns, wait)
                rows += [_row(model, name, on, agent, plain) for on, agent in agents.items()]
            return rows


async def _run(agents: dict[bool, Agent], plain: Plain, turns: int, wait: float) -> None:
    texts = prompts(turns, random.Random(3), WORDS)
    length = 0
    for text in texts:
        for agent in agents.values():
            if not await agent.turn(text, wait):
                return
            length = max(length, len(agent._known))
        await plain.turn(length)


def _row(model: str, name: str, is_on: bool, agent: Agent, plain: Plain) -> dict[str, Any]:
    half = len(plain.times) // 2
    ratios = [a / b for a, b in zip(agent.times[half:], plain.times[half:], strict=False)]
    return {
        "model": Path(model).name,
        "template": name,
        "next_turn": "on" if is_on else "off",
        "turns": len(agent.times),
        "tokens": len(agent._known),
        "share": statistics.fmean(agent.shares),
        "least": min(agent.shares),
        "ttft_ms": statistics.median(agent.times[half:]),
        "of_32": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent's turns up to the model's context.")
    parser.add_argument("models", nargs="*", default=["demo", "tests/data/qwen3_5"])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that a tool takes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [row for model in given.models for row in asyncio.run(measure(model, given.turns, given.wait))]
    report.show(rows)
    if given.json:
        report.save(given.json, "agent_turns", rows, wait=given.wait)


if __name__ == "__main__":
    main()
