"""Agents: traces are read as they are published, and every turn reaches the server as its conversation has it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.bench.agent import AgentRun, measure_agents, synthetic
from lmkit.bench.agent_config import AgentConfig
from lmkit.bench.agent_trace import AgentSession, read_agent_trace
from lmkit.bench.client import Client
from lmkit.bench.report import agent_notes
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer
from tests.bench.fake_server import CACHED, FakeServer
from tests.serve.fake_engine import DEMO


def replay(server: FakeServer, sessions: list[AgentSession], **fields: Any) -> tuple[AgentRun, list[list[Any]]]:
    """The run, and the messages of each request after the probes."""
    config = AgentConfig(url=server.url, tokenizer=str(DEMO), max_wait=0.0, **fields)
    run = asyncio.run(measure_agents(config, sessions))[1]
    return run, [body["messages"] for body in server.bodies[-len(run.requests) :]]


def trace(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def shape(session: AgentSession) -> list[Any]:
    return [
        (round(turn.wait, 3), [(block.id, block.num_tokens) for block in turn.blocks], turn.max_tokens)
        for turn in session.turns
    ]


def test_sessions_of_what_is_new(tmp_path: Path) -> None:
    one, two = "a", "b"
    file = trace(
        tmp_path,
        {"session_id": one, "input_length": 600, "output_length": 9, "hash_ids": [0, 1], "timestamp": 2000.0, "x": 1},
        {"session_id": two, "input_length": 512, "output_length": 8, "hash_ids": [0], "timestamp": 500.0},
        {"session_id": one, "input_length": 70, "output_length": 7, "hash_ids": [5], "delay": 2450.3},
    )
    second, first = read_agent_trace(file)
    assert (second.start, first.start) == (0.5, 2.0)
    assert shape(first) == [(0.0, [("0", 512), ("1", 88)], 9), (2.45, [("5", 70)], 7)]
    assert shape(second) == [(0.0, [("0", 512)], 8)]
    assert not first.turns[0].is_whole


def test_requests_of_whole_prompts_are_turns_where_they_go_on(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 900, "output_length": 5, "hash_ids": [8, 9]},
        {"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [1, 3, 4, 5]},
        {"timestamp": 4000, "input_length": 500, "output_length": 5, "hash_ids": [8]},
    )
    sessions = read_agent_trace(file)
    assert [(session.start, len(session.turns)) for session in sessions] == [(0.0, 2), (1.0, 1), (4.0, 1)]
    assert shape(sessions[0])[1] == (3.0, [("1", 512), ("3", 512), ("4", 512), ("5", 64)], 5)


def test_agentx(tmp_path: Path) -> None:
    calls = [
        {"type": "subagent", "agent_id": "0", "requests": [{"hash_ids": [1], "out": 3}]},  # nothing before it
        {"t": 0.0, "type": "s", "model": "m", "hash_ids": [1, 2], "in": 100, "out": 20, "think_time": 9.0},
        {"type": "subagent", "agent_id": "1", "requests": [{"t": 1.0, "hash_ids": [1, 7], "in": 90, "out": 4}]},
        {"t": 5.0, "type": "n", "hash_ids": [1, 2, 3], "in": 192, "out": 0, "think_time": 1.5},
        {"t": 8.0, "hash_ids": [1, 2, 3, 4], "out": 6},
    ]
    (tmp_path / "t1.json").write_text(json.dumps({"id": "t1", "models": ["m"], "block_size": 64, "requests": calls}))
    (session,) = read_agent_trace(tmp_path)
    first = [("t1/1", 64), ("t1/2", 36)]
    assert shape(session)[0] == (0.0, first, 20)
    assert [turn.wait for turn in session.turns] == [0.0, 1.5, 3.0]
    assert [turn.max_tokens for turn in session.turns] == [20, 1, 6]
    assert sum(block.num_tokens for block in session.turns[2].blocks) == 256
    (sub,) = session.turns[0].subagents
    assert shape(sub) == [(0.0, [("t1/1", 64), ("t1/7", 26)], 4)]
    assert session.num_turns == 4


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"input_length": 5}\n{"input_length": "x"}', "line 2: no request of a Mooncake or AgentX trace"),
        ('{"input_length": 0}', "at least 1"),
        ("{", "line 1"),
        ("", "has no request"),
        ('{"input_length": 100000000000}', "line 1.*<= 16777216.*input_length"),
        ('{"input_length": 5, "timestamp": NaN}', "line 1.*NaN is no number"),
        ('{"input_length": 5, "timestamp": 1e300}', "timestamp"),
        ('{"input_length": 5, "session_id": "a", "delay": -1}', "delay"),
        ('{"requests": [{"in": -5}]}', r"no AgentX trace.*requests\[0\].in"),
        ('{"requests": [{"in": 5, "hash_ids": [1]}], "block_size": 0}', "no AgentX trace.*block_size"),
        ('{"requests": [{"in": 5}, {"in": "6"}]}', r"no AgentX trace.*requests\[1\].in"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=named):
        read_agent_trace(file)


def test_sessions_may_be_numbers_and_a_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\ufeff" + '{"input_length": 5, "session_id": 7}\n' * 2 + '{"input_length": 5, "session_id": "7"}')
    assert [len(session.turns) for session in read_agent_trace(file)] == [2, 1]


def test_turns_grow_by_the_servers_own_answers(server: FakeServer) -> None:
    made = synthetic(AgentConfig(turns=3, num_agents=1, system_len=30, input_len=10, output_len=6))
    run, sent = replay(server, made)
    assert [len(messages) for messages in sent] == [1, 3, 5]
    assert [message["role"] for message in sent[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert sent[2][:3] == sent[1]
    assert sent[1][1]["content"] == "a b c d e f "
    tokenizer = Tokenizer.from_pretrained(DEMO)
    lengths = [len(tokenizer.encode(message["content"], False)) for message in sent[2] if message["role"] == "user"]
    assert lengths == [40, 10, 10]
    assert run.cached_share == CACHED / 5
    assert [(row.first, row.last, row.requests) for row in run.turns] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert all(row.ttft_ms is not None for row in run.turns)
    assert "1 agents and 0 sub-agents, 3 turns" in agent_notes(run)[0]


def test_subagents_begin_as_their_parent_and_end_before_it_goes_on(server: FakeServer) -> None:
    made = synthetic(AgentConfig(turns=2, num_agents=1, subagents=2, system_len=30, input_len=10, output_len=6))
    run, sent = replay(server, made)
    assert (run.agents, run.subagents, len(sent)) == (1, 2, 8)
    assert len(sent[0]) == 1
    firsts = [messages[0]["content"] for messages in sent if len(messages) == 1]
    assert len({text[:60] for text in firsts}) == 1
    assert len(set(firsts)) == 3
    assert sent[-1][0] == sent[0][0]  # the parent's second turn is the last of all


def test_results_of_tools_answer_calls(server: FakeServer) -> None:
    made = synthetic(AgentConfig(turns=2, num_agents=1, system_len=30, input_len=10))
    run, sent = replay(server, made, tools=True)
    assert server.bodies[-1]["tool_choice"] == "required"
    assert "ignore_eos" not in server.bodies[-1]
    _, called, result = sent[1]
    function = {"name": "run", "arguments": '{"command": "ls"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    assert called == {"role": "assistant", "content": None, "tool_calls": calls}  # its reasoning is not sent back
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")
    assert run.failed == 0


def test_a_turn_that_fails_ends_its_agent_and_is_told(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe(self: Client, *_: object) -> None:
        """The server is asked for nothing before the first turn."""

    monkeypatch.setattr(Client, "probe", probe)
    made = synthetic(AgentConfig(turns=3, num_agents=2, system_len=30, input_len=10))
    run, _ = replay(server, made, model="stops")
    assert (run.failed, len(run.requests)) == (2, 2)
    assert "2 turns failed" in agent_notes(run)[1]


def test_whole_prompts_hold_what_the_trace_says(server: FakeServer, tmp_path: Path) -> None:
    rows = [{"input_length": 530 + i, "output_length": 6, "hash_ids": [1, 2], "timestamp": i} for i in range(2)]
    _, sent = replay(server, read_agent_trace(trace(tmp_path, *rows)))
    assert [len(messages) for messages in sent] == [1, 1]
    one, two = (messages[0]["content"] for messages in sent)
    assert one[:1000] == two[:1000]
    assert one != two
