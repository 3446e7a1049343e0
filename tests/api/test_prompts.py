"""Every shape of prompt, and mistakes in a call: each is one error that says what was given and what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lmkit
from lmkit import (
    AsyncPipeline,
    EngineConfig,
    GenerationConfig,
    LMKitError,
    Pipeline,
    RequestError,
    Response,
    Session,
    pipeline,
)
from lmkit.errors import ConfigError
from lmkit.text.messages import plain_messages

SHORT = GenerationConfig(max_new_tokens=4)
HI = {"role": "user", "content": "hi"}


def test_lone_messages_iterables_and_parts(pipe: Pipeline) -> None:
    want = pipe("hi", SHORT).text
    assert pipe(HI, SHORT).text == want
    assert pipe((HI,), SHORT).text == want
    assert pipe(iter([HI]), SHORT).text == want
    assert pipe([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], SHORT).text == want
    assert [r.text for r in pipe((text for text in ["hi", "hi"]), SHORT)] == [want, want]
    assert [r.text for r in pipe(["hi", HI, [HI], (HI,)], SHORT)] == [want] * 4
    assert pipe(iter([]), SHORT) == []


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p: p(None), RequestError, "prompts: expected text.*got None"),
        (lambda p: p(3), RequestError, "got int 3"),
        (lambda p: p(b"hi"), RequestError, "got bytes"),
        (lambda p: p(["hi", None]), RequestError, r"prompts\[1\]: expected text.*got None"),
        (lambda p: p([1, 2, 3]), RequestError, r"prompts\[0\].*got int 1"),
        (lambda p: p.stream_infer(None), RequestError, "got None"),
        (lambda p: p("hi", {"max_new_tokens": 3}), ConfigError, "gen_config: expected a GenerationConfig.*got dict"),
        (lambda p: p("hi", [SHORT, 3]), ConfigError, "gen_config: expected"),
        (lambda p: p(["hi"], [SHORT, SHORT]), ConfigError, "2 generation configs for 1 prompts"),
        (lambda p: p.stream_infer("hi", Session()), ConfigError, "gen_config.*got Session"),
        (lambda p: p.chat("hi", SHORT), ConfigError, "session: expected a Session.*got GenerationConfig"),
        (lambda p: p.chat(None), RequestError, "prompt: expected.*got NoneType"),
        (lambda p: p.chat("hi", gen_config=3), ConfigError, "gen_config.*got int"),
        (lambda p: p.chat("hi", Session(history=None)), ConfigError, "session.history: expected a list"),
        (lambda p: p("hi", priority="high"), ConfigError, "priority='high': expected an integer"),
        (lambda p: p("hi", timeout="1"), ConfigError, "timeout='1': expected a number"),
        (lambda p: p("hi", sampling_params=3), ConfigError, "^Pipeline has no argument sampling_params: use"),
        (lambda p: p("hi", temperature=0.5), ConfigError, r"use gen_config=GenerationConfig\(temperature=...\)"),
        (lambda p: p("hi", random_seed=5), ConfigError, "use seed"),
        (lambda p: p("hi", adapter_name=3), ConfigError, "adapter_name=3: expected the name"),
        (lambda p: p("hi", lora_request="a"), ConfigError, "use adapter_name"),
        (lambda p: p.stream_infer("hi", sessions=3), ConfigError, "^Pipeline.stream_infer has no .* sessions: use"),
        (lambda p: p("hi", prioritty=3), ConfigError, "did you mean priority"),
        (lambda p: p.generate("hi"), AttributeError, r"^Pipeline has no generate: use pipe\(prompts"),
        (lambda p: p.sesion(), AttributeError, "did you mean session"),
        (lambda p: p.ppl(3), RequestError, "inputs: expected texts or lists of token ids, got int 3"),
        (lambda p: p.ppl([["a"]]), RequestError, r"inputs\[0\]: expected text or token ids"),
    ],
)
def test_a_mistake_in_a_call_is_one_error(pipe: Pipeline, call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(pipe)
    assert not pipe._outputs, "nothing has started"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[0\]: expected a message .* got str"),
        ({"role": "user"}, r"messages\[0\].content: expected text.*got NoneType"),
        ({"role": "bot", "content": "x"}, r"role='bot': expected system, developer, user, assistant"),
        ({"rol": "user", "content": "x"}, "unknown field 'rol'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content: only parts .* are supported"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "tool_calls is not supported"),
        ({"role": "user", "content": "x", "name": 3}, "name: expected text"),
    ],
)
def test_a_malformed_message_names_its_place(message: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        plain_messages([message])


def test_an_empty_conversation_is_refused(pipe: Pipeline) -> None:
    for prompt in ([[]], [()]):
        (response,) = pipe(prompt, SHORT)
        assert response.error_message == "messages: List should have at least 1 item after validation, not 0"


def test_messages_as_clients_send_them_back() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "name": "bot"}
    assert plain_messages([answer]) == [{"role": "assistant", "content": "x", "name": "bot"}]


def test_a_history_may_be_pairs(pipe: Pipeline) -> None:
    pairs, messages = Session(), Session()
    pairs.history = [("hi", "hello")]
    messages.history = [HI, {"role": "assistant", "content": "hello"}]
    assert pipe.chat("again", pairs, SHORT).history == pipe.chat("again", messages, SHORT).history
    assert len(pairs.history) == 4


def test_a_stream_counts_tokens_so_far(pipe: Pipeline) -> None:
    parts = list(pipe.stream_infer("hi", SHORT))
    assert [p.generate_token_len for p in parts] == list(range(1, len(parts) + 1))
    assert sum(len(p.token_ids) for p in parts) == parts[-1].generate_token_len == pipe("hi", SHORT).generate_token_len


def test_progress_is_on_stderr_and_off_by_default(pipe: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(["hi", "ho"], SHORT)
    assert capsys.readouterr() == ("", "")
    for name in ("progress", "use_tqdm"):
        pipe(["hi", "ho"], SHORT, **{name: True})
        out, err = capsys.readouterr()
        assert not out
        assert "2/2" in err


def test_a_closed_pipeline_says_so(demo_model: Path) -> None:
    pipe = pipeline(str(demo_model), max_model_len=64, max_batch_size=1)
    stream = pipe.stream_infer("hi")
    next(stream)
    pipe.close()
    pipe.close()
    calls = (lambda: next(stream), lambda: pipe("hi"), lambda: pipe.chat("hi"), lambda: pipe.ppl("hi there"))
    for call in calls:
        with pytest.raises(RequestError, match="this pipeline is closed"):
            call()


def test_what_cannot_be_opened() -> None:
    for opening in (pipeline, AsyncPipeline):
        with pytest.raises(ConfigError, match="no argument model_path: use model"):
            opening(model_path="demo")
    for arguments, message in (
        ((None,), "model: expected a checkpoint's folder or its name, got NoneType"),
        (("demo", {"block_size": 32}), "backend_config: expected an EngineConfig, got dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipeline(*arguments)
    with pytest.raises(ConfigError, match="never runs code"):
        pipeline("demo", trust_remote_code=True)


def test_other_tools_names_for_the_package() -> None:
    for name, ours in (
        ("LLM", "pipeline"),
        ("SamplingParams", "GenerationConfig"),
        ("TurbomindEngineConfig", "EngineConfig"),
    ):
        with pytest.raises(ImportError, match=f"lmkit has no {name}: use {ours}"):
            exec(f"from lmkit import {name}")
    for value, name, advice in (
        (Response(), "cached_tokens", "Response has no cached_tokens: use cached_token_len"),
        (Response(), "outputs", "use text"),
        (Session(), "abort", "end the iteration"),
        (EngineConfig(), "blok_size", "EngineConfig has no blok_size; did you mean block_size"),
        (GenerationConfig(), "max_tokens", "use max_new_tokens"),
        (GenerationConfig(), "temprature", "did you mean temperature"),
    ):
        with pytest.raises(AttributeError, match=advice):
            getattr(value, name)
    with pytest.raises(AttributeError, match="did you mean pipeline"):
        lmkit.pipelin  # noqa: B018
    assert not hasattr(lmkit, "no_such_name")
    assert all(getattr(lmkit, name) for name in lmkit.__all__)
    assert issubclass(ConfigError, LMKitError)
