"""Templates, tokenizing and untrusted files: their work is bounded in time, memory and parallelism."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx

import lmkit
from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, HealthProbe, serving

DEMO = Path(lmkit.__file__).parent / "demo" / "model"
WORDS = "some words of a text "
# Loops for ever if a message asks for it, and builds a value without end if another one does.
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}{% for i in range(10 ** 15) %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'grow' %}{% set n = namespace(s='x') %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def _post(command: Command, path: str, status: int, **body: object) -> float:
    """Seconds until the answer, which must have this status."""
    start = time.perf_counter()
    answer = httpx.post(command.url + path, json={"model": "demo", **body}, timeout=120)
    assert answer.status_code == status, answer.text[:500]
    return time.perf_counter() - start


def _worst_short_request(command: Command, attack: Callable[[], object]) -> float:
    """Seconds of the slowest request for one token while `attack` runs."""
    times = [_post(command, "/v1/completions", 200, prompt="import os", max_tokens=1)]
    thread = threading.Thread(target=attack)
    thread.start()
    while thread.is_alive():
        times.append(_post(command, "/v1/completions", 200, prompt="import os", max_tokens=1))
    return max(times[1:], default=times[0])


class LongTexts(NamedTuple):
    """What texts of up to 3.8 million characters do to others. The context has 4096 tokens."""

    short_seconds: float  # the slowest request for one token beside prompts that are refused
    kept_mib: float  # memory of the front end after them and after /tokenize
    health_seconds: float  # the slowest /health beside /tokenize and /detokenize


@shared
def long_texts(setting: Setting) -> LongTexts:
    text, times = WORDS * (40_000 if setting.quick else 180_000), 6 if setting.quick else 18
    with serving() as command, ThreadPoolExecutor(6) as threads:
        _post(command, "/v1/completions", 200, prompt="import os", max_tokens=1)
        before = command.resident_mib

        def attack() -> None:
            list(threads.map(lambda _: _post(command, "/v1/completions", 400, prompt=text, max_tokens=1), range(times)))

        short_seconds = _worst_short_request(command, attack)
        with HealthProbe(command.url) as probe:
            _post(command, "/tokenize", 200, prompt=text, return_token_strs=True)
            _post(command, "/detokenize", 200, tokens=[400] * (len(text) // 5))
        return LongTexts(short_seconds, command.resident_mib - before, probe.worst)


def hostile_template(setting: Setting) -> float:
    model = setting.workdir / "demo"
    shutil.copytree(DEMO, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    worst = 0.0
    with serving(model=str(model)) as command:
        for content in ("loop", "grow") if setting.quick else ("loop", "grow") * 3:
            messages = [{"role": "user", "content": content}]
            worst = max(worst, _post(command, "/v1/chat/completions", 400, messages=messages))
            _post(command, "/v1/chat/completions", 200, messages=[{"role": "user", "content": "a"}], max_tokens=1)
    return worst


CASES = (
    Case(
        "a request for one token beside prompts that are too long: worst",
        "s",
        1.5,
        lambda setting: long_texts(setting).short_seconds,
    ),
    Case(
        "prompts that are too long, and token texts: memory kept",
        "MiB",
        300.0,
        lambda setting: long_texts(setting).kept_mib,
    ),
    Case(
        "token texts of a large body: worst /health",
        "s",
        0.5,
        lambda setting: long_texts(setting).health_seconds,
    ),
    Case("a template that loops or grows without end: worst refusal", "s", 15.0, hostile_template),
)
