"""Structured programs beside the same calls made as plain requests.

    python -m benchmarks.programs [MODEL] [--kinds a,b] [--sides a,b] [--programs N] [--rounds N] [--peer URL]
                                  [--share X] [--resume FILE]

The seven programs are those of SGLang's paper (arXiv 2312.07104), made small. The other sides make the same calls as
requests of /v1/completions, with the whole text each time:

    plain     to the same `lmkit serve`, as a script with a client library does and as the baselines of that paper: each
              program sends one request after the other. It selects as `select` does, by the log-probabilities of each
              choice: one request for each (`echo`, `logprobs`), for a server gives these only for a whole prompt
    together  as `plain`, but a program sends the requests of its branches and choices at the same time
    answers   as `together`, but selects by one answer that must be a choice. That need not be the likeliest choice
    peer, peer_together, peer_answers   the same to `--peer`, an OpenAI server of the same model, such as vLLM

All servers have a prefix cache. Programs run at the same time on all sides. JSON is constrained by the same schema.
Sides take turns, and every text begins with words of its own, so no side finds the KV of another.

`hits`: prompt tokens that were found in the cache, beside those that a cache would have that knows every token ever
computed. Answers have fixed lengths, so random weights do. With `--share 0.25` answers have a quarter of their length,
on all sides; prompts stay. `--resume FILE` keeps each kind's figures when it ends, and the next run with the same
options takes them from there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from lmkit.api.generation import GenerationConfig
from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.program import Branch, Server, Trace
from lmkit.program.model import Answer, Messages, Model, Prompt, Score
from lmkit.program.remote import fields_of
from lmkit.program.run import opened
from lmkit.quant.report.evaluate import HELDOUT_TEXT

Program = Callable[[Branch, random.Random, "Task"], Awaitable[None]]
TEXT = HELDOUT_TEXT.read_text()
TOOLS = ["search", "open", "calculate", "finish"]
SHORT, NUMBER = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 9999}
PLACE = {"type": "object", "properties": {"street_name": SHORT, "house_number": NUMBER, "postal_code": NUMBER},
         "required": ["street_name", "house_number", "postal_code"], "additionalProperties": False}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "character_name": SHORT, "date_of_birth": NUMBER, "occupation": {"enum": ["wizard", "teacher", "student"]},
        "place_of_residence": PLACE, "is_still_alive": {"type": "boolean"},
    },
    "required": ["character_name", "date_of_birth", "occupation", "place_of_residence", "is_still_alive"],
    "additionalProperties": False,
}  # fmt: skip


def piece(rng: random.Random, characters: int) -> str:
    start = rng.randrange(len(TEXT) - characters)
    return TEXT[start : start + characters]


@dataclass(frozen=True)
class Task:
    """What the programs of one round have in common: `salt`, with which all texts begin, and the share of an answer's
    length that is written.
    """

    salt: str
    share: float = 1.0

    def shared(self, name: str, characters: int) -> str:
        """A text that all programs of a kind begin with."""
        return f"{self.salt} {name}\n" + piece(random.Random(name), characters)

    def length(self, count: int) -> int:
        return max(1, round(self.share * count))

    async def write(self, branch: Branch, count: int) -> str:
        """Free text of a fixed length."""
        count = self.length(count)
        return await branch.gen(max_new_tokens=count, min_new_tokens=count, ignore_eos=True)


async def questions(branch: Branch, rng: random.Random, task: Task) -> None:
    """Multiple choice after examples that all questions share (MMLU)."""
    branch += task.shared("examples", 2400) + piece(rng, 200) + "\nAnswer:"
    await branch.select([" A", " B", " C", " D"])


async def thoughts(branch: Branch, rng: random.Random, task: Task) -> None:
    """A tree of thought: two levels of three ideas, each with a mark."""
    branch += task.shared("tree", 800) + piece(rng, 200)

    async def idea(fork: Branch) -> tuple[str, Branch]:
        fork += "\nIdea:"
        await task.write(fork, 24)
        fork += "\nMark:"
        return await fork.select([" 1", " 2", " 3"]), fork

    for _ in range(2):
        ideas = await asyncio.gather(*map(idea, branch.fork(3)))
        branch = max(ideas, key=lambda found: found[0])[1]
    branch += "\nAnswer:"
    await task.write(branch, 24)


async def agent(branch: Branch, rng: random.Random, task: Task) -> None:
    """A ReAct agent: thoughts, tools, and what they return."""
    branch += task.shared("agent", 1600) + piece(rng, 150)
    for _ in range(3):
        branch += "\nThought:"
        await task.write(branch, 20)
        branch += "\nAction: "
        await branch.select(TOOLS)
        branch += "\nObservation: " + piece(rng, 200)
    branch += "\nAnswer:"
    await task.write(branch, 20)


async def turns(branch: Branch, rng: random.Random, task: Task) -> None:
    """A conversation of four turns."""
    branch += f"{task.salt} {rng.random()}\n"
    for _ in range(4):
        branch += "\nUser: " + piece(rng, 250) + "\nAssistant:"
        await task.write(branch, 24)


async def form(branch: Branch, rng: random.Random, task: Task) -> None:
    """JSON that follows a schema."""
    branch += task.shared("form", 600) + piece(rng, 200) + "\nJSON: "
    await branch.gen(schema=SCHEMA, max_new_tokens=task.length(200))


async def judge(branch: Branch, rng: random.Random, task: Task) -> None:
    """An essay is judged in four respects at the same time, then as a whole."""
    branch += task.shared("judge", 400) + piece(rng, 800)

    async def respect(fork: Branch, name: str) -> str:
        fork += f"\n{name}:"
        return await task.write(fork, 20)

    names = ["Clarity", "Evidence", "Style", "Depth"]
    found = await asyncio.gather(*map(respect, branch.fork(4), names))
    branch += "".join(f"\n{name}:{text}" for name, text in zip(names, found, strict=True)) + "\nGrade:"
    await branch.select([" A", " B", " C", " D"])


async def retrieval(branch: Branch, rng: random.Random, task: Task) -> None:
    """An answer from three of six passages, which other questions use as well."""
    chosen = sorted(rng.sample(range(6), 3))
    branch += task.shared("passages", 200) + "".join(f"\n[{i}] " + piece(random.Random(i), 600) for i in chosen)
    branch += "\nQuestion: " + piece(rng, 100) + "\nAnswer:"
    await task.write(branch, 32)


KINDS = {
    "questions": questions, "thoughts": thoughts, "agent": agent, "turns": turns, "form": form, "judge": judge,
    "retrieval": retrieval,
}  # fmt: skip


SIDES = ["plain", "together", "answers", "peer", "peer_together", "peer_answers"]


class Plain:
    """A client that sends whole texts to /v1/completions, for all programs or for one.

    `scores`: it selects by log-probability. `in_turn`: a program sends one request after the other.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, *, scores: bool, in_turn: bool) -> None:
        self._client, self._model, self._scores, self._in_turn = client, model, scores, in_turn
        self._turns = asyncio.Semaphore(1 if in_turn else 1 << 20)

    def of_program(self) -> Plain:
        return Plain(self._client, self._model, scores=self._scores, in_turn=self._in_turn)

    async def render(self, messages: Messages) -> str:
        raise NotImplementedError("the programs here write plain text")

    async def generate(self, prompt: Prompt, config: GenerationConfig, on_text: Any) -> Answer:
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        fields = {names.get(name, name): value for name, value in fields_of(config).items()}
        answer = await self._complete(prompt.text, fields)
        return Answer((), None, answer["text"], 0, 0, 0)

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Score]:
        if self._scores:
            return list(await asyncio.gather(*(self._score(prompt.text, text) for text in texts)))
        fields = {"structured_outputs": {"choice": list(texts)}, "max_tokens": 8}
        chosen = (await self._complete(prompt.text, fields))["text"]
        return [Score((), (0.0 if text == chosen else -1.0,), 0) for text in texts]

    async def _score(self, before: str, text: str) -> Score:
        scored = (await self._complete(before + text, {"echo": True, "logprobs": 0, "max_tokens": 0}))["logprobs"]
        ends = [*scored["text_offset"][1:], len(before + text)]
        places = zip(ends, scored["token_logprobs"], strict=True)
        return Score((), tuple(logprob for end, logprob in places if end > len(before)), 0)

    async def _complete(self, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, "prompt": text, "temperature": 0.0, **fields}
        async with self._turns:
            response = await self._client.post("/v1/completions", json=body)
        if not response.is_success:
            raise ConfigError(f"{self._client.base_url}: {response.text[:500]}")
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice


