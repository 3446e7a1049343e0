"""The KV cache of a real server, its tenants, sessions and tiers, asked with the official client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lmkit.turbo.transport.messages import ENGINE
from tests.serve.live import Server

pytestmark = pytest.mark.slow
KEYS = ("one", "two")
PROMPT = "class Queue:\n    def __init__(self):\n        self.items = []\n\n" * 8
OPTIONS = {"model": "demo", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


def serving(kv: Path, *options: str) -> Server:
    words = ["--kv-disk-path", str(kv), "--kv-disk-memory", "1G", "--kv-host-memory", "64M", "--session-lease", "10"]
    return Server(*words, "--max-model-len", "1024", "--num-threads", "1", *options, model="demo", engine=ENGINE)


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def complete(client: openai.OpenAI, prompt: str = PROMPT, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **(OPTIONS | options))


def cached(answer: Any) -> tuple[int, int]:
    """(prompt tokens, how many of them were cached)."""
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("kv"), "--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        yield server
        assert server.terminate() == 0


def figures(server: Server) -> dict[str, float]:
    """Every series, named with its labels but the model's name."""
    text = server.get("/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {
        re.sub(r'model_name="demo",?|,model_name="demo"', "", name).replace("{}", ""): float(v) for name, v in lines
    }


def test_keys_never_share(server: Server) -> None:
    one, two = (client_of(server, key) for key in KEYS)
    first = complete(one)
    total = first.usage.prompt_tokens
    assert total > 100
    assert cached(first) == (total, 0)
    assert cached(complete(two)) == (total, 0)
    for client in (one, two):
        again = complete(client)
        assert (again.choices[0].text, cached(again)) == (first.choices[0].text, (total, total - 1))
        assert cached(complete(client, extra_body={"cache_salt": "x"})) == (total, 0)


def test_siblings_share_their_prompt(server: Server) -> None:
    client, before = client_of(server, KEYS[0]), figures(server)
    prompt = "# four answers\n" + PROMPT
    answer = complete(client, prompt, n=4, temperature=1.0, seed=3)
    total = answer.usage.prompt_tokens
    assert cached(answer) == (total, 0)
    assert len({choice.text for choice in answer.choices}) > 1
    now = figures(server)  # as new as the answer
    name = "lmkit:prefix_cache_{}_total"
    assert now[name.format("queries")] - before[name.format("queries")] == 4 * total
    assert now[name.format("hits")] - before[name.format("hits")] == 3 * (total - 1)


def test_best_of(server: Server) -> None:
    client = client_of(server, KEYS[0])
    options = {"temperature": 1.0, "seed": 5, "logprobs": 0}
    every = complete(client, n=4, **options)
    best = complete(client, best_of=4, n=2, **options)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    want = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in want]
    assert best.usage.completion_tokens == 4 * 12


def test_turns_of_a_session(server: Server) -> None:
    client = client_of(server, KEYS[1])
    messages: list[Any] = []
    known = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Write function number {turn} of a queue. " * 5})
        answer = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=20, temperature=0.7, seed=turn, extra_body={"session_id": "s"}
        )
        total, found = cached(answer)
        assert found >= known
        assert total - found > 10
        known = answer.usage.total_tokens - 1
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert figures(server)["lmkit:sessions"] == 1
    server.until(lambda: figures(server)["lmkit:sessions"] == 0, seconds=20)  # the lease has ended


def test_deadlines_and_priorities(server: Server) -> None:
    client = client_of(server, KEYS[0])
    with pytest.raises(openai.InternalServerError) as error:
        complete(client, max_tokens=500, extra_body={"timeout": 0.02, "ignore_eos": True})
    assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")
    text = complete(client).choices[0].text
    assert complete(client, extra_body={"priority": 5, "ignore_eos": True}).choices[0].text == text
    with pytest.raises(openai.PermissionDeniedError, match="priority=-5"):
        complete(client, extra_body={"priority": -5})
    with pytest.raises(openai.BadRequestError, match="priority"):
        complete(client, extra_body={"priority": 10**6})


def test_metrics_tell_of_it(server: Server) -> None:
    client = client_of(server, KEYS[0])
    for _ in range(2):
        complete(client, "# metrics\n" + 3 * PROMPT)  # more than ten blocks
    name = 'lmkit:kv_tiers{{figure="{}"}}'

    def is_settled() -> bool:
        got = figures(server)
        return got[name.format("saved")] > 10 and got[name.format("queued_saves")] == 0

    server.until(is_settled)
    got = figures(server)
    assert got["lmkit:prefix_cache_hits_total"] == got["vllm:prefix_cache_hits_total"] > 100
    assert got["lmkit:cached_blocks"] > 10
    assert got[name.format("disk_blocks")] == got[name.format("host_blocks")] == got[name.format("saved")]
    assert got[name.format("failures")] == got[name.format("damaged")] == 0
    assert sum(v for series, v in got.items() if 'decisions_total{decision="admitted"' in series) > 1
    assert {"lmkit:evicted_blocks_total", "lmkit:sessions"} <= got.keys()


def test_a_second_engine_on_the_folder_is_refused(server: Server) -> None:
    options = server.process.args
    assert isinstance(options, list)
    with serving(Path(str(options[options.index("--kv-disk-path") + 1]))) as second:
        assert second.process.wait(30) == 2
        lines = [line for line in second.log.splitlines() if line.startswith("lmkit: ")]
        assert len(lines) == 1
        assert "another engine" in lines[0]
        assert "Traceback" not in second.log


def test_a_restarted_server_answers_from_disk(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        first = complete(client_of(server))
        assert cached(first)[1] == 0
        assert server.terminate() == 0
    with serving(tmp_path) as server:
        again = complete(client_of(server))
        assert again.choices[0].text == first.choices[0].text
        total, found = cached(again)
        assert found == (total - 1) // 32 * 32  # whole blocks
        server.until(lambda: figures(server).get('lmkit:kv_tier_hits_total{tier="disk"}') == found)
        assert server.terminate() == 0
