"""`lmkit.api`: every shape of prompt, streaming, conversations, perplexity, and errors that stay their own."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
import transformers

from lmkit import EngineConfig, GenerationConfig, Pipeline, RequestError, pipeline
from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.generation_config import SamplingDefaults
from lmkit.turbo.request import Request

QUESTION = "Write a Python function `is_empty`: Return True if the queue is empty."
SHORT = GenerationConfig(max_new_tokens=12)


def test_every_shape_of_prompt(pipe: Pipeline) -> None:
    message = [{"role": "user", "content": QUESTION}]
    one = pipe(QUESTION, SHORT)
    assert one.text
    assert one.finish_reason in ("stop", "length")
    assert one.generate_token_len == len(one.token_ids) <= 12
    assert pipe(message, SHORT).text == one.text
    both = pipe([QUESTION, "class A:"], SHORT)
    assert [r.text for r in both] == [one.text, pipe("class A:", SHORT).text]
    assert [r.text for r in pipe([message, message], SHORT)] == [one.text, one.text]
    assert pipe([]) == []


def test_plain_continuation(pipe: Pipeline) -> None:
    response = pipe("import os\nimport ", SHORT, do_preprocess=False)
    assert response.input_token_len == len(pipe.tokenizer.encode("import os\nimport "))
    assert response.input_token_len < pipe("import os\nimport ", SHORT).input_token_len


def test_one_bad_prompt_does_not_fail_its_siblings(pipe: Pipeline) -> None:
    good, long, bad = pipe([QUESTION, "x " * 2000, [{"rol": "user"}]], SHORT)
    assert good.finish_reason in ("stop", "length")
    assert long.finish_reason == bad.finish_reason == "error"
    assert "512" in (long.error_message or "")
    configs = [SHORT, GenerationConfig(temperature=-1.0)]
    assert [r.error_code for r in pipe([QUESTION, QUESTION], configs)] == [None, "invalid_request"]


def test_a_refusal_has_the_names_of_the_generation_config(pipe: Pipeline) -> None:
    response = pipe("x", GenerationConfig(max_new_tokens=2, min_new_tokens=3))
    assert response.finish_reason == "error"
    assert response.error_message == "min_new_tokens=3: must be in [0, max_new_tokens]"
    with pytest.raises(ConfigError, match="no field max_tokens: use max_new_tokens"):
        GenerationConfig(max_tokens=2)


DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, max_new_tokens=20)


def test_what_a_config_does_not_set_is_the_checkpoint_s() -> None:
    unset = GenerationConfig().filled(DEFAULTS).params()
    assert (unset.temperature, unset.top_p, unset.top_k, unset.max_tokens) == (0.6, 0.9, 0, 20)
    given = GenerationConfig(temperature=0.0, top_p=1.0, max_new_tokens=None).filled(DEFAULTS).params()
    assert (given.temperature, given.top_p, given.max_tokens) == (0.0, 1.0, None)
    plain = GenerationConfig().filled(SamplingDefaults()).params()
    assert (plain.temperature, plain.max_tokens) == (0.0, 512), "greedy"
    with pytest.raises(RequestError, match=r"min_new_tokens=21: must be in \[0, max_new_tokens\]"):
        GenerationConfig(min_new_tokens=21).filled(DEFAULTS).validate(100)


def test_a_pipeline_samples_as_the_checkpoint_says(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 3}')
    options = {"max_model_len": 64, "max_batch_size": 1, "generation_config": str(tmp_path)}
    with pipeline(str(demo_model), **options) as pipe:
        assert pipe.tokenizer.eos_token_ids == (0, 2), "these are always the checkpoint's"
        requests = recorded(pipe, monkeypatch)
        pipe("x")
        pipe("x", GenerationConfig(temperature=0.0, max_new_tokens=2))
        pipe.chat("x")
    told = [(r.params.temperature, r.params.top_p, r.params.max_tokens) for r in requests]
    assert told == [(0.6, 0.9, 3), (0.0, 0.9, 2), (0.6, 0.9, 3)]
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match="temperature='hot'"):
        pipeline(str(demo_model), **options)


def test_more_prompts_than_the_queue_holds(pipe: Pipeline) -> None:
    prompts = [f"def f{i}(" for i in range(20)]
    together = pipe(prompts, SHORT)
    assert [r.text for r in together] == [pipe(p, SHORT).text for p in prompts]


def test_stream_adds_up(pipe: Pipeline) -> None:
    parts = list(pipe.stream_infer([QUESTION, "class A:"], SHORT))
    for index, whole in enumerate(pipe([QUESTION, "class A:"], SHORT)):
        mine = [p for p in parts if p.index == index]
        assert len(mine) > 2
        assert "".join(p.text for p in mine) == whole.text
        assert [p.finish_reason for p in mine][-1] == whole.finish_reason


def test_leaving_a_stream_early_frees_its_blocks(pipe: Pipeline) -> None:
    stream = pipe.stream_infer(QUESTION, GenerationConfig(max_new_tokens=200, ignore_eos=True))
    next(stream)
    assert pipe.engine.stats().num_running == 1
    stream.close()
    pipe("x", SHORT)
    assert pipe.engine.stats().blocks_used == 0


def test_two_streams_and_threads_share_the_engine(pipe: Pipeline) -> None:
    want = pipe(QUESTION, SHORT).text
    one, two = pipe.stream_infer(QUESTION, SHORT), pipe.stream_infer(QUESTION, SHORT)
    texts = ["", ""]
    for a, b in zip(one, two, strict=True):
        texts[0] += a.text
        texts[1] += b.text
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(pipe(QUESTION, SHORT).text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [want] * 2
    assert results == [want] * 4


def test_stop_strings_and_seeds(pipe: Pipeline) -> None:
    whole = pipe("import os\n", GenerationConfig(max_new_tokens=40, ignore_eos=True), do_preprocess=False).text
    stop = whole[10:14]
    cut = pipe("import os\n", GenerationConfig(max_new_tokens=40, stop=(stop,)), do_preprocess=False)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    warm = GenerationConfig(max_new_tokens=20, temperature=1.0, seed=3)
    assert pipe(QUESTION, warm).text == pipe(["x", QUESTION], warm)[1].text
    unseeded = GenerationConfig(max_new_tokens=20, temperature=1.5)
    assert len({pipe(QUESTION, unseeded).text for _ in range(4)}) > 1


def test_chat_remembers(pipe: Pipeline) -> None:
    session = pipe.chat(QUESTION, gen_config=SHORT)
    assert [m["role"] for m in session.history] == ["user", "assistant"]
    first = session.response.input_token_len
    parts = list(pipe.chat("And now?", session, SHORT, stream_response=True))
    assert session.response.text == "".join(p.text for p in parts)
    assert session.response.input_token_len > first + session.response.generate_token_len
    assert len(session.history) == 4
    pipe.chat("y " * 2000, session, SHORT)
    assert session.response.finish_reason == "error"
    assert len(session.history) == 4
    session.reset()
    assert session.history == []


def recorded(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine is asked from now on."""
    requests: list[Request] = []
    add = pipe.engine.add
    monkeypatch.setattr(pipe.engine, "add", lambda request: (requests.append(request), add(request)))
    return requests