class Watched:
    """A model whose prompts are noted, to know what a cache could have had."""

    def __init__(self, model: Model, known: set[int]) -> None:
        self._model, self.render = model, model.render
        self.known = known  # hashes of all beginnings that were computed
        self.possible = self.reused = 0

    def _note(self, ids: Sequence[int], num_cached: int, own: Sequence[int] = (), *, counts: bool = True) -> None:
        value, is_known = 0, counts
        for place, token in enumerate((*ids, *own)):
            value = hash((value, token))
            is_known = is_known and value in self.known and place < len(ids) - 1
            self.possible += is_known
            self.known.add(value)
        self.reused += num_cached * counts

    async def generate(self, prompt: Prompt, config: GenerationConfig, on_text: Any) -> Answer:
        answer = await self._model.generate(prompt, config, on_text)
        self._note(answer.prompt_ids, answer.num_cached, (answer.ids or ())[:-1])
        return answer

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Score]:
        scores = await self._model.score(prompt, texts)
        for place, score in enumerate(scores):  # they share one prompt
            self._note(score.ids, score.num_cached, counts=place == 0)
        return scores


async def timed(model: Model, kind: str, count: int, task: Task) -> float:
    """Seconds of `count` programs at the same time."""
    node = Trace().program()
    start = time.perf_counter()
    work = KINDS[kind]
    models = [model.of_program() if isinstance(model, Plain) else model for _ in range(count)]
    branches = (Branch(own, node.fork()) for own in models)
    await asyncio.gather(*(work(branch, random.Random(i), task) for i, branch in enumerate(branches)))
    return time.perf_counter() - start


