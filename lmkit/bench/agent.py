"""`lmkit bench agent`: agents on a server, from a trace or made up. No torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from lmkit.bench.agent_config import AgentConfig
from lmkit.bench.agent_trace import AgentSession, AgentTurn, Block
from lmkit.bench.client import Client, StreamedResponse
from lmkit.bench.config import Progress
from lmkit.bench.metrics import Distribution, distribution
from lmkit.bench.online import find_tokenizer
from lmkit.bench.synthetic import TextMaker
from lmkit.bench.workload import Dialogue
from lmkit.errors import ConfigError, LMKitError
from lmkit.text import Tokenizer

TURNS = (1, 2, 3, 5, 9, 17, 33)  # the first turns of the rows of the report
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command and return what it writes.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "maxLength": 24}},
            "required": ["command"],
        },
    },
}


class AgentRequest(msgspec.Struct, frozen=True):
    """One turn as it went."""

    turn: int  # from 1 on
    start: float  # seconds, on time.perf_counter
    end: float
    ttft_ms: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not say
    error: str | None


class TurnFigures(msgspec.Struct, frozen=True):
    """Of turns first to last of all agents."""

    first: int
    last: int
    requests: int
    prompt_tokens: float  # mean
    cached_share: float | None
    ttft_ms: Distribution | None


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """All agents to their ends."""

    agents: int
    subagents: int
    seconds: float
    failed: int
    prompt_tokens: int
    output_tokens: int
    cached_share: float | None
    turns: list[TurnFigures]
    requests: list[AgentRequest]


async def measure_agents(
    config: AgentConfig,
    sessions: Sequence[AgentSession],
    *,
    api_key: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[str, AgentRun]:
    """The model's name, and the run. Raises LMKitError before the first turn if the server does not answer."""
    client = Client(config.url, "chat", api_key=api_key, timeout=config.timeout)
    try:
        model = await client.choose_model(config.model)
        tokenizer = find_tokenizer(config.tokenizer, model)
        if tokenizer is None:
            raise ConfigError("a trace has no text; to make some, name the model's folder with --tokenizer")
        wanted: dict[str, Any] = {"ignore_eos": {"ignore_eos": True}}
        if config.tools:
            wanted = {"tools": {"tools": [TOOL], "tool_choice": "required"}}
        await client.probe({"temperature": 0}, wanted)
        if config.tools and "tools" not in client.features:
            raise LMKitError(f"{client.base}: the server refuses tools with tool_choice: required; leave --tools out")
        client.renew_cache()
        run = await _Replay(client, config, tokenizer, progress).run(sessions)
    finally:
        await client.close()
    return model, run


def synthetic(config: AgentConfig) -> list[AgentSession]:
    """Agents that share a system prompt; their tools' results are their own."""
    system = Block("system", config.system_len)

    def agent(name: str, num_turns: int) -> AgentSession:
        own = (Block(f"{name}/{turn}", config.input_len) for turn in range(num_turns))
        turns = [AgentTurn((block,), False, config.output_len, config.wait) for block in own]
        turns[0] = AgentTurn((system, *turns[0].blocks), False, config.output_len)
        return AgentSession(0.0, turns)

    sessions = [agent(f"{idx}", config.turns) for idx in range(config.num_agents or 4)]
    for idx, session in enumerate(sessions):
        session.turns[0].subagents += [agent(f"{idx}.{sub}", 3) for sub in range(config.subagents)]
    return sessions


