"""The real engine after the real server and proxy, talked to with the official client."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from lmkit.conform.case import Server
from lmkit.conform.suites import SUITES, outcomes

QUESTION = [{"role": "user", "content": "Write a Python function `is_empty`: Return True if the queue is empty."}]


@contextlib.contextmanager
def running(*command: str) -> Iterator[str]:
    """The address that an lmkit process prints when it is ready; the process must end cleanly on SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lmkit", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if " on http://" in line:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield line.split(" on ")[1].strip()
                break
        else:
            raise AssertionError("".join(lines))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """(server, proxy in front of it)."""
    with (
        running("serve", "demo", "--port", "0", "--max-model-len", "512") as server,
        running("proxy", "--port", "0", "--node", server) as proxy,
    ):
        yield server, proxy


@pytest.fixture(params=["server", "proxy"])
def client(addresses: tuple[str, str], request: pytest.FixtureRequest) -> openai.OpenAI:
    return openai.OpenAI(base_url=addresses[request.param == "proxy"] + "/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=QUESTION, **({"max_tokens": 24} | options))  # type: ignore[call-overload]


@pytest.mark.slow
def test_chat_and_streaming_agree(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0)
    parts = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert parts[-1].usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == whole.usage.model_dump(
        include={"prompt_tokens", "completion_tokens"}
    )
    assert whole.choices[0].message.content.startswith("def ")
    assert [m.id for m in client.models.list()] == ["demo"]


@pytest.mark.slow
def test_what_clients_depend_on(addresses: tuple[str, str]) -> None:
    """At the proxy, and so at the server."""
    with httpx.Client(base_url=addresses[1], timeout=120) as http:
        found = list(outcomes(Server(http, "demo"), SUITES))
    assert len(found) > 70
    assert [(case.suite, case.name, reason) for case, reason in found if reason] == []


@pytest.mark.slow
def test_seed_n_logprobs_and_stop(client: openai.OpenAI) -> None:
    warm = {"temperature": 1.0, "seed": 11, "n": 3, "logprobs": True, "top_logprobs": 2}
    first, second = chat(client, **warm), chat(client, **warm)
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len({c.message.content for c in first.choices}) > 1
    entries = first.choices[0].logprobs.content
    assert "".join(e.token for e in entries if "<|" not in e.token) == first.choices[0].message.content
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob >= e.logprob - 1e-6 for e in entries)
    text = chat(client, temperature=0).choices[0].message.content
    cut = chat(client, temperature=0, stop=[text[6:9]])
    assert cut.choices[0].message.content == text[: text.index(text[6:9])]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_answers_fit_their_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    options = {"response_format": form, "max_tokens": 200, "temperature": 1.0, "seed": 3}
    whole = chat(client, n=3, **options)
    for choice in whole.choices:
        thing = json.loads(choice.message.content)
        assert thing.keys() == {"name", "size"}
        assert (choice.finish_reason, thing["size"] in (1, 2)) == ("stop", True)
    parts = list(chat(client, stream=True, **options))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    strict = {"schema": {"type": "array", "uniqueItems": True}, "strict": True, "name": "s"}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        chat(client, response_format={"type": "json_schema", "json_schema": strict})


@pytest.mark.slow
def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model="demo", prompt=["import os\n", "class A:\n"], max_tokens=8, temperature=0)
    alone = client.completions.create(model="demo", prompt="class A:\n", max_tokens=8, temperature=0)
    assert done.choices[1].text == alone.choices[0].text
    stream = client.completions.create(model="demo", prompt="class A:\n", max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in stream) == alone.choices[0].text


@pytest.mark.slow
def test_refusals_have_the_right_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    for options in ({"max_tokens": 0}, {"temperature": "hot"}, {"n": 100000}, {"max_tokens": 24, "max_token": 1}):
        with pytest.raises(openai.BadRequestError):
            chat(client, extra_body=options)
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="demo", prompt="x " * 3000)
    assert chat(client, temperature=0).choices[0].finish_reason in ("stop", "length")