@asynccontextmanager
async def plain_sides(url: str, names: Sequence[str]) -> AsyncIterator[dict[str, Plain]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        ways = {name: (not name.endswith("answers"), name in ("plain", "peer")) for name in names}
        yield {name: Plain(client, model, scores=scores, in_turn=turns) for name, (scores, turns) in ways.items()}


class Kept:
    """Rows of kinds that were measured with the same settings, one a line of a file; without a path nothing is kept."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings

    def rows(self) -> dict[str, dict[str, Any]]:
        """By kind."""
        if self._path is None or not self._path.exists():
            return {}
        lines = map(json.loads, self._path.read_text().splitlines())
        return {line["row"]["kind"]: line["row"] for line in lines if line["settings"] == self._settings}

    def add(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps({"settings": self._settings, "row": row}), file=file)


async def measure(
    url: str, peer: str | None, kinds: list[str], names: list[str], count: int, rounds: int, share: float, kept: Kept
) -> list[dict[str, Any]]:
    rows, known = kept.rows(), set[int]()
    theirs = [name for name in names if name.startswith("peer")] if peer else []
    ours = [name for name in names if not name.startswith("peer")]
    async with (
        opened(Server(url)) as server,
        plain_sides(url, ours) as plain,
        plain_sides(peer or url, theirs) as others,
    ):
        for kind in kinds:
            if kind in rows:
                continue
            watched = Watched(server, known)
            sides: dict[str, Any] = {"program": watched, **plain, **others}
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for round_number in range(rounds + 1):  # one program warms up
                for side, model in sides.items():
                    task = Task(f"{side} {time.time_ns() % 10**9} {round_number}", share)
                    await asyncio.sleep(1)  # threads of the side before may spin for a while
                    taken = await timed(model, kind, count if round_number else 1, task)
                    print(f"{kind}, round {round_number}, {side}: {taken:.1f} s", file=sys.stderr, flush=True)
                    seconds[side] += [taken] * bool(round_number)
            median = {side: statistics.median(values) for side, values in seconds.items()}
            row: dict[str, Any] = {"kind": kind} | {f"{side}_s": value for side, value in median.items()}
            row |= {f"x_{side}": value / median["program"] for side, value in median.items() if side != "program"}
            row["hits"] = watched.reused / max(watched.possible, 1)
            rows[kind] = row
            kept.add(row)
    found = [rows[kind] for kind in kinds]
    means = {name: statistics.geometric_mean(row[name] for row in found) for name in found[0] if name.startswith("x_")}
    return [*found, {name: means.get(name, "") for name in found[0]} | {"kind": "geometric mean"}]


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lmkit", "serve", model, "--port", "0", "--speculate", "ngram", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next((re.search(r"on (http\S+)", line) for line in process.stdout if " on http" in line), None)
            if found is None:
                raise ConfigError("lmkit serve did not start; its log says why")
            yield found[1]
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(DEMO_FOLDER))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--programs", type=int, default=8, help="of a kind, at the same time")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=SIDES, help="beside the programs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each answer's length that is written")
    parser.add_argument("--resume", type=Path, help="keep finished kinds here, and take them from here")
    parser.add_argument("--peer", help="URL of another OpenAI server with the same model")
    parser.add_argument("--options", type=str.split, default=[], help="further options of lmkit serve")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    size = given.programs, given.rounds, given.share
    kept = Kept(given.resume, {"model": given.model, "sides": given.sides, "size": [*size], "peer": bool(given.peer)})
    with serving(given.model, *given.options) as url:
        rows = asyncio.run(measure(url, given.peer, given.kinds, given.sides, *size, kept))
    report.show(rows)
    if given.json:
        report.save(given.json, "programs", rows, model=given.model)


if __name__ == "__main__":
    main()
