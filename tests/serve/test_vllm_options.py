"""Options of `lmkit serve` that vLLM's server has, and what they change in answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lmkit.config import ServerConfig, parse
from lmkit.errors import ConfigError
from lmkit.turbo.request import EngineStats
from lmkit.turbo.step_sizes import BOUNDS
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, App, ScriptedEngine
from tests.serve.live import Server
from tests.serve.test_edge import events

KEY = "k" * 20
HELLO: Any = [{"role": "user", "content": "Hello"}]
TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--root-path", "/llm", "--enable-force-include-usage", "--enable-per-request-metrics")
    with Server(*options, "--api-key", KEY) as running:
        yield running


def client(server: Server, root: str = "", key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}{root}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.mark.parametrize("root", ["", "/llm"])
def test_the_root_path_may_stand_in_front(server: Server, root: str) -> None:
    with client(server, root) as ours, client(server, root, "wrong") as other:
        answer = ours.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, seed=0)
        assert answer.choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            other.chat.completions.create(model="demo", messages=HELLO, max_tokens=3)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm", 200), ("/llm/", 200), ("/llm/health", 200), ("/llm/models", 200),
        ("/llm/llm/v1/models", 404), ("/llmv1/models", 404), ("/%6clm/v1/models", 404), ("//llm/v1/models", 404),
    ],
)  # fmt: skip
def test_the_root_path_is_taken_off_once_and_before_keys_are_checked(server: Server, path: str, status: int) -> None:
    with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {KEY}"}) as ours:
        assert ours.get(server.url + path).status_code == status
    with httpx.Client(trust_env=False) as stranger:
        found = stranger.get(server.url + path, headers={"host": "a/health"}).status_code
        assert found == (200 if path == "/llm/health" else 401)


def test_openapi_names_the_root_path(server: Server) -> None:
    described = httpx.get(f"{server.url}/llm/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    assert described["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "/a//b", "/é"])
def test_a_root_path_begins_with_a_slash_and_has_plain_parts(path: str) -> None:
    with pytest.raises(ConfigError):
        parse({"root_path": path}, ServerConfig, "--root-path")


def test_every_chunk_has_the_usage_and_the_last_one_the_times(server: Server) -> None:
    with client(server) as ours:
        chat: Any = ours.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, stream=True)
        *chunks, last = list(chat)
        text: Any = ours.completions.create(model="demo", prompt="Hello", max_tokens=3, stream=True)
        *text_chunks, text_last = list(text)
    assert last.choices == [] == text_last.choices
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.choices[0].finish_reason] == [3]
    for end in (last, text_last):
        assert end.usage.completion_tokens == 3
        assert end.model_extra["metrics"].keys() == TIMES | {"mean_itl_ms"}
    for chunk in (*chunks, *text_chunks):
        assert chunk.usage is not None
        assert "metrics" not in chunk.model_extra


def test_an_answer_has_its_times(server: Server) -> None:
    with client(server) as ours:
        many = ours.chat.completions.create(model="demo", messages=HELLO, max_tokens=3)
        one = ours.completions.create(model="demo", prompt="Hello", max_tokens=1)
        two: Any = ours.completions.create(model="demo", prompt="Hello", max_tokens=1, n=2)
    found, single = (answer.model_extra["metrics"] for answer in (many, one))  # type: ignore[index]
    assert found.keys() == TIMES | {"mean_itl_ms"}
    assert single.keys() == TIMES
    assert min(*found.values(), *single.values()) >= 0
    assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 2)
    whole = found["time_to_first_token_ms"] + found["generation_time_ms"]
    assert found["tokens_per_second"] == pytest.approx(3e3 / whole)
    assert "metrics" not in two.model_extra


def test_with_the_usage_so_far_the_last_text_has_the_finish_reason() -> None:
    """Every chunk of a choice counts more than the one before it."""
    app = App(ScriptedEngine(lambda request: [70, 71, 72]))
    options = {"include_usage": True, "continuous_usage_stats": True}
    role, *texts, end = events(app.post(CHAT_PATH, CHAT | {"stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in texts]
    assert counts == sorted(set(counts))
    assert counts[-1] == 3
    assert texts[-1]["choices"][0]["delta"]["content"]
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert (role["usage"]["completion_tokens"], end["choices"]) == (0, [])
    plain = events(app.post(CHAT_PATH, CHAT | {"stream": True}).text)
    assert plain[-1]["choices"][0]["delta"] == {}  # as OpenAI has it


@pytest.mark.parametrize("asked", [True, False, None])
def test_token_ids_that_nobody_asked_for_are_null(asked: bool | None) -> None:
    app = App(ScriptedEngine())
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        answer = app.post(path, body | {"return_token_ids": asked}).json()
        about = answer if path == CHAT_PATH else answer["choices"][0]
        assert answer["choices"][0]["token_ids"] == ([70, 71] if asked else None)
        assert bool(about["prompt_token_ids"]) is bool(asked)


def metrics_after(app: App, *bodies: dict[str, Any]) -> dict[str, float]:
    for body in bodies:
        app.post(TEXT_PATH, body)
    lines = app.request("GET", "/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_metrics_count_what_is_asked_for_and_what_is_refused() -> None:
    label = '{model_name="model"}'
    bodies = (TEXT | {"max_tokens": 5, "n": 3}, TEXT | {"max_tokens": 7}, TEXT | {"prompt": [[1]] * 256, "n": 4})
    found = metrics_after(App(ScriptedEngine()), *bodies, *bodies[:1])
    for prefix in ("lmkit", "vllm"):
        assert found[f"{prefix}:request_params_n_count{label}"] == 3 + 256
        assert found[f"{prefix}:request_params_max_tokens_sum{label}"] == 5 + 7 + 5 + 256 * 16
        assert (
            found[f"{prefix}:inter_token_latency_seconds_count{label}"]
            == found[f"{prefix}:request_generation_tokens_sum{label}"]
            - found[f"{prefix}:request_generation_tokens_count{label}"]
        )
    app = App(ScriptedEngine())
    app.serving.admission._queue, app.serving.admission._max_batch_size = 0, lambda: 0
    found = metrics_after(app, TEXT)
    assert found['vllm:admission_rejections_total{model_name="model",reason="queue_full"}'] == 1
    assert f"vllm:request_params_n_sum{label}" in found
    assert found[f"vllm:request_params_n_sum{label}"] == 0


def test_the_tokens_of_steps_are_a_histogram() -> None:
    engine = ScriptedEngine()
    engine.figures = EngineStats(step_sizes=[3, 0, 2] + [0] * (len(BOUNDS) - 3) + [1], step_tokens=40_000)
    found = metrics_after(App(engine))
    name = "vllm:iteration_tokens_total"
    assert found[f'{name}_bucket{{le="1.0",model_name="model"}}'] == 3
    assert found[f'{name}_bucket{{le="4.0",model_name="model"}}'] == 5
    assert found[f'{name}_bucket{{le="+Inf",model_name="model"}}'] == 6
    assert found[f'{name}_count{{model_name="model"}}'] == 6
    assert found[f'{name}_sum{{model_name="model"}}'] == 40_000


@pytest.mark.parametrize(
    ("most", "asked", "found"),
    [(20, 20, 20), (20, 21, None), (20, -1, None), (30, 30, 30), (-1, -1, 4096), (4096, -1, 4096), (-1, 5000, 4096)],
)
def test_max_logprobs_is_the_most_that_a_request_may_ask_for(most: int, asked: int, found: int | None) -> None:
    engine = ScriptedEngine()
    app = App(engine, ServerConfig(max_logprobs=most))
    bodies = [
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": asked}, "top_logprobs"),
        (TEXT_PATH, TEXT | {"logprobs": asked}, "logprobs"),
        (CHAT_PATH, CHAT | {"prompt_logprobs": asked}, "prompt_logprobs"),
        (TEXT_PATH, TEXT | {"prompt_logprobs": asked}, "prompt_logprobs"),
    ]
    for path, body, param in bodies:
        answer = app.post(path, body | {"max_tokens": 2})
        if found is None:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            continue
        assert answer.status_code == 200, answer.text
        params = engine.requests[-1].params
        assert (params.prompt_top if param == "prompt_logprobs" else params.logprobs) == found
        assert params.logprobs is None or param != "prompt_logprobs"
    schema = app.request("GET", "/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    (number, *_) = schema["logprobs"]["anyOf"]
    assert (number["minimum"] <= asked <= number["maximum"]) is (found is not None)


def test_more_log_probabilities_than_an_answer_may_hold_are_refused() -> None:
    app = App(ScriptedEngine(), ServerConfig(max_logprobs=-1, answer_memory=1 << 20))
    refused = app.post(TEXT_PATH, TEXT | {"logprobs": -1, "max_tokens": 1000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    refused = app.post(TEXT_PATH, TEXT | {"prompt": "Hi " * 50, "prompt_logprobs": -1, "max_tokens": 1})
    assert refused.status_code == 400
    assert app.post(TEXT_PATH, TEXT | {"prompt_logprobs": 20, "max_tokens": 100}).status_code == 200


def test_a_prompt_shows_the_whole_vocabulary_and_the_answer_nothing() -> None:
    whole: Any = {"prompt_logprobs": -1}
    with (
        Server("--max-logprobs", "-1", engine="lmkit.turbo.engine.engine:Engine") as running,
        client(running) as ours,
    ):
        scored: Any = ours.chat.completions.create(model="demo", messages=HELLO, max_tokens=4, extra_body=whole)
        shown: Any = ours.completions.create(model="demo", prompt="Hello", max_tokens=1, logprobs=-1, temperature=0)
    first, *later = scored.prompt_logprobs
    assert first is None
    assert {len(entry) for entry in later} == {4096}
    assert scored.choices[0].logprobs is None
    probabilities = [math.exp(entry["logprob"]) for entry in later[0].values()]
    assert math.fsum(probabilities) == pytest.approx(1, abs=1e-3)
    (top,) = shown.choices[0].logprobs.top_logprobs
    assert len(top) > 4000  # of tokens with one text the likelier stands
    assert max(top, key=top.__getitem__) == shown.choices[0].logprobs.tokens[0]