@pytest.mark.slow
def test_a_prompt_is_found_again(client: openai.OpenAI) -> None:
    salted = {"temperature": 0, "extra_body": {"cache_salt": f"again {client.base_url}"}}
    first, second = chat(client, **salted), chat(client, **salted)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


@pytest.mark.slow
def test_a_session_computes_only_its_new_tokens(client: openai.OpenAI, addresses: tuple[str, str]) -> None:
    """The model is made to spell its answer in single letters, which the tokenizer would join."""
    (letter,) = httpx.post(addresses[0] + "/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    name = str(client.base_url)
    options = {"temperature": 0, "max_tokens": 12, "extra_body": {"session_id": name, "cache_salt": name}}
    first = chat(client, **options, logit_bias={str(letter): 100})
    messages = [*QUESTION, {"role": "assistant", "content": "a" * 12}, {"role": "user", "content": "And?"}]
    assert first.choices[0].message.content == "a" * 12
    second = client.chat.completions.create(model="demo", messages=messages, **options)  # type: ignore[call-overload]
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


@pytest.mark.slow
def test_a_deadline_is_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as error:
        chat(client, max_tokens=400, extra_body={"timeout": 0.01, "ignore_eos": True})
    assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")


@pytest.mark.slow
def test_blocks_come_back(addresses: tuple[str, str]) -> None:
    """A client that leaves a stream, through the proxy, leaves nothing behind."""
    server, proxy = addresses

    def in_use() -> tuple[float, float]:
        lines = httpx.get(server + "/metrics").text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line and line[0] != "#"}
        return values["lmkit:num_requests_running"], values["lmkit:kv_cache_usage_perc"]

    before = in_use()  # sessions have leases
    body = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", proxy + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    for _ in range(100):
        if (now := in_use()) <= before:
            return
        threading.Event().wait(0.1)
    raise AssertionError((before, now))


@pytest.mark.slow
def test_scores_as_lm_eval_asks_for_them(addresses: tuple[str, str], demo_model: Path) -> None:
    """Its `local-completions` model: token ids, the last token's entry is of the one generated, and a continuation is
    greedy if every token's log-probability equals the greatest one given."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    lines = (Path(__file__).parents[1] / "benchmarks" / "lm_eval" / "code.jsonl").read_text().splitlines()
    docs = [json.loads(line) for line in lines]
    pairs = [(tokenizer.encode(doc["context"]), tokenizer.encode(choice)) for doc in docs for choice in doc["choices"]]
    body = {
        "model": "demo", "prompt": [context + target for context, target in pairs], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    answer = httpx.post(addresses[0] + "/v1/completions", json=body, timeout=60).raise_for_status().json()
    greedy_flags = set()
    for (context, target), choice in zip(pairs, answer["choices"], strict=True):
        continuation = slice(len(context), -1)
        logprobs = choice["logprobs"]["token_logprobs"][continuation]
        tops = choice["logprobs"]["top_logprobs"][continuation]
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        with torch.no_grad():
            scores = reference(torch.tensor([context + target])).logits[0].log_softmax(-1)
        scores = scores[len(context) - 1 : -1]
        want = scores.gather(1, torch.tensor(target)[:, None]).sum().item()
        assert sum(logprobs) == pytest.approx(want, abs=0.05)
        assert greedy == (scores.argmax(-1).tolist() == target)
        greedy_flags.add(greedy)
    assert greedy_flags == {True, False}


@pytest.mark.slow
def test_generates_as_lm_eval_asks_for_it(client: openai.OpenAI) -> None:
    prompt = "import os\nimport sys\n\ndef main():\n    path = os.path."
    options: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0, "seed": 1234}
    answer = client.completions.create(prompt=prompt, stop=["(", "\n"], **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("join", "stop")
