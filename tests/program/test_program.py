"""Programs on a pipeline, on one in another process and on a server: the same texts everywhere."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkit import AsyncPipeline, GenerationConfig, Pipeline, pipeline
from lmkit.errors import ConfigError, LMKitError, RequestError
from lmkit.program import Branch, Part, Trace, run, run_batch, start
from lmkit.program import Server as Remote
from tests.serve.live import Server

ENGINE = "lmkit.turbo.engine.engine:Engine"
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe(demo_model: Path) -> Iterator[Pipeline]:
    with pipeline(str(demo_model), dtype="float32", max_model_len=512, speculate="ngram") as opened:
        yield opened
    assert not opened.engine.has_work()
    opened.engine.check_integrity()


@pytest.fixture(scope="module")
def server() -> Iterator[Remote]:
    options = ("--dtype", "float32", "--max-model-len", "512", "--speculate", "ngram", "--api-key", "k")
    with Server(*options, engine=ENGINE) as running:
        yield Remote(running.url + "/v1", model="demo", api_key="k")


async def tree(branch: Branch, module: str) -> dict[str, object]:
    """It uses all that a branch has."""
    branch += f"import {module}\n"
    line = await branch.gen("line", max_new_tokens=12, stop="\n")
    branches = branch.fork(3)

    async def body(fork: Branch, index: int) -> str:
        fork += f"\nclass Test{index}:\n"
        await fork.gen("body", max_new_tokens=10, temperature=0.8, seed=index)
        return await fork.gen("more", max_new_tokens=4, regex=r" = [0-9]{1,3}")

    bodies = await asyncio.gather(*(body(fork, index) for index, fork in enumerate(branches)))
    branch += "\n" + bodies[0] + "\n"
    chosen = await branch.select([f"import {module}", "xyzzy plugh", "class A:"], "chosen")
    form = await branch.gen("form", schema=SCHEMA, max_new_tokens=60)
    pick = await branch.gen(choices=["(a+b)", "c|d"], max_new_tokens=8)
    return {
        "line": line, "bodies": bodies, "chosen": chosen, "form": form, "pick": pick, "text": await branch.text(),
        "all": [dict(fork.values) for fork in branches],
    }  # fmt: skip


async def talk(branch: Branch) -> str:
    branch.system("You are brief.")
    branch.user("What is a list?")
    await branch.gen("first", max_new_tokens=12, seed=-1, top_k=-1, stop="", logit_bias={300: 3.0, 280: -3.0})
    branch.user("And a set?")
    branch += "A set"
    first, second = branch.fork(2)
    second.user("Why?")
    await asyncio.gather(first.gen("a", max_new_tokens=6), second.gen("b", max_new_tokens=6))
    return await first.text() + "|" + await second.text()


def test_the_same_on_a_pipeline_in_another_process_and_on_a_server(pipe: Pipeline, server: Remote) -> None:
    rows = [("os",), ("sys",), ("json",)]
    want = run_batch(pipe, tree, rows)
    assert [run(pipe, tree, *row) for row in rows] == want  # whatever runs beside it
    assert run_batch(server, tree, rows) == want
    talked = run(pipe, talk)
    assert run(server, talk) == talked

    async def beside() -> None:
        options = {"dtype": "float32", "max_model_len": 512, "speculate": "ngram"}
        async with AsyncPipeline("demo", **options) as other:
            found = await asyncio.gather(*(start(other, tree, *row) for row in rows), start(other, talk))
            assert found == [*want, talked]

    asyncio.run(beside())
    for result in want:
        json.loads(str(result["form"]))
        assert result["pick"] in ("(a+b)", "c|d")
        assert str(result["line"]) not in ("", "\n")


def test_texts_are_those_of_plain_calls(pipe: Pipeline) -> None:
    async def program(branch: Branch) -> tuple[str, str]:
        branch += "import os\nimport "
        first = await branch.gen(max_new_tokens=8)
        branch += "\n\ndef main("
        return first, await branch.gen(max_new_tokens=8)

    config = GenerationConfig(temperature=0.0, max_new_tokens=8)
    first = pipe("import os\nimport ", config, do_preprocess=False)
    second = pipe(f"import os\nimport {first.text}\n\ndef main(", config, do_preprocess=False)
    assert run(pipe, program) == (first.text, second.text)

    async def chat(branch: Branch) -> str:
        branch.user("Hello")
        return await branch.gen(max_new_tokens=8)

    assert run(pipe, chat) == pipe("Hello", config).text


def test_select_takes_the_highest_mean_log_probability(pipe: Pipeline, server: Remote) -> None:
    before, choices = "import os\nimport ", ["sys\n", "zebra\n", "json\n", "sys\n\nimport re"]
    encode = pipe.tokenizer.encode

    async def program(branch: Branch) -> str:
        branch += before
        return await branch.select(choices, "module")

    means = []
    for choice in choices:
        both = pipe.tokenizer.encode_behind(encode(before), choice)
        count = len(both) - len(encode(before))
        total = pipe.get_ppl([both])[0] * (len(both) - 1) - pipe.get_ppl([encode(before)])[0] * (
            len(encode(before)) - 1
        )
        means.append(-total / count)
    for model in (pipe, server):
        trace = Trace()
        assert run(model, program, trace=trace) == choices[means.index(max(means))]
        (span,) = [span for span in trace.programs[0].spans if span.kind == "select"]
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(span.scores.values(), means, strict=True))
        assert span.computed < 40  # the text before the choices is computed once


def test_branches_reuse_what_they_have_in_common(pipe: Pipeline, server: Remote) -> None:
    start_text = "".join(f"value_{i} = {i * i}\n" for i in range(12))

    async def program(branch: Branch) -> None:
        branch += start_text
        await branch.gen(max_new_tokens=2)
        await asyncio.gather(*(fork.gen(max_new_tokens=2, seed=i) for i, fork in enumerate(branch.fork(4))))

    for model, marker in ((pipe, "p"), (server, "s")):
        trace = Trace()
        start_text = marker + start_text
        run(model, program, trace=trace)
        first, *others = [span for span in trace.programs[0].all_spans() if span.kind == "gen"]
        assert first.reused == 0
        assert len(others) == 4
        for span in others:
            assert span.computed <= 16 < first.computed  # a block at most
            assert span.reused + span.computed == first.computed + 2


def test_variables_stream_and_a_trace_tells_all(pipe: Pipeline, server: Remote, tmp_path: Path) -> None:
    async def program(branch: Branch) -> str:
        branch += "# <b>bold</b>\nimport os\n"
        (fork,) = branch.fork(1)
        await fork.gen("inner", max_new_tokens=8, min_new_tokens=8)
        return await branch.gen("outer", schema=SCHEMA, max_new_tokens=60)

    for model in (pipe, server):
        parts: list[Part] = []
        trace = Trace()
        answer = run(model, program, on_part=parts.append, trace=trace)
        assert "".join(part.text for part in parts if part.name == "outer") == answer
        assert {(part.branch, part.name) for part in parts} == {("0.0", "inner"), ("0", "outer")}
        assert trace.totals()["generated"] > 8
        outer = trace.programs[0].spans[-1]
        assert 0 <= outer.drafted < outer.generated
        trace.save(tmp_path / "trace.html")
        page = (tmp_path / "trace.html").read_text()
        assert "<b>" not in page
        assert "&lt;b&gt;bold" in page
        assert "gen inner" in page


def test_an_error_ends_the_others_and_leaves_nothing(pipe: Pipeline, server: Remote) -> None:
    async def program(branch: Branch, fails: bool) -> str:
        branch += "import os\n"
        if fails:
            await branch.gen(max_new_tokens=1)
            raise ValueError("mine")
        return await branch.gen(max_new_tokens=400, ignore_eos=True)

    for model in (pipe, server):
        with pytest.raises(ValueError, match="mine"):
            run_batch(model, program, [(False,), (True,), (False,)])
    for _ in range(1000):
        if not pipe.engine.has_work():
            break
        pipe.engine.step()
    assert not pipe.engine.has_work()


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (lambda b: b.gen(schema={}, regex="a"), ConfigError, "schema and regex"),
        (lambda b: b.gen(choices=[]), ConfigError, "choices"),
        (lambda b: b.gen(logprobs=1), ConfigError, "no logprobs"),
        (lambda b: b.gen(max_tokens=1), ConfigError, "use max_new_tokens"),
        (lambda b: b.gen(choices="yes"), ConfigError, "choices: expected a list"),
        (lambda b: b.gen(schema=Branch), ConfigError, "model_json_schema"),
        (lambda b: b.select([""]), ConfigError, "not empty"),
        (lambda b: b.select(["a"]), ConfigError, "write some text first"),
        (lambda b: b.gen(regex="("), RequestError, "regex"),
        (lambda b: b.gen(temperature=-1), RequestError, "temperature"),
        (lambda b: b.gen(), RequestError, "empty"),
    ],
)
def test_mistakes_are_named(pipe: Pipeline, server: Remote, body: object, error: type[Exception], says: str) -> None:
    async def program(branch: Branch) -> None:
        if says in ("regex", "temperature"):
            branch += "a"
        await body(branch)  # type: ignore[operator]

    for model in (pipe, server):
        with pytest.raises(error, match=says):
            run(model, program)


def test_mistakes_around_a_program(pipe: Pipeline, server: Remote) -> None:
    async def program(branch: Branch) -> str:
        branch += "a"
        branch.user("hello")
        return ""

    async def missing(branch: Branch) -> str:
        return branch["x"]

    async def inside() -> None:
        run(pipe, missing)

    with pytest.raises(ConfigError, match="behind plain text"):
        run(pipe, program)
    with pytest.raises(ConfigError, match="no variable 'x'"):
        run(pipe, missing)
    with pytest.raises(ConfigError, match="event loop"):
        asyncio.run(inside())
    with pytest.raises(ConfigError, match="at_once"):
        run_batch(pipe, missing, [], at_once=0)
    with pytest.raises(ConfigError, match="expected a Pipeline"):
        run("demo", missing)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not started"):
        asyncio.run(start(AsyncPipeline("demo"), missing))
    assert "key" not in repr(Remote("http://h", api_key="secret"))
    with pytest.raises(ConfigError, match="is not a URL"):
        run(Remote("nowhere"), missing)
    with pytest.raises(RequestError, match="key"):
        run(Remote(server.url), talk)
    with pytest.raises(LMKitError, match="does not answer"):
        run(Remote("http://127.0.0.1:9"), talk)
