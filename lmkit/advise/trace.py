"""Reads a trace: the figures of a benchmark, an access log, turns of agents, the prompts of a data set or a batch.

    kind        file                                            has
    benchmark   `lmkit bench online --json FILE --requests`     times, lengths
    log         `lmkit serve|proxy|up --log-format json`        times; behind a proxy that counts tokens also lengths
    agents      what `lmkit bench agent` reads                  times, lengths, what prompts share
    batch       JSON lines of /v1/batches                       prompts, limits of answers
    dataset     what `lmkit bench --dataset` reads              prompts, answers or their limits

Prompts become tokens with a model's tokenizer. The first malformed line is an error with its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from lmkit.bench.agent_trace import AgentSession, Block, read_agent_trace
from lmkit.bench.dataset import Entry, entry_of, json_array, json_lines
from lmkit.bench.metrics import RequestRecord
from lmkit.bench.schema import SCHEMA
from lmkit.bench.workload import Dialogue
from lmkit.errors import ConfigError, LMKitError
from lmkit.text import Tokenizer

Kind = Literal["benchmark", "log", "agents", "batch", "dataset", "server"]
VOCAB = 2**31 - 1  # prompts may have any tokens
_OF_AGENTS = {"input_length", "hash_ids", "requests"}  # fields of such a trace's first object
ROUTES = {  # with or without /v1; those whose requests generate text
    "/chat/completions", "/completions", "/responses", "/messages", "/generate", "/invocations",
}  # fmt: skip
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # names of one limit
_BATCH_ROUTES = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
# Fields of a batch's body that add to its prompt, or ask for more than one answer.
_NOT_READ = ("tools", "functions", "chat_template", "chat_template_kwargs", "n", "best_of", "suffix")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. What the trace does not tell is None."""

    start: float | None = None  # seconds on the trace's own clock
    end: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # those of the prompt that the server found in its prefix cache
    max_tokens: int | None = None
    prompt: np.ndarray | None = None  # its tokens, int32 [prompt_tokens]
    failed: bool = False
    ttft: float | None = None  # seconds to its first token
    itl: tuple[float, ...] = ()  # seconds between its tokens


@dataclass(frozen=True)
class Trace:
    kind: Kind
    requests: list[TracedRequest] = field(default_factory=list)  # in the order of the file
    num_left_out: int = 0  # requests that generate no text, warm-ups, conversations without a user's message


def read_trace(path: Path, tokenizer: Tokenizer | None = None) -> Trace:
    """The trace in the file `path`. Prompts need a `tokenizer`; the other kinds take none.

    Raises ConfigError for a file or a line that cannot be read, and for a trace without any request.
    """
    if path.is_dir():
        return _agents(path, tokenizer)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {why}") from None
    first = _first_value(text, path)
    if isinstance(first, dict) and "schema" not in first and _OF_AGENTS & first.keys():
        return _agents(path, tokenizer)
    if isinstance(first, dict) and ("schema" in first or "logger" in first):
        if tokenizer is not None:
            raise ConfigError(f"{path}: has no prompts, so --tokenizer has no use")
        trace = _benchmark(text, path) if "schema" in first else _log(text, path)
    else:
        trace = _prompts(text, path, tokenizer, is_batch=isinstance(first, dict) and "custom_id" in first)
    if not trace.requests:
        raise ConfigError(f"{path}: has no request that generates text")
    return trace


def _first_value(text: str, path: Path) -> Any:
    start = text.lstrip()
    if not start:
        raise ConfigError(f"{path}: is empty")
    if start.startswith("["):
        return None  # ShareGPT's array; a log in text begins with a digit
    try:
        value = json.JSONDecoder().raw_decode(start)[0]
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: begins with no JSON object; a log must be written with --log-format json")
    return value


def _benchmark(text: str, path: Path) -> Trace:
    try:
        document = json.loads(text)
        schema, runs = document["schema"], document["runs"]
        if schema != SCHEMA:
            raise ConfigError(f"{path}: schema is {schema!r}, expected {SCHEMA!r}")
        records = [msgspec.convert(run.get("requests", []), list[RequestRecord]) for run in runs]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: not the figures of `lmkit bench`: {error!s:.200}") from None
    if len(records) != 1:
        raise ConfigError(f"{path}: has {len(records)} runs; a trace is one: give one --rate and one --concurrency")
    if not records[0]:
        raise ConfigError(f"{path}: has no requests; run `lmkit bench` with --requests")
    requests = [
        TracedRequest(
            start=record.start,
            end=record.end,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            max_tokens=record.requested_tokens,
            failed=record.error is not None,
            ttft=record.ttft if record.bursts else None,
            itl=tuple(record.intervals()),
        )
        for record in records[0]
        if record.measured
    ]
    return Trace("benchmark", requests, len(records[0]) - len(requests))