class _Texts:
    """Texts of blocks, each the same whenever it is asked for."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._seed, self._made = tokenizer, seed, dict[Block, str]()
        self._maker: Callable[[np.random.Generator], TextMaker] = partial(TextMaker, tokenizer)
        self._num_own = 0

    def of(self, blocks: Sequence[Block]) -> str:
        return "".join(map(self._of, blocks))

    def _of(self, block: Block) -> str:
        if not block.id:  # nothing shares it
            self._num_own += 1
            block = Block(f"own {self._num_own}", block.num_tokens)
        if block not in self._made:
            rng = np.random.default_rng([self._seed, *block.id.encode()])
            self._made[block] = self._maker(rng).text(block.num_tokens, self._measure)
        return self._made[block]

    def _measure(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class _Replay:
    def __init__(self, client: Client, config: AgentConfig, tokenizer: Tokenizer, progress: Progress) -> None:
        self._client, self._config, self._progress = client, config, progress
        self._texts = _Texts(tokenizer, config.seed)
        self._done: list[AgentRequest] = []
        self._total = self._num_subagents = 0

    async def run(self, sessions: Sequence[AgentSession]) -> AgentRun:
        config = self._config
        sessions = sessions[: config.num_agents]
        self._total = sum(session.num_turns for session in sessions)
        limit = asyncio.Semaphore(config.concurrency or len(sessions))
        origin = time.perf_counter()

        async def one(session: AgentSession) -> None:
            if config.concurrency is None:
                await asyncio.sleep(session.start - sessions[0].start)
            async with limit:
                await self._converse(session)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(one(session))
        return summarize_agents(self._done, len(sessions), self._num_subagents, time.perf_counter() - origin)

    async def _converse(self, session: AgentSession) -> None:
        dialogue = Dialogue(True)
        call_id = ""  # of the call that the next message answers
        for number, turn in enumerate(session.turns, 1):
            await asyncio.sleep(min(turn.wait, self._config.max_wait))
            text = self._texts.of(turn.blocks)
            said = {"role": "tool", "tool_call_id": call_id} if call_id else {"role": "user"}
            dialogue.messages = [*([] if turn.is_whole else dialogue.messages), {**said, "content": text}]
            answer = await self._client.send(dialogue, turn.max_tokens)
            self._done.append(_request(number, answer))
            self._progress("turns", len(self._done), self._total)
            if answer.error is not None:
                return
            message: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if calls := list(answer.calls.values()):
                message |= {"content": answer.content or None, "tool_calls": calls[:1]}
            call_id = calls[0]["id"] if calls and not turn.is_whole else ""
            dialogue.messages = [*dialogue.messages, message]
            self._num_subagents += len(turn.subagents)
            async with asyncio.TaskGroup() as group:
                for sub in turn.subagents:
                    group.create_task(self._converse(sub))


def _request(number: int, answer: StreamedResponse) -> AgentRequest:
    first = answer.chunks[0].time if answer.chunks else None
    return AgentRequest(
        turn=number,
        start=answer.start,
        end=answer.end,
        ttft_ms=1e3 * (first - answer.start) if first is not None and answer.error is None else None,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=answer.output_tokens or 0,
        cached_tokens=answer.cached_tokens,
        error=answer.error and f"{answer.error}: {answer.message}",
    )


def summarize_agents(requests: Sequence[AgentRequest], agents: int, subagents: int, seconds: float) -> AgentRun:
    """The figures of all turns, and of the first, second, third to fourth ..."""
    done = [request for request in requests if request.error is None]
    rows = []
    for first, after in zip(TURNS, [*TURNS[1:], 1 << 31], strict=True):
        own = [request for request in done if first <= request.turn < after]
        if own:
            ttfts = distribution(request.ttft_ms for request in own if request.ttft_ms is not None)
            mean = sum(request.prompt_tokens for request in own) / len(own)
            rows.append(TurnFigures(first, max(r.turn for r in own), len(own), mean, _cached_share(own), ttfts))
    return AgentRun(
        agents=agents,
        subagents=subagents,
        seconds=seconds,
        failed=len(requests) - len(done),
        prompt_tokens=sum(request.prompt_tokens for request in done),
        output_tokens=sum(request.output_tokens for request in done),
        cached_share=_cached_share(done),
        turns=rows,
        requests=list(requests),
    )


def _cached_share(requests: Sequence[AgentRequest]) -> float | None:
    """Of the tokens of these prompts. None if the server does not say it."""
    told = [request for request in requests if request.cached_tokens is not None]
    total = sum(request.prompt_tokens for request in told)
    return sum(request.cached_tokens or 0 for request in told) / total if total else None
