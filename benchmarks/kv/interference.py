"""The time between tokens of running sequences, when idle and while a long prompt is prefilled."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from benchmarks.kv.common import Client, Row, Setting, checkpoint, percentile, random_tokens
from benchmarks.random_llama import Shape

SHAPE = Shape(2048, 8192, 2, 4, 2, 64, 8192, 40_960)  # 137M parameters, 4-bit linears
STREAMS, PROMPT, SHORT = 4, 32_768, 64  # sequences that decode; tokens of the long prompt and of the others
IDLE_STEPS = 400  # before the prompt comes, and again after it
WARM_UP = 4  # short prompts beside the decoding sequences: the cost of a mixed step must be known
GOAL = 1.0


def cases(setting: Setting) -> list[Row]:
    """Twice the 99th percentile of the time between tokens when idle, divided by the 99th percentile while 32k prompt
    tokens are computed."""
    prompt_tokens, idle_steps = (512, 20) if setting.quick else (PROMPT, IDLE_STEPS)
    generator = random.Random(0)
    model = checkpoint(setting, SHAPE, awq=True)
    client = Client(model, prefix_cache=False, max_batch_size=STREAMS + 1, num_threads=setting.threads)
    streams = Streams(client, [random_tokens(generator, SHORT, SHAPE.vocab) for _ in range(STREAMS)])
    streams.gaps(idle_steps)
    for _ in range(WARM_UP):
        streams.gaps_beside(random_tokens(generator, SHORT, SHAPE.vocab))
        streams.gaps(idle_steps // 10)
    idle = streams.gaps(idle_steps)
    begin = time.perf_counter()
    loaded = streams.gaps_beside(random_tokens(generator, prompt_tokens, SHAPE.vocab))
    seconds = time.perf_counter() - begin
    idle += streams.gaps(idle_steps)
    return [row(idle, loaded, seconds_of_prompt=seconds, prompt_tokens=prompt_tokens)]


def row(idle: list[float], loaded: list[float], **facts: float) -> Row:
    """The row from the seconds between two tokens of a sequence."""
    ms = {
        f"{name}_ms_{kind}": 1000 * percentile(gaps, share)
        for kind, gaps in (("idle", idle), ("loaded", loaded))
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
    ratio = 2 * percentile(idle, 0.99) / percentile(loaded, 0.99)
    return Row("inter-token p99 while a 32k prompt prefills, at most twice the idle p99", ratio, GOAL, ms | facts)


class Streams:
    """Sequences that decode all the time."""

    def __init__(self, client: Client, prompts: list[list[int]]) -> None:
        self._client = client
        self._steps = iter(client.steps())
        names = [client.add(prompt, SHAPE.max_position - SHORT) for prompt in prompts]
        self._last: dict[str, float] = {}  # when each had its last token
        while len(self._last) < len(names):
            self._last |= {output.request_id: time.perf_counter() for output in next(self._steps)}

    def gaps(self, steps: int) -> list[float]:
        """Seconds between tokens over `steps` steps."""
        self._last = dict.fromkeys(self._last, time.perf_counter())
        return [gap for _ in range(steps) for gap in self._step()]

    def gaps_beside(self, prompt: list[int]) -> list[float]:
        """Seconds between tokens until `prompt` has its first token."""
        self._done: set[str] = set()
        name = self._client.add(prompt, 1)
        return list(self._until(name))

    def _until(self, name: str) -> Iterator[float]:
        while name not in self._done:
            yield from self._step()

    def _step(self) -> list[float]:
        outputs, gaps = next(self._steps), []
        now = time.perf_counter()
        for output in outputs:
            if output.request_id not in self._last:
                self._done.add(output.request_id)
            elif output.token_ids:
                gaps.append(now - self._last[output.request_id])
                self._last[output.request_id] = now
        return gaps
