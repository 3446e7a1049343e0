"""One API key sends patterns whose automaton grows without end, and another one wants answers with its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import psutil

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, serving

OTHER, ATTACKER = "key-of-the-other", "key-of-the-attacker"
TOO_LONG = 120.0  # seconds
MANY = 10  # patterns at once
SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Patterns(NamedTuple):
    """What the patterns do to the other key. Times are the worst, in seconds."""

    beside_each: float  # a short answer beside one pattern after the other
    kept_mib: float  # what the server's processes have grown by after them
    beside_many: float  # a short answer beside many patterns at once
    new_schema: float  # an answer with a schema of its own beside them


def _ask(server: Command, key: str, **fields: object) -> int:
    """The status of an answer of a few tokens."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", headers=headers, json=body, timeout=TOO_LONG).status_code


def _seconds(server: Command, **fields: object) -> float:
    """Until the other key has an answer."""
    start = time.perf_counter()
    if (status := _ask(server, OTHER, **fields)) != 200:
        raise RuntimeError(f"the other key gets {status}")
    return time.perf_counter() - start


def _schema(number: int) -> dict[str, object]:
    """Fields with a schema that no request had."""
    named = {"name": "x", "schema": {**SHAPE, "title": f"t{number}"}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _pattern(text: str) -> dict[str, object]:
    return {"structured_outputs": {"regex": text}}


def _refused(server: Command, pattern: str) -> None:
    if (status := _ask(server, ATTACKER, **_pattern(pattern))) != 400:
        raise RuntimeError(f"the pattern {pattern} gets {status}")


@contextlib.contextmanager
def _short_answers(server: Command) -> Iterator[list[float]]:
    """The seconds of short answers of the other key while the block runs."""
    end, times = threading.Event(), [_seconds(server)]

    def ask() -> None:
        while not end.wait(0.05):
            times.append(_seconds(server))

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield times
        finally:
            end.set()
            asking.result()


def _resident_mib(server: Command) -> float:
    """Of all processes of a server."""
    processes = (psutil.Process(server.process.pid), *server.children())
    return sum(process.memory_info().rss for process in processes) / 2**20


@shared
def patterns(setting: Setting) -> Patterns:
    letters = "ab" if setting.quick else "abcdefgh"
    with serving("--kv-memory", "64M", "--api-key", OTHER, "--api-key", ATTACKER) as server:
        _seconds(server, **_schema(0))
        _ask(server, ATTACKER, **_pattern("[ab]{3}"))  # what the first grammar of a key makes stays
        before = _resident_mib(server)
        with _short_answers(server) as times:
            for letter in letters:
                _refused(server, f"(({letter}{{1000}}){{1000}}){{1000}}")
        kept = _resident_mib(server) - before
        with ThreadPoolExecutor(MANY) as threads, _short_answers(server) as crowded:
            running = [
                threads.submit(_ask, server, ATTACKER, **_pattern(f"((a{{900}}){{900}}){{{900 + number}}}"))
                for number in range(MANY // 2 if setting.quick else MANY)
            ]
            schemas = [_seconds(server, **_schema(number)) for number in range(1, 4)]
            if not all(400 <= one.result() <= 499 for one in running):
                raise RuntimeError(f"patterns get {[one.result() for one in running]}")
    return Patterns(max(times), kept, max(crowded), max(schemas))


CASES = (
    Case("patterns that grow: worst short answer to another key", "s", 3.0, lambda at: patterns(at).beside_each),
    Case("patterns that grow: memory that stays", "MiB", 300.0, lambda at: patterns(at).kept_mib),
    Case("many such patterns at once: worst short answer", "s", 5.0, lambda at: patterns(at).beside_many),
    Case("many such patterns at once: worst new schema", "s", 10.0, lambda at: patterns(at).new_schema),
)
