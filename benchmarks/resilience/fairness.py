"""One API key floods a server, and another one wants an answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.processes import Command, serving

FLOOD, OTHER = "key-of-the-flood", "key-of-the-other"
PROBES = 5  # requests of the other key, one after the other
TOO_LONG = 60.0  # seconds


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[Command]:
    keys = folder / "keys"
    keys.write_text(f"{FLOOD}\n{OTHER}\n")
    with serving("--api-key-file", str(keys), "--max-model-len", "512", "--drain-seconds", "0") as server:
        yield server


def _complete(server: Command, key: str, timeout: float = TOO_LONG, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True} | fields,
        timeout=timeout,
    )


def worst_answer_beside_a_flood(setting: Setting) -> float:
    """Seconds to eight tokens for one key, while the other's bodies of many long sequences fill all seats."""
    prompts = ["Once upon a time", "There was", "In a town", "One day"][: 1 if setting.quick else 4]
    with _server(setting.workdir) as server:

        def flood() -> None:
            with contextlib.suppress(httpx.TransportError):
                _complete(server, FLOOD, prompt=prompts, n=64, max_tokens=480)

        threads = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        _until_waiting(server)
        worst = 0.0
        for i in range(PROBES):
            begin = time.perf_counter()
            response = _complete(server, OTHER, prompt=f"{i} times")
            assert response.status_code == 200, response.text
            worst = max(worst, time.perf_counter() - begin)
        assert any(thread.is_alive() for thread in threads), "the flood has ended: nothing was attacked"
    return worst


def _until_waiting(server: Command) -> None:
    """Wait until sequences stand in the queue."""
    end = time.monotonic() + TOO_LONG
    while time.monotonic() < end:
        text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": OTHER}).text
        lines = [line for line in text.splitlines() if line.startswith("lmkit:num_requests_waiting")]
        if lines and float(lines[0].split()[-1]) > 0:
            return
        time.sleep(0.05)
    raise RuntimeError("the flood does not fill the server")


def unbounded_requests(setting: Setting) -> float:
    """Requests of an ordinary key that get more than it may: a raised priority, or a body beyond its share."""
    with _server(setting.workdir) as server:
        raised = _complete(server, FLOOD, priority=-1000)
        lowered = _complete(server, FLOOD, priority=5)
        large = _complete(server, FLOOD, n=128, prompt=["word"] * 8)
        assert lowered.status_code == 200, lowered.text
        return float((raised.status_code != 403) + (large.status_code not in (400, 429)))


CASES = (
    Case("flood of one key: worst answer to another key", "s", 5.0, worst_answer_beside_a_flood),
    Case("raised priorities and bodies beyond a key's share that are served", "requests", 0.0, unbounded_requests),
)
