"""Engine steps -> text deltas, log-probabilities, stop strings and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.text import Tokenizer
from lmkit.turbo.repetition import RepetitionStop
from lmkit.turbo.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput

DEMO = Path(__file__).parents[3] / "lmkit" / "demo" / "model"
END = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(DEMO)


def processor(
    tokenizer: Tokenizer, *, prompt: str = "Hi", prompt_logprobs: bool = False, **params: Any
) -> OutputProcessor:
    request = Request(
        request_id="r",
        prompt_ids=tokenizer.encode(prompt),
        params=SamplingParams(**params),
        prompt_logprobs=prompt_logprobs,
    )
    return OutputProcessor(tokenizer, request)


def step(token_ids: list[int], finish: FinishReason | None = None, **fields: Any) -> StepOutput:
    return StepOutput(request_id="r", token_ids=token_ids, finish_reason=finish, **fields)


def run(output: OutputProcessor, token_ids: list[int], finish: FinishReason = "length") -> list[RequestOutput]:
    """One token a step until something ends it."""
    outputs = []
    for i, token_id in enumerate(token_ids):
        outputs.append(output.process(step([token_id], finish if i == len(token_ids) - 1 else None)))
        if outputs[-1].finish_reason:
            break
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_deltas_and_counts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve 日本 🙂 text")
    outputs = run(processor(tokenizer, prompt="one two"), ids)
    assert text_of(outputs) == "naïve 日本 🙂 text"
    assert [output.num_output_tokens for output in outputs] == list(range(1, len(ids) + 1))
    assert outputs[-1].num_prompt_tokens == len(tokenizer.encode("one two"))
    assert [output.finish_reason for output in outputs] == [None] * (len(ids) - 1) + ["length"]
    assert not any(output.abort_engine for output in outputs)
    assert [i for output in outputs for i in output.token_ids] == ids


def test_steps_count_once_however_many_tokens_they_give(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    ids = tokenizer.encode("one two three")
    counts = [output.process(step(part)).num_steps for part in (ids[:1], ids[1:3], [], ids[3:])]
    assert counts == [1, 2, 2, 3 if ids[3:] else 2]


def test_the_ending_token_counts_but_is_not_shown(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    for skip in (True, False):
        output = processor(tokenizer, skip_special_tokens=skip).process(step([a, END], "stop", stop_token=END))
        assert (output.text, output.num_output_tokens, output.token_ids) == ("a", 2, [a, END])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_stop_token_ids_are_named(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    output = processor(tokenizer, stop_token_ids=(a,)).process(step([a], "stop", stop_token=a))
    assert (output.text, output.stop_reason) == ("", a)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_it(tokenizer: Tokenizer, include: bool) -> None:
    ids = [tokenizer.encode(char)[0] for char in "abSTOPcd"]
    output = processor(tokenizer, stop=("STOP", "zz"), include_stop_str_in_output=include)
    outputs = run(output, ids)
    assert text_of(outputs) == ("abSTOP" if include else "ab")
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "STOP")
    assert outputs[-1].num_output_tokens == 6
    assert [o.abort_engine for o in outputs] == [False] * 5 + [True]
    late = output.process(step([ids[6]], None))  # was on its way when the abort was sent
    assert (late.text, late.token_ids, late.abort_engine, late.num_output_tokens) == ("", [], False, 6)


def test_a_stop_string_inside_one_step_cuts_the_rest(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(char)[0] for char in "aXbc"]
    output = processor(tokenizer, stop=("X",)).process(step(ids, "length"))
    assert (output.text, output.token_ids, output.num_output_tokens) == ("a", ids[:2], 2)
    assert (output.finish_reason, output.abort_engine) == ("stop", False)  # the engine had ended by itself


def test_text_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    outputs = run(processor(tokenizer, stop=("STOP",)), [tokenizer.encode(char)[0] for char in "aSTO"])
    assert [output.text for output in outputs] == ["a", "", "", "STO"]
    assert outputs[-1].finish_reason == "length"


def test_min_tokens_holds_stop_strings_back(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(char)[0] for char in "XaXbXc"]
    outputs = run(processor(tokenizer, stop=("X",), min_tokens=4), ids)
    assert text_of(outputs) == "XaXb"
    assert outputs[-1].num_output_tokens == 5
    outputs = run(processor(tokenizer, stop=("X",), min_tokens=3), ids)
    assert text_of(outputs) == "Xa"


def test_logprobs_carry_token_text_bytes_and_offsets(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é🙂x")
    logprobs = [TokenLogprobs(i, -0.5, [(i, -0.5), (7, -1.5)]) for i in ids]
    output = processor(tokenizer, logprobs=2).process(step(ids, "length", logprobs=logprobs))
    assert [entry.token.token_id for entry in output.logprobs] == ids
    assert b"".join(entry.token.data for entry in output.logprobs).decode() == "é🙂x"
    assert output.logprobs[-1].text_offset == 2
    assert output.logprobs[0].text_offset == 0
    assert output.logprobs[-1].token.text == "x"
    assert [(top.token_id, top.logprob) for top in output.logprobs[0].top] == [(ids[0], -0.5), (7, -1.5)]
    assert output.logprobs[0].top[1].text == tokenizer.token_text(7)


def test_logprobs_stop_where_the_tokens_stop(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(char)[0] for char in "aXb"]
    logprobs = [TokenLogprobs(i, -1.0, []) for i in ids]
    output = processor(tokenizer, logprobs=0, stop=("X",)).process(step(ids, None, logprobs=logprobs))
    assert [entry.token.text for entry in output.logprobs] == ["a", "X"]


def test_prompt_logprobs_come_once_and_start_with_none(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, prompt="The cat sat", prompt_logprobs=True)
    ids = tokenizer.encode("The cat sat")
    values = [TokenLogprobs(ids[i], -0.1 * i, [(7, -0.1), (ids[i], -0.1 * i)]) for i in range(1, len(ids))]
    first = output.process(step([5], None, prompt_logprobs=values))
    assert [entry.token.logprob for entry in first.prompt_logprobs] == [None, *(value.logprob for value in values)]
    assert [entry.token.token_id for entry in first.prompt_logprobs] == ids
    tops = [[(top.token_id, top.logprob) for top in entry.top] for entry in first.prompt_logprobs]
    assert tops == [[], *(value.top for value in values)]
    assert "".join(entry.token.text for entry in first.prompt_logprobs) == "The cat sat"
    offsets = [entry.text_offset for entry in first.prompt_logprobs]
    assert offsets == [len(tokenizer.decode(ids[:i])) for i in range(len(ids))]
    assert output.process(step([6], "length")).prompt_logprobs == []


def test_a_request_that_ends_before_its_prompt_is_computed_has_no_prompt_logprobs(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, prompt="The cat sat", prompt_logprobs=True)
    assert output.process(step([], "abort")).prompt_logprobs == []


def test_errors_pass_through(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer).process(step([], "error", error="the step failed"))
    assert (output.finish_reason, output.error, output.text) == ("error", "the step failed", "")
    assert output.error_code == "engine_error"
    output = processor(tokenizer).process(step([], "error", error="late", error_code="deadline_exceeded"))
    assert output.error_code == "deadline_exceeded"


def test_cached_tokens_are_those_of_the_first_output(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    assert output.process(step([5], None, cached_tokens=7)).num_cached_tokens == 7
    assert output.process(step([6], "length", cached_tokens=9)).num_cached_tokens == 7


def test_an_answer_that_repeats_itself_is_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("again and ") * 9
    size = len(ids) // 9
    outputs = run(processor(tokenizer, repetition_stop=RepetitionStop(ngram=size, count=3)), ids)
    assert [i for output in outputs for i in output.token_ids] == ids[: 3 * size]
    assert text_of(outputs) == "again and " * 3
    last = outputs[-1]
    assert (last.finish_reason, last.end, last.stop_reason, last.abort_engine) == ("length", "repetition", None, True)


def test_a_repetition_before_the_least_length_does_not_cut(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    outputs = run(processor(tokenizer, repetition_stop=RepetitionStop(ngram=1, count=2), min_tokens=5), [a] * 9)
    assert outputs[-1].num_output_tokens == 5


def test_a_repetition_that_is_over_at_the_least_length_does_not_cut(tokenizer: Tokenizer) -> None:
    a, b, c, d, e = tokenizer.encode("a b c d e")[:5]
    rule = RepetitionStop(ngram=1, count=2)
    outputs = run(processor(tokenizer, repetition_stop=rule, min_tokens=4), [a, a, b, c, d, e, c])
    assert (outputs[-1].num_output_tokens, outputs[-1].end) == (7, "repetition")
