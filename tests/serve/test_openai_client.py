"""The official client against a real server process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers

import lmkit
from lmkit.text import Tokenizer
from tests.serve.fake_engine import DEMO, PHRASE
from tests.serve.live import Server

TOKENIZER = Tokenizer.from_pretrained(DEMO)
IDS = TOKENIZER.encode(PHRASE)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def text(count: int, seed: int = 0) -> str:
    """What the fake engine answers: `count` tokens of the endless phrase, from token `seed` on.

    A character that the last token leaves open is not shown.
    """
    return TOKENIZER.decode([IDS[(seed + i) % len(IDS)] for i in range(count)]).rstrip("\N{REPLACEMENT CHARACTER}")


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": "demo", "messages": HELLO, "seed": 0, "max_tokens": 9}
    return client.chat.completions.create(**defaults | options)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": "demo", "prompt": "Hi", "seed": 0, "max_tokens": 9}
    return client.completions.create(**defaults | options)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    assert answer.system_fingerprint == chat(client).system_fingerprint
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text(9))
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    prompt_tokens = len(TOKENIZER.encode_chat(HELLO))
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": prompt_tokens + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, max_tokens=40, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text(40)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])
    plain = list(chat(client, stream=True))
    assert plain[-1].choices[0].finish_reason == "length"


def test_several_choices_draw_with_their_own_seeds(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, seed=5)
    assert [choice.message.content for choice in answer.choices] == [text(9, 5), text(9, 6), text(9, 7)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 27
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_chat(HELLO))
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [choice.message.content for choice in answer.choices]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    answers = {chat(client, seed=None).choices[0].message.content for _ in range(8)}
    assert len(answers) > 1


def test_stop_strings(client: openai.OpenAI, server: Server) -> None:
    before = server.metric('lmkit:requests_total{finish_reason="stop"')
    answer = chat(client, stop=["brown", "zzz"], max_tokens=None)
    assert answer.choices[0].message.content == "The quick "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "brown"
    kept = chat(client, stop="brown", max_tokens=None, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "The quick brown"
    streamed = chat(client, stop="brown", max_tokens=None, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "The quick "
    assert server.metric('lmkit:requests_total{finish_reason="stop"') == before + 3
    server.until(lambda: server.metric("lmkit:num_requests_running") == 0)  # the endless ones were aborted


def test_eos_and_stop_tokens(client: openai.OpenAI) -> None:
    ends: list[Any] = [{"role": "user", "content": "EOS"}]
    answer = chat(client, messages=ends, max_tokens=50)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text(5), "stop")
    assert answer.usage.completion_tokens == 6
    assert chat(client, messages=ends, max_tokens=50, extra_body={"ignore_eos": True}).usage.completion_tokens == 50
    longer = chat(client, messages=ends, max_tokens=50, extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens == 21
    stopped = chat(client, extra_body={"stop_token_ids": [IDS[3]]})
    assert stopped.choices[0].message.content == text(3)
    assert stopped.choices[0].stop_reason == IDS[3]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    content = chat(client, logprobs=True, top_logprobs=3, max_tokens=len(IDS)).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == PHRASE
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == -0.25 for entry in content)
    assert content[0].token == "The"
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    streamed = [c.choices[0].logprobs for c in chat(client, logprobs=True, stream=True) if c.choices[0].logprobs]
    assert sum(len(logprobs.content) for logprobs in streamed) == 9


def test_split_characters_stream_whole(client: openai.OpenAI) -> None:
    parts = [c.choices[0].delta.content or "" for c in chat(client, stream=True, max_tokens=len(IDS))]
    assert "".join(parts) == PHRASE
    assert not any("\ufffd" in part for part in parts)


def test_logit_bias(client: openai.OpenAI) -> None:
    token = TOKENIZER.encode("x")[0]
    assert chat(client, logit_bias={str(token): 100}, max_tokens=3).choices[0].message.content == "xxx"


def test_completion(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.choices[0].text) == ("text_completion", text(9))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(TOKENIZER.encode("Hi")), 9)
    assert len(TOKENIZER.encode(complete(client, max_tokens=None).choices[0].text)) <= 16
    assert complete(client, max_tokens=None).usage.completion_tokens == 16
    streamed = complete(client, stream=True, max_tokens=30)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text(30)


@pytest.mark.parametrize("prompt", [["Hi", "Hello there"], [[5, 6], [7]]])
def test_several_prompts(client: openai.OpenAI, prompt: Any) -> None:
    answer = complete(client, prompt=prompt, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [text(4), text(4, 1)] * 2
    assert answer.usage.prompt_tokens == sum(len(p if isinstance(p, list) else TOKENIZER.encode(p)) for p in prompt)
    assert answer.usage.completion_tokens == 16


def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=TOKENIZER.encode("Some text"), echo=True, max_tokens=2)
    assert answer.choices[0].text == "Some text" + text(2)
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("Some text"))


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    prompt = "Score this 日本"
    ids = TOKENIZER.encode(prompt)
    choice = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=1).choices[0]
    assert choice.text == prompt + text(1)
    assert choice.logprobs.token_logprobs == [None, *(-0.5 * i for i in range(1, len(ids))), -0.25]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(ids) + 1
    assert choice.logprobs.text_offset[-1] == len(prompt)
    assert choice.logprobs.top_logprobs[0] is None
    for position, top in enumerate(choice.logprobs.top_logprobs[1:-1], 1):
        assert top[choice.logprobs.tokens[position]] == -0.5 * position
        assert max(top.values()) == -0.125
    assert choice.logprobs.top_logprobs[-1]["The"] == -0.25
    assert any(token.startswith("bytes:\\x") for token in choice.logprobs.tokens)
    streamed = list(complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_no_new_tokens_score_the_prompt_alone(client: openai.OpenAI) -> None:
    prompt = "Score this"
    answer = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    choice, num_tokens = answer.choices[0], len(TOKENIZER.encode(prompt))
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert [len(field) for field in (choice.logprobs.tokens, choice.logprobs.top_logprobs)] == [num_tokens] * 2
    assert answer.usage.completion_tokens == 0
    assert complete(client, prompt=prompt, max_tokens=0).choices[0].text == ""


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_refusals_have_the_client_s_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt="word " * 5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as hot:
        chat(client, temperature=-1)
    assert (hot.value.code, hot.value.param) == ("invalid_request", "temperature")
    with pytest.raises(openai.BadRequestError) as tools:
        chat(client, tool_choice="required")
    assert (tools.value.code, tools.value.param) == ("invalid_request", "tool_choice")
    with pytest.raises(openai.InternalServerError) as busy:
        chat(client, messages=[{"role": "user", "content": "REFUSE"}], stream=True)
    assert (busy.value.status_code, busy.value.code) == (503, "queue_full")
    assert busy.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mood", ["CRASH", "BROKEN"])
def test_a_failure_inside_the_engine_is_an_error_without_details(
    client: openai.OpenAI, server: Server, stream: bool, mood: str
) -> None:
    failures = server.metric("lmkit:engine_failures_total")
    with pytest.raises(openai.InternalServerError) as error:
        chat(client, messages=[{"role": "user", "content": mood}], stream=stream)
    assert error.value.code == "engine_error"
    assert "secret" not in str(error.value)
    assert chat(client).choices[0].message.content == text(9)
    server.until(lambda: server.metric("lmkit:engine_failures_total") == failures + 1)


def test_an_error_in_the_middle_of_a_stream(client: openai.OpenAI) -> None:
    slow: list[Any] = [{"role": "user", "content": "SLOW"}]
    chunks = chat(client, messages=slow, stream=True, max_tokens=None)
    assert next(chunks).choices[0].delta.role == "assistant"
    with pytest.raises(openai.InternalServerError):
        chat(client, messages=[{"role": "user", "content": "CRASH"}])
    with pytest.raises(openai.APIError, match="engine failed"):
        list(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_a_timeout_ends_in_time(client: openai.OpenAI, server: Server, stream: bool) -> None:
    slow: list[Any] = [{"role": "user", "content": "SLOW"}]
    timeouts = 'lmkit:requests_total{finish_reason="timeout"'
    before = server.metric(timeouts)
    fields = {"timeout": 0.2, "priority": -1, "cache_salt": "x", "session_id": "me"}
    with pytest.raises(openai.APIError) as error:
        list(chat(client, messages=slow, max_tokens=None, stream=stream, extra_body=fields))
    assert error.value.code == "deadline_exceeded"
    assert "0.2 s" in error.value.message
    assert stream or error.value.status_code == 504  # type: ignore[attr-defined]
    server.until(lambda: server.metric(timeouts) == before + 1)


def test_many_at_once(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="demo", prompt="Hi", seed=i, max_tokens=5, temperature=0)
                    for i in range(100)
                )
            )
            assert [answer.choices[0].text for answer in answers] == [text(5, i) for i in range(100)]

    asyncio.run(main())


def test_the_tokenizer_tells_what_transformers_would(server: Server, demo_model: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(demo_model)
    info = server.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    for name in ("bos_token", "eos_token", "pad_token", "chat_template"):
        assert info.get(name) == getattr(theirs, name), name
    assert (info["vocab_size"], info["model_max_length"]) == (len(theirs), 4096)
    assert theirs.eos_token_id in info["eos_token_ids"]


def test_tokenize_and_detokenize(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "Hi 日本", "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENIZER.encode("Hi 日本")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
    assert answer["token_strs"] == TOKENIZER.backend.encode("Hi 日本", add_special_tokens=True).tokens
    messages = server.post("/tokenize", {"model": "demo", "messages": HELLO}).json()
    assert messages["tokens"] == TOKENIZER.encode_chat(HELLO)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {
        "prompt": "Hi 日本",
        "content": "Hi 日本",
    }
    assert server.post("/detokenize", {"tokens": [4096]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_tokenize_as_llama_cpp_has_it(server: Server) -> None:
    text = "Hi 媽 🤗"
    assert server.post("/tokenize", {"content": text}).json()["tokens"] == TOKENIZER.encode(text, False)
    assert server.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"] == TOKENIZER.encode(text)
    tokens = server.post("/tokenize", {"content": text, "with_pieces": True, "parse_special": True}).json()["tokens"]
    assert [token["id"] for token in tokens] == TOKENIZER.encode(text, False)
    pieces = [token["piece"] for token in tokens]
    assert any(isinstance(piece, list) for piece in pieces)  # a part of a character
    assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces) == text.encode()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"content": "a", "prompt": "a"}, "prompt"),
        ({"content": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": "a", "add_special": True}, "add_special"),
        ({"content": "a", "parse_special": False}, "parse_special"),
    ]
    for body, param in wrong:
        answer = server.post("/tokenize", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


def test_errors_name_the_wrong_token_ids(server: Server) -> None:
    def message(**fields: Any) -> str:
        answer = server.post("/v1/completions", {"model": "demo", "prompt": "Hi", **fields})
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    assert "token id 999999 is not in [0, 4096)" in message(prompt=[5, 999999])
    both = message(logit_bias={"bad1": 50.0, "7": 1, "bad2": 20.0})
    assert "'bad1', 'bad2'" in both
    assert "'7'" not in both
    assert "'9'" in message(logit_bias={"9": "a lot"})
    assert len(message(logit_bias={"x" * 9000: 1})) < 300


def test_the_version_and_the_load(server: Server) -> None:
    def load() -> int:
        return int(server.get("/load").json()["server_load"])

    assert server.get("/version").json() == {"version": lmkit.__version__}
    server.until(lambda: load() == 0, 30)
    body = {"model": "demo", "prompt": "SLOW", "max_tokens": 4000, "stream": True, "n": 2}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        server.until(lambda: load() == 2, 30)
    server.until(lambda: load() == 0, 30)


def test_metrics(server: Server, client: openai.OpenAI) -> None:
    before = server.metric("lmkit:generation_tokens_total"), server.metric("lmkit:time_to_first_token_seconds_count")
    chat(client, n=2)
    assert server.metric("lmkit:generation_tokens_total") == before[0] + 18
    assert server.metric("lmkit:time_to_first_token_seconds_count") == before[1] + 2
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{name}") == server.metric(f"lmkit:{name}")
    with pytest.raises(openai.NotFoundError):
        chat(client, model="x" * 100)
    assert "xxxx" not in server.get("/metrics").text  # no label is the client's to choose
