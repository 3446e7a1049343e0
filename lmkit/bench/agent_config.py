"""The configuration of `lmkit bench agent`. It imports little, because the command line imports it."""

from __future__ import annotations

from typing import Annotated

from lmkit.bench.config import NonNegativeInt, Positive, Seconds
from lmkit.config import PositiveInt, StrictStruct
from lmkit.option import Option


class AgentConfig(StrictStruct, frozen=True):
    """The server, and how agents go on it."""

    url: Annotated[str, Option("http://HOST:PORT of a server or proxy.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Option("Default: the only one that the server lists.")] = None
    tokenizer: Annotated[str | None, Option("The model's folder or Hub name. Default: the model, if here.")] = None
    timeout: Annotated[Positive, Option("Seconds for a whole answer.")] = 600.0
    concurrency: Annotated[PositiveInt | None, Option("Agents at once. Default: each starts at its time.")] = None
    max_wait: Annotated[Seconds, Option("A tool takes so many seconds at most.")] = 60.0
    num_agents: Annotated[PositiveInt | None, Option("The first so many agents. Default: all; made up, 4.")] = None
    tools: Annotated[bool, Option("Answers are calls of a tool, and what follows is its result.")] = False
    # made up
    turns: Annotated[PositiveInt, Option("Made up: turns of an agent.")] = 20
    system_len: Annotated[PositiveInt, Option("Made up: tokens of the prompt that all agents share.")] = 512
    input_len: Annotated[PositiveInt, Option("Made up: tokens of a task, and of a tool's result.")] = 64
    output_len: Annotated[PositiveInt, Option("Made up: tokens of an answer.")] = 48
    wait: Annotated[Seconds, Option("Made up: seconds that a tool takes.")] = 0.5
    subagents: Annotated[NonNegativeInt, Option("Made up: sub-agents after the first answer, of 3 turns each.")] = 0
    seed: Annotated[NonNegativeInt, Option("Seed of the texts.")] = 0