def test_a_session_goes_on_with_its_own_tokens(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to spell its answer in single letters, which the tokenizer would join."""
    requests = recorded(pipe, monkeypatch)
    session = pipe.session()
    (letter,) = pipe.tokenizer.encode("a")
    spelled = GenerationConfig(max_new_tokens=8, logit_bias={letter: 100.0})
    known: list[int] = []
    for turn in range(3):
        pipe.chat(f"question {turn}", session, spelled)
        assert session.response.token_ids == [letter] * 8
        assert requests[-1].prompt_ids[: len(known)] == known
        known = requests[-1].prompt_ids + session.response.token_ids
    plain = pipe.tokenizer.encode_chat(session.history[:-1])
    assert len(requests[-1].prompt_ids) > len(plain)
    assert pipe.tokenizer.decode(requests[-1].prompt_ids, False) == pipe.tokenizer.decode(plain, False)
    assert {request.session_id for request in requests} == {session.id}


def test_forks_go_on_by_themselves(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = recorded(pipe, monkeypatch)
    session = pipe.chat(QUESTION, gen_config=SHORT)
    fork = session.fork()
    assert (fork.history, fork.tokens, fork.response) == (session.history, session.tokens, session.response)
    assert fork.id != session.id
    pipe.chat("And now?", fork, SHORT)
    assert (len(session.history), len(fork.history)) == (2, 4)
    assert session.response.text == session.history[-1]["content"]
    pipe.chat("And now?", session, SHORT)
    assert fork.response.token_ids == session.response.token_ids
    assert requests[1].prompt_ids == requests[2].prompt_ids
    assert requests[1].session_id == fork.id


def test_what_forks_share_is_computed_once(pipe: Pipeline) -> None:
    session = pipe.chat("What do forks share? " * 8, gen_config=SHORT)
    known = session.response.input_token_len + session.response.generate_token_len - 1  # the last was sampled only
    answers = []
    for fork in (session.fork(), session.fork()):
        before = pipe.engine.stats()
        pipe.chat("Go on, one way. " if not answers else "Go on, the other way. ", fork, SHORT)
        after = pipe.engine.stats()
        assert after.prefix_tokens - before.prefix_tokens == fork.response.input_token_len
        assert after.prefix_hits - before.prefix_hits >= known
        computed = fork.response.input_token_len - fork.response.cached_token_len
        assert after.prompt_tokens - before.prompt_tokens == computed
        answers.append(fork.history[:2])
    assert answers[0] == answers[1] == session.history


def test_priority_and_timeout_reach_the_engine(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = recorded(pipe, monkeypatch)
    pipe(["a", "b"], SHORT, priority=-2, timeout=60)
    list(pipe.stream_infer("a", SHORT, priority=3))
    assert [(r.priority, r.timeout, r.session_id) for r in requests] == [(-2, 60, None)] * 2 + [(3, None, None)]
    for timeout in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="timeout"):
            pipe("a", SHORT, timeout=timeout)


def test_ppl_is_transformers(pipe: Pipeline, demo_model: Path, heldout_text: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    texts = [heldout_text[:500], heldout_text[500:700]]
    want = []
    for text in texts:
        ids = torch.tensor([pipe.tokenizer.encode(text)])
        with torch.no_grad():
            want.append(math.exp(reference(ids, labels=ids).loss.item()))
    assert pipe.ppl(texts) == pytest.approx(want, rel=1e-3)
    assert pipe.ppl(pipe.tokenizer.encode(texts[0])) == pytest.approx(want[:1], rel=1e-3)
    with pytest.raises(RequestError, match="two tokens"):
        pipe.ppl([[1]])


def test_what_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        pipeline("demo", blok_size=3)
    with pytest.raises(ConfigError, match="not both"):
        pipeline("demo", EngineConfig(), block_size=3)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        pipeline(str(tmp_path))


def test_embeddings_are_those_of_transformers(pipe: Pipeline, demo_model: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    texts = ["def add(a, b):\n", "import os\n"]
    got = pipe.embed(texts)
    for row, text in zip(got, texts, strict=True):
        with torch.no_grad():
            states = reference.model(torch.tensor([pipe.tokenizer.encode(text)])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(row), states / states.norm(), atol=1e-4, rtol=1e-3)
    assert (pipe.embed(pipe.tokenizer.encode(texts[0])) == got[:1]).all()
    with pytest.raises(RequestError, match="at least one token"):
        pipe.embed([[]])
    with pytest.raises(RequestError, match="maximum context length"):
        pipe.embed([[5] * 5000])
