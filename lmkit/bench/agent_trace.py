"""Traces of agents: conversations that grow by results of tools, and sub-agents that begin like their parent.

    format          what it has
    sessions        a line for a turn, of what is new in it: {"session_id", "input_length", "output_length", "hash_ids",
                    "timestamp" or "delay"}; AIPerf's agentic code, and Mooncake traces with sessions
    Mooncake        a line for a request, of a whole prompt: {"timestamp", "input_length", "output_length", "hash_ids"}
    AgentX (Weka)   a file for a conversation: {"requests": [{"t", "hash_ids", "in", "out", "think_time"}, ...]}, of
                    whole prompts; a request may be {"type": "subagent", "requests": [...]}

A trace has no text. Each hash id is a block of a prompt, and equal ids are equal text. Times are in milliseconds, those
of AgentX in seconds. Requests of whole prompts that go on where another ended are later turns of one conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lmkit.bench.dataset import json_lines
from lmkit.errors import JSON_ERRORS, ConfigError

MOONCAKE_BLOCK, AGENTX_BLOCK = 512, 64  # tokens of a hash id, unless the trace says otherwise

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # of a prompt or an answer: no context is longer
Time = Annotated[float, msgspec.Meta(ge=0, le=1e14)]  # milliseconds since 1970 are allowed, too


@dataclass(frozen=True)
class Block:
    """A part of a prompt: equal ids are equal text."""

    id: str
    num_tokens: int


@dataclass
class AgentTurn:
    blocks: tuple[Block, ...]
    is_whole: bool  # they are the whole prompt; otherwise what is new after the answers before it
    max_tokens: int
    wait: float = 0.0  # seconds after the answer before it: a tool runs, or a user thinks
    subagents: list[AgentSession] = field(default_factory=list)  # begin after its answer, and end before the next turn


@dataclass
class AgentSession:
    start: float = 0.0  # seconds after the run's begin, or after its parent's answer
    turns: list[AgentTurn] = field(default_factory=list)

    @property
    def num_turns(self) -> int:
        """With those of sub-agents."""
        return len(self.turns) + sum(sub.num_turns for turn in self.turns for sub in turn.subagents)


class _Row(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace."""

    input_length: Tokens
    output_length: Tokens = 1
    hash_ids: list[int] = []
    timestamp: Time | None = None
    delay: Time = 0.0
    session_id: str | int | None = None


class _Call(msgspec.Struct, frozen=True):
    """A request of an AgentX trace, or a sub-agent."""

    t: Time = 0.0
    type: str = "n"
    hash_ids: list[int] = []
    input: Tokens | None = msgspec.field(name="in", default=None)
    out: Tokens = 1
    think_time: Time | None = None
    requests: list[_Call] = []


class _AgentX(msgspec.Struct, frozen=True):
    requests: list[_Call]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = AGENTX_BLOCK


def read_agent_trace(path: Path) -> list[AgentSession]:
    """The conversations of a file, or of all .json and .jsonl files of a folder, in the order of their starts.

    Raises ConfigError for what cannot be read, with the line.
    """
    files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
    sessions = [session for file in files for session in _of_file(file)]
    if not sessions:
        raise ConfigError(f"{path}: has no request")
    return sorted(sessions, key=lambda session: session.start)


def _of_file(path: Path) -> list[AgentSession]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        whole = msgspec.json.decode(text)
    except JSON_ERRORS:  # several lines
        whole = None
    if not (isinstance(whole, dict) and "requests" in whole):
        rows = [_converted(row, where) for where, row in json_lines(text, path)]
        sized = [(row, _blocks(row.hash_ids, row.input_length, MOONCAKE_BLOCK)) for row in rows]
        has_sessions = [(row, blocks) for row, blocks in sized if row.session_id is not None]
        return [
            *_sessions(has_sessions),
            *_mooncake([(row, blocks) for row, blocks in sized if row.session_id is None]),
        ]
    try:
        agentx = msgspec.convert(whole, _AgentX)
    except JSON_ERRORS as error:
        raise ConfigError(f"{path}: no AgentX trace: {error}") from None
    return _agentx(agentx.requests, agentx.block_size, path.stem)


def _converted(row: Any, where: str) -> _Row:
    try:
        found = msgspec.convert(row, _Row)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: no request of a Mooncake or AgentX trace: {error}") from None
    if found.input_length < 1 or found.output_length < 1:
        raise ConfigError(f"{where}: input_length and output_length are at least 1")
    return found


def _blocks(ids: Sequence[int], length: int, size: int, scope: str = "") -> tuple[Block, ...]:
    """Blocks for so many tokens. The last id has what is left; what no id covers is text that nothing shares."""
    blocks = [Block(f"{scope}{id}", min(size, length - i * size)) for i, id in enumerate(ids) if i * size < length]
    if (left := length - sum(block.num_tokens for block in blocks)) > 0:
        blocks.append(Block("", left))
    return tuple(blocks)


def _sessions(rows: Iterable[tuple[_Row, tuple[Block, ...]]]) -> Iterator[AgentSession]:
    found: dict[str | int | None, AgentSession] = {}
    for row, blocks in rows:
        session = found.setdefault(row.session_id, AgentSession((row.timestamp or 0.0) / 1e3))
        session.turns.append(AgentTurn(blocks, False, row.output_length, row.delay / 1e3 if session.turns else 0.0))
    yield from found.values()


def _mooncake(rows: Iterable[tuple[_Row, tuple[Block, ...]]]) -> Iterator[AgentSession]:
    timed = [((row.timestamp or 0.0) / 1e3, AgentTurn(blocks, True, row.output_length)) for row, blocks in rows]
    yield from _chained(timed)


def _chained(timed: Iterable[tuple[float, AgentTurn]]) -> Iterator[AgentSession]:
    """Whole prompts as conversations: one goes on where its prompt begins with all full blocks of the last one."""
    last: dict[int, tuple[AgentSession, float]] = {}  # by the full blocks of a conversation's last prompt
    sessions = []
    for start, turn in sorted(timed, key=lambda pair: pair[0]):
        keys = [0]  # of the first blocks, of the first two ...
        for block in turn.blocks[:-1]:
            keys.append(hash((keys[-1], block.id)))
        known = next((key for key in reversed(keys[1:]) if key in last), None)
        session, before = last.pop(known) if known is not None else (AgentSession(start), start)
        if not session.turns:
            sessions.append(session)
        turn.wait = start - before
        session.turns.append(turn)
        last[keys[-1]] = session, start
    yield from sessions


def _agentx(calls: Sequence[_Call], size: int, scope: str) -> list[AgentSession]:
    """A conversation, and sub-agents of its turns. Those before the first turn, or of no request, are left out."""
    session, before = AgentSession(), 0.0
    for call in calls:
        if call.type == "subagent":
            if session.turns and call.requests:
                session.turns[-1].subagents += _agentx(call.requests, size, scope)
            continue
        wait = call.think_time if call.think_time is not None else max(call.t - before, 0.0)
        length = call.input if call.input is not None else size * len(call.hash_ids)
        if length > 0:
            blocks = _blocks(call.hash_ids, length, size, f"{scope}/")
            session.turns.append(AgentTurn(blocks, True, max(call.out, 1), wait if session.turns else 0.0))
        before = call.t
    return [session] if session.turns else []