class _LogLine(msgspec.Struct, frozen=True):
    """A line of an access log. The proxy counts `input`, `cached` and `output` tokens where keys have limits."""

    time: datetime  # the request's end
    method: str
    path: str
    status: int
    duration_ms: float
    input: int | None = None
    cached: int | None = None
    output: int | None = None


def _log(text: str, path: Path) -> Trace:
    requests, num_left_out = [], 0
    for where, row in json_lines(text, path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object, got {type(row).__name__}")
        if "duration_ms" not in row:
            continue  # a line about something else than a request
        try:
            line = msgspec.convert(row, _LogLine)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: no line of an access log: {error}") from None
        if line.method != "POST" or line.path.removeprefix("/v1") not in ROUTES:
            num_left_out += 1
            continue
        end = line.time.timestamp()
        requests.append(
            TracedRequest(
                start=end - line.duration_ms / 1e3,
                end=end,
                prompt_tokens=line.input,
                output_tokens=line.output,
                cached_tokens=line.cached,
                failed=line.status >= 400,
            )
        )
    return Trace("log", requests, num_left_out)


def _agents(path: Path, tokenizer: Tokenizer | None) -> Trace:
    """All turns, by their times. What an answer takes is not in the trace: a turn's wait follows the turn before it."""
    if tokenizer is not None:
        raise ConfigError(f"{path}: has no text, so --tokenizer has no use")
    rng = np.random.default_rng(0)
    turns = [turn for session in read_agent_trace(path) for turn in _turns(session, 0.0, rng)]
    return Trace("agents", sorted(turns, key=lambda turn: turn.start or 0.0))


def _turns(session: AgentSession, begin: float, rng: np.random.Generator) -> Iterator[TracedRequest]:
    at, prompt = begin + session.start, np.zeros(0, np.int32)
    for turn in session.turns:
        at += turn.wait
        own = [_tokens(block, rng) for block in turn.blocks]
        prompt = np.concatenate(own if turn.is_whole else [prompt, *own])
        yield TracedRequest(
            start=at,
            prompt_tokens=len(prompt),
            output_tokens=turn.max_tokens,
            max_tokens=turn.max_tokens,
            prompt=prompt,
        )
        if not turn.is_whole:
            prompt = np.concatenate([prompt, _tokens(Block("", turn.max_tokens), rng)])
        for sub in turn.subagents:
            yield from _turns(sub, at, rng)


def _tokens(block: Block, rng: np.random.Generator) -> np.ndarray:
    """int32 [num_tokens]. Those of a shorter block with the same id come first in those of a longer one."""
    made = np.random.default_rng(list(block.id.encode())) if block.id else rng
    return made.integers(VOCAB, size=block.num_tokens, dtype=np.int32)


def _prompts(text: str, path: Path, tokenizer: Tokenizer | None, *, is_batch: bool) -> Trace:
    if tokenizer is None:
        raise ConfigError(f"{path}: has prompts; name the model that counts their tokens with --tokenizer")
    rows = json_array(text, path) if text.lstrip().startswith("[") else json_lines(text, path)
    seen = [(where, entry_of(_body(row, where) if is_batch else row, where)) for where, row in rows]
    entries = [(where, entry) for where, entry in seen if entry is not None]
    return Trace("batch" if is_batch else "dataset", list(_requests(entries, tokenizer)), len(seen) - len(entries))


def _body(row: Any, where: str) -> dict[str, Any]:
    """The body of a batch's line, with its limit as `max_tokens`."""
    if not (isinstance(row, dict) and isinstance(row.get("body"), dict)):
        raise ConfigError(f'{where}: expected "custom_id", "method", "url" and "body", as /v1/batches takes them')
    body, url = row["body"], row.get("url")
    if url not in _BATCH_ROUTES:
        raise ConfigError(f"{where}: url {url!r}: expected {' or '.join(_BATCH_ROUTES)}")
    if unread := [name for name in _NOT_READ if body.get(name) not in (None, [], 1)]:
        raise ConfigError(f"{where}: body: {unread[0]} is not supported here")
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    return {_BATCH_ROUTES[url]: body.get(_BATCH_ROUTES[url]), "max_tokens": limit}


def _requests(entries: Iterable[tuple[str, Entry]], tokenizer: Tokenizer) -> Iterable[TracedRequest]:
    """A request for each entry: all up to the last user's message is its prompt, and what follows is its answer."""
    for where, entry in entries:
        last = max(idx for idx, message in enumerate(entry.messages) if message["role"] == "user")
        answer = "".join(message["content"] for message in entry.messages[last + 1 :])
        dialogue = Dialogue(entry.is_chat, entry.messages[: last + 1])
        try:
            prompt = np.array(dialogue.token_ids(tokenizer, chat=entry.is_chat), np.int32)
            num_output = len(tokenizer.encode(answer, add_special_tokens=False)) if answer else None
        except LMKitError as error:
            raise ConfigError(f"{where}: {error}") from None
        yield TracedRequest(
            prompt_tokens=len(prompt), output_tokens=num_output, max_tokens=entry.max_tokens, prompt=prompt
        )
