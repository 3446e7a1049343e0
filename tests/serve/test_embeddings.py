"""/v1/embeddings, /v1/rerank, /v1/score and /classify, in front of an engine whose vectors are known."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import openai
import pytest
import torch

from lmkit.config import ServerConfig
from lmkit.errors import RequestError
from lmkit.serve.embeddings import judge, vectors
from lmkit.serve.embeddings.encoding import encoded
from lmkit.text.cut import cut_text
from lmkit.turbo.request import Classes, EngineInfo, Request, Siblings, StepOutput, TokenLogprobs
from lmkit.turbo.transport.steps import Rest
from tests.serve.fake_engine import EMBEDDING_SIZE, embedding
from tests.serve.in_process import INFO, TOKENIZER, App, StubEngine, _fields
from tests.serve.live import Server
from tests.test_end_to_end import running

EMBEDDING_PATHS = ("/v1/embeddings", "/invocations")
TORCH_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
TEXTS = ["def add(a, b):", "import os", "class Queue:\n    pass"]


class EmbeddingEngine(StubEngine):
    """Answers with tests.serve.fake_engine.embedding, and records the requests and how many were open at once."""

    def __init__(self, failure: RequestError | None = None) -> None:
        super().__init__()
        self.info = EngineInfo(**{**_fields(INFO), "hidden_size": EMBEDDING_SIZE, "pooling": "mean"})
        self.requests: list[Request] = []
        self.open = self.most = 0
        self.refusal = failure

    def submit(self, siblings: Siblings) -> None:
        assert not siblings.others

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        self.requests.append(request)
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.001)
        self.open -= 1
        if self.refusal is not None:
            raise self.refusal
        vector = embedding(request.prompt_ids)
        yield StepOutput(
            request_id=request.request_id, token_ids=[], finish_reason="length", embedding=vector, cached_tokens=1
        )


def vector(text: str | list[int], size: int = EMBEDDING_SIZE) -> list[float]:
    """The unit vector of a text."""
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    part = struct.unpack(f"<{EMBEDDING_SIZE}f", embedding(ids))[:size]
    length = sum(x * x for x in part) ** 0.5
    return [x / length for x in part]


def cosine(a: str, b: str) -> float:
    return sum(x * y for x, y in zip(vector(a), vector(b), strict=True))


def post(path: str, engine: EmbeddingEngine | None = None, **body: Any) -> httpx.Response:
    return App(engine or EmbeddingEngine()).post(path, {"model": "model", **body})


def refused(path: str, **body: Any) -> str:
    response = post(path, **body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def shown(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def test_texts_and_token_ids(server: Server) -> None:
    for given, texts in [
        (TEXTS, TEXTS), (TEXTS[0], TEXTS[:1]), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [9]], [[5, 6], [9]])
    ]:  # fmt: skip
        response = server.post("/v1/embeddings", {"model": "demo", "input": given})
        assert shown(response) == [pytest.approx(vector(text), abs=1e-6) for text in texts]
        answer = response.json()
        assert (answer["object"], answer["model"]) == ("list", "demo")
        assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
        count = sum(len(TOKENIZER.encode(text)) if isinstance(text, str) else len(text) for text in texts)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (count, count)


def test_the_openai_client(client: openai.OpenAI) -> None:
    """It asks for base64 unless it is told otherwise."""
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="demo", input=TEXTS, **options)
        assert [entry.embedding for entry in answer.data] == [pytest.approx(vector(text), abs=1e-6) for text in TEXTS]
        assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(text)) for text in TEXTS)


def test_base64_holds_the_same_numbers() -> None:
    numbers = shown(post("/v1/embeddings", input=TEXTS))
    packed = post("/v1/embeddings", input=TEXTS, encoding_format="base64").json()["data"]
    for entry, want in zip(packed, numbers, strict=True):
        assert list(struct.unpack(f"<{EMBEDDING_SIZE}f", base64.b64decode(entry["embedding"]))) == want


def test_fewer_dimensions_are_normalized_again() -> None:
    assert shown(post("/v1/embeddings", input=TEXTS, dimensions=3)) == [
        pytest.approx(vector(text, 3), abs=1e-6) for text in TEXTS
    ]
    (plain,) = shown(post("/v1/embeddings", input=[5, 5, 6], normalize=False))
    assert shown(post("/v1/embeddings", input=[5, 5, 6], use_activation=False)) == [plain]
    assert post("/v1/embeddings", input=[5], use_activation=False, normalize=True).status_code == 400
    assert plain == [0, 0, 0, 0, 0, 2, 2, 0]
    assert "dimensions=9: this model's embeddings have 8" in refused("/v1/embeddings", input="a", dimensions=9)


def test_a_matryoshka_model_has_the_sizes_that_it_was_trained_for() -> None:
    engine = EmbeddingEngine()
    engine.info = msgspec.structs.replace(engine.info, dimensions=(2, 4))
    for size in (2, 4, EMBEDDING_SIZE):
        assert [len(vector) for vector in shown(post("/v1/embeddings", engine, input="a", dimensions=size))] == [size]
    answer = post("/v1/embeddings", engine, input="a", dimensions=3)
    assert answer.status_code == 400
    assert "dimensions=3: this model was trained for 2, 4" in answer.json()["error"]["message"]


def test_the_engine_gets_what_the_request_says() -> None:
    engine = EmbeddingEngine()
    post("/v1/embeddings", engine, input=TEXTS, priority=3, cache_salt="mine", timeout=9)
    assert [request.pooling for request in engine.requests] == ["mean"] * 3
    assert {(r.params.max_tokens, r.priority, r.cache_salt, r.timeout) for r in engine.requests} == {(0, 3, "mine", 9)}


@pytest.mark.parametrize(("side", "want"), [(None, [1, 2]), ("right", [1, 2]), ("left", [4, 5])])
def test_ids_are_cut_to_the_length_that_is_asked_for(side: str | None, want: list[int]) -> None:
    engine = EmbeddingEngine()
    post("/v1/embeddings", engine, input=[1, 2, 3, 4, 5], truncate_prompt_tokens=2, truncation_side=side)
    assert [request.prompt_ids for request in engine.requests] == [want]


def test_special_tokens_around_a_text_stay_when_it_is_cut() -> None:
    ids = [1, 50, 51, 52, 53, 2]

    class Special:
        def __init__(self, plain: list[int]) -> None:
            self.plain = plain

        def encode(self, text: str, special: bool) -> list[int]:
            return ids if special else self.plain

    def cut(plain: list[int], room: int, *, keep_end: bool) -> list[int]:
        tokenizer: Any = Special(plain)
        return cut_text("", tokenizer, room, special=True, keep_end=keep_end)

    assert cut(ids[1:-1], 4, keep_end=False) == [1, 50, 51, 2]
    assert cut(ids[1:-1], 4, keep_end=True) == [1, 52, 53, 2]
    assert cut(ids[1:-1], 2, keep_end=False) == [1, 50]
    assert cut([50, 9], 3, keep_end=False) == [1, 50, 51], "the text's own tokens are not in there"


def test_a_text_beyond_the_context() -> None:
    long = "x = 1\n" * 60
    response = post("/v1/embeddings", input=["a", long])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "truncate_prompt_tokens: -1" in refused("/v1/embeddings", input=list(range(65)))
    engine = EmbeddingEngine()
    assert post("/v1/embeddings", engine, input=long, truncate_prompt_tokens=-1).status_code == 200
    assert [len(request.prompt_ids) for request in engine.requests] == [64]
    assert "maximum context length" in refused("/v1/embeddings", input="a", truncate_prompt_tokens=65)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "send input, or messages"),
        ({"input": []}, "input: expected text"),
        ({"input": [["a"]]}, "input: expected text"),
        ({"input": ["a"] * 2049}, "input: at most 2048"),
        ({"input": [5000]}, "not in [0, 4096)"),
        ({"input": [[]]}, "no tokens"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side needs"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype: it goes with encoding_format base64"),
        ({"input": "a", "embed_dtype": "int8", "encoding_format": "bytes"}, "embed_dtype"),
        ({"input": ["a"] * 99, "encoding_format": "bytes"}, "ask for bytes_only"),
        ({"input": [1, "x" * 999]}, "maximum context length"),
        ({"input": [1, 5000, "x"]}, "not in [0, 4096)"),
        ({"input": "a", "messages": MESSAGES}, "send input, or messages"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt: it goes with messages"),
        ({"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}, "send one of them"),
    ],
)
def test_mistakes_are_refused(body: dict[str, Any], message: str) -> None:
    assert message in refused("/v1/embeddings", **body)


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_bytes_of_a_type_and_order(dtype: str, endianness: str) -> None:
    """torch rounds the same vectors, and reads the bytes."""
    form = {"embed_dtype": dtype, "endianness": endianness, "normalize": False}
    plain = shown(post("/v1/embeddings", input=TEXTS, normalize=False))
    expected = torch.tensor(plain).to(TORCH_TYPES[dtype])
    size = expected.element_size()

    def read(data: bytes) -> list[float]:
        words = [data[i : i + size] for i in range(0, len(data), size)]
        little = b"".join(word[::-1] if endianness == "big" else word for word in words)
        return torch.frombuffer(bytearray(little), dtype=TORCH_TYPES[dtype]).float().tolist()

    in_base64 = post("/v1/embeddings", input=TEXTS, encoding_format="base64", **form).json()["data"]
    assert [read(base64.b64decode(entry["embedding"])) for entry in in_base64] == expected.float().tolist()
    answer = post("/v1/embeddings", input=TEXTS, encoding_format="bytes", **form)
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    for entry, row in zip(metadata["data"], expected.float().tolist(), strict=True):
        assert read(answer.content[entry["start"] : entry["end"]]) == row
        assert (entry["embed_dtype"], entry["endianness"], entry["shape"]) == (dtype, endianness, [EMBEDDING_SIZE])
    alone = post("/v1/embeddings", input=TEXTS, encoding_format="bytes_only", **form)
    assert alone.content == answer.content
    assert "metadata" not in alone.headers


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_rounding_is_that_of_torch(dtype: Any) -> None:
    """Of numbers of all sizes, of the middles between neighbours, and of both zeros."""
    exact = torch.arange(-200, 200).float() / 64
    values = torch.cat([torch.randn(4096, generator=torch.manual_seed(0)).exp() - 1, exact, torch.tensor([0.0, -0.0])])
    (data,) = encoded(values[None].numpy(), dtype)
    assert data == bytes(values.to(TORCH_TYPES[dtype]).view(torch.uint8).tolist())
    (most,) = encoded((torch.tensor([[3e38, -3e38]])).numpy(), dtype)
    read = torch.frombuffer(bytearray(most), dtype=TORCH_TYPES[dtype]).float()
    assert read.isfinite().all()
    assert read[0] == -read[1]


def test_texts_between_token_ids() -> None:
    engine = EmbeddingEngine()
    assert len(shown(post("/v1/embeddings", engine, input=[12, "def f", 34]))) == 1
    assert len(shown(post("/v1/embeddings", engine, input=["a", [12, "def f", 34], [5]]))) == 3
    ids = [12, *TOKENIZER.encode("def f", False), 34]
    assert [request.prompt_ids for request in engine.requests] == [ids, TOKENIZER.encode("a"), ids, [5]]


def test_a_conversation_is_embedded_as_the_template_writes_it() -> None:
    engine = EmbeddingEngine()
    said = [*MESSAGES, {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "And you?"}]
    app = App(engine)

    def tokens(**fields: Any) -> list[int]:
        return app.post("/tokenize", {"messages": said, **fields}).json()["tokens"]

    for given, same in (
        ({}, {"add_generation_prompt": False}),
        ({"add_generation_prompt": True}, {"add_generation_prompt": True}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"add_special_tokens": True}, {"add_generation_prompt": False, "add_special_tokens": True}),
    ):
        answer = app.post("/v1/embeddings", {"messages": said, **given})
        assert engine.requests[-1].prompt_ids == tokens(**same)
        assert shown(answer) == [pytest.approx(vector(tokens(**same)), abs=1e-6)]
    one, other = (app.post(path, {"messages": said, "encoding_format": "float"}) for path in EMBEDDING_PATHS)
    assert shown(one) == shown(other)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/generate", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ],
)
def test_a_model_without_a_head_generates_nothing(path: str, body: dict[str, Any]) -> None:
    engine = EmbeddingEngine()
    engine.info = msgspec.structs.replace(engine.info, has_head=False)
    response = App(engine).post(path, {"model": "model", **body})
    assert response.status_code == 400
    assert "no head to generate with: it gives embeddings" in response.json()["error"]["message"]
    assert not engine.requests


def test_neutral_fields_are_accepted() -> None:
    assert post("/v1/embeddings", input="a", embed_dtype="float32", request_id=None, user="me").status_code == 200


def test_a_body_of_many_texts_fills_a_small_part_of_the_queue() -> None:
    engine = EmbeddingEngine()
    texts = [[i % 50] * (i % 3 + 1) for i in range(300)]
    got = shown(post("/v1/embeddings", engine, input=texts))
    assert got == [pytest.approx(vector(text), abs=1e-6) for text in texts]
    assert engine.most == vectors.AT_ONCE


def test_a_text_that_fails_ends_the_whole_request() -> None:
    engine = EmbeddingEngine(RequestError("deadline_exceeded", "its time was up"))
    response = post("/v1/embeddings", engine, input=TEXTS)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_embeddings_count_as_part_of_an_answer() -> None:
    app = App(EmbeddingEngine(), ServerConfig(answer_memory=2000))
    response = app.post("/v1/embeddings", {"model": "model", "input": [[i] for i in range(90)]})
    assert response.status_code == 503, response.text
    assert app.serving.answers.used == 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank(path: str) -> None:
    query, documents = "def add(x):", [*TEXTS, "def add(x):", "import os"]
    answer = post(path, query=query, documents=documents).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert scores == {i: pytest.approx(cosine(query, text), abs=1e-6) for i, text in enumerate(documents)}
    order = [entry["index"] for entry in answer["results"]]
    assert order == sorted(range(5), key=lambda i: (-scores[i], i))
    assert order[0] == 3
    assert order.index(4) == order.index(1) + 1, "equal documents keep their order"
    assert all(entry["document"] == {"text": documents[entry["index"]]} for entry in answer["results"])
    assert answer["usage"]["total_tokens"] == sum(len(TOKENIZER.encode(text)) for text in [query, *documents])


def test_the_best_documents_alone() -> None:
    given = {"query": "import os", "documents": [{"text": text} for text in TEXTS]}
    (best,) = post("/v1/rerank", **given, top_n=1, return_documents=False).json()["results"]
    assert best == {"index": 1, "relevance_score": pytest.approx(1, abs=1e-6)}
    assert len(post("/v1/rerank", **given, top_n=0).json()["results"]) == 3
    assert len(post("/v1/rerank", **given, top_n=9).json()["results"]) == 3


def test_a_score_does_not_depend_on_the_other_documents() -> None:
    alone = [post("/v1/rerank", query="import", documents=[t]).json()["results"][0]["relevance_score"] for t in TEXTS]
    together = post("/v1/rerank", query="import", documents=TEXTS).json()["results"]
    assert {entry["index"]: entry["relevance_score"] for entry in together} == dict(enumerate(alone))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(path: str) -> None:
    pairs = {
        ("one", "one"): (TEXTS[0], TEXTS[1]),
        ("one", "many"): (TEXTS[0], TEXTS),
        ("many", "many"): (TEXTS, TEXTS[::-1]),
    }
    for first, second in pairs.values():
        answer = post(path, text_1=first, text_2=second).json()
        right = second if isinstance(second, list) else [second]
        left = first if isinstance(first, list) else [first] * len(right)
        want = [cosine(a, b) for a, b in zip(left, right, strict=True)]
        assert [entry["score"] for entry in answer["data"]] == [pytest.approx(x, abs=1e-6) for x in want]
        assert answer["object"] == "list"
    assert "text_1 has 2 texts and text_2 3" in refused("/v1/score", text_1=TEXTS[:2], text_2=TEXTS)
    assert "text_2: expected 1 to 2048 texts" in refused("/v1/score", text_1="a", text_2=[])


def test_a_ranking_as_tei_has_it() -> None:
    """The same scores as those of `documents`, in a bare list."""
    query = {"query": "import sys", "top_n": 2}
    ranked = post("/v1/rerank", **query, documents=TEXTS).json()["results"]
    expected = [{"index": entry["index"], "score": entry["relevance_score"]} for entry in ranked]
    assert post("/rerank", **query, texts=TEXTS).json() == expected
    with_text = [entry | {"text": TEXTS[entry["index"]]} for entry in expected]
    assert post("/rerank", **query, texts=TEXTS, return_text=True).json() == with_text
    for wrong in ({}, {"texts": TEXTS, "documents": TEXTS}, {"documents": TEXTS, "return_text": True},
                  {"texts": TEXTS, "return_documents": True}):  # fmt: skip
        assert post("/rerank", query="a", **wrong).status_code == 400


def test_other_names_of_the_texts_of_a_score() -> None:
    scores = post("/v1/score", text_1="import sys", text_2=TEXTS).json()["data"]
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        body = {first: "import sys", second: TEXTS}
        assert post("/score", **body).json()["data"] == scores
        assert post("/invocations", **body).json()["data"] == scores
    assert "text_2 is given twice" in refused("/score", queries="a", documents="b", text_2="c")
    assert refused("/score", queries="a")


def test_texts_and_token_ids_in_one_body() -> None:
    text, ids = shown(post("/v1/embeddings", input=[TEXTS[0], TOKENIZER.encode(TEXTS[0])]))
    assert text == ids


def test_texts_as_llama_cpp_has_them() -> None:
    parts = {"content": [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]}
    plain, one, two = shown(post("/v1/embeddings", input=["import os", {"prompt_string": "import os"}, parts]))
    assert plain == one == two
    assert shown(post("/v1/embeddings", input=parts)) == [plain]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for wrong in ({"content": [image]}, {"content": "a"}, {"prompt_string": 5}, parts | {"name": "a"}):
        assert "input: expected text" in refused("/v1/embeddings", input=wrong)


class JudgeEngine(EmbeddingEngine):
    """A model for which the log-probability of a token is minus its id in hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.info = EngineInfo(**{**_fields(INFO), "max_model_len": 512})

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        self.requests.append(request)
        await asyncio.sleep(0)
        top = [(token, -token / 100) for token in request.params.logprob_token_ids]
        scores = [TokenLogprobs(0, 0.0, top) for _ in request.prompt_ids[request.logprobs_start :]]
        yield StepOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason="length",
            prompt_logprobs=scores[:-1],
            logprobs=scores[-1:],
        )


def test_a_reranker_answers_yes_or_no() -> None:
    engine = JudgeEngine()
    app = App(engine, ServerConfig(reranker="yes_no"))
    yes, no = (TOKENIZER.encode(answer, False) for answer in ("yes", "no"))
    want = 1 / (1 + math.exp(sum(yes) / 100 - sum(no) / 100))
    body = {"model": "model", "query": "q?", "documents": ["one", "two"], "instruction": "Find it"}
    answer = app.post("/v1/rerank", body).json()
    assert [entry["relevance_score"] for entry in answer["results"]] == [pytest.approx(want)] * 2
    asked = [request.prompt_ids for request in engine.requests]
    assert len(yes) > len(no) == 1  # so "no" is read on the way to "yes"
    for document, request in zip(("one", "two"), asked, strict=True):
        text = f"<Instruct>: Find it\n<Query>: q?\n<Document>: {document}"
        messages = [{"role": "system", "content": judge.SYSTEM}, {"role": "user", "content": text}]
        assert request == app.post("/tokenize", {"messages": messages}).json()["tokens"] + yes[:-1]
    assert answer["usage"]["prompt_tokens"] == sum(len(ids) + 1 for ids in asked), "each pair counts once"
    scores = app.post("/v1/score", {"text_1": "q?", "text_2": ["one", "two", "three"]}).json()["data"]
    assert [entry["score"] for entry in scores] == [pytest.approx(want)] * 3
    for wrong, code in (
        ({"truncate_prompt_tokens": 5}, "unsupported_parameter"),
        ({"documents": ["word " * 999]}, "context_length_exceeded"),
    ):
        refusal = app.post("/v1/rerank", body | wrong)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, code)
    assert "instruction: it goes with a reranker" in refused("/v1/rerank", query="q", documents=["a"], instruction="b")


@pytest.mark.slow
def test_a_reranker_reads_the_model_s_own_probabilities() -> None:
    """`endings` of /v1/completions scores the same words after the same prompt."""
    pair = {"query": "Which module has paths?", "documents": ["import os.path", "x = 1"]}
    with running("serve", "demo", "--port", "0", "--max-model-len", "512", "--reranker", "yes_no") as url:
        ranked = httpx.post(f"{url}/v1/rerank", json=pair, timeout=60).json()["results"]
        for entry in ranked:
            text = f"<Instruct>: {judge.TASK}\n<Query>: {pair['query']}\n<Document>: {entry['document']['text']}"
            messages = [{"role": "system", "content": judge.SYSTEM}, {"role": "user", "content": text}]
            prompt = httpx.post(f"{url}/apply-template", json={"messages": messages}).json()["prompt"]
            asked = {"prompt": prompt, "endings": ["yes", "no"], "prompt_logprobs": 0, "max_tokens": 0}
            asked["add_special_tokens"] = False
            choices = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]
            yes, no = (
                sum(info["logprob"] for position in choice["prompt_logprobs"] if position for info in position.values())
                for choice in choices
            )
            assert entry["relevance_score"] == pytest.approx(1 / (1 + math.exp(no - yes)), rel=1e-5)
    assert ranked[0]["relevance_score"] > ranked[1]["relevance_score"] > 0


CLASSES = Classes(
    labels=("no", "yes"),
    weight=struct.pack(f"<{2 * EMBEDDING_SIZE}f", *[0.0] * EMBEDDING_SIZE, 1.0, *[0.0] * (EMBEDDING_SIZE - 1)),
    bias=struct.pack("<2f", 0.0, 0.5),
    activation="softmax",
)


class Classifier(EmbeddingEngine):
    def __init__(self) -> None:
        super().__init__()
        self.info = EngineInfo(**{**_fields(self.info), "classes": CLASSES})


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_of_texts(path: str) -> None:
    response = post(path, Classifier(), input=TEXTS).json()
    raw = post(path, Classifier(), input=TEXTS, use_activation=False).json()["data"]
    for idx, (text, entry) in enumerate(zip(TEXTS, response["data"], strict=True)):
        logit = struct.unpack(f"<{EMBEDDING_SIZE}f", embedding(TOKENIZER.encode(text)))[0] + 0.5
        assert raw[idx]["probs"] == pytest.approx([0.0, logit], rel=1e-6)
        assert entry["probs"] == pytest.approx([1 / (1 + math.exp(logit)), 1 / (1 + math.exp(-logit))], rel=1e-6)
        label = "yes" if logit > 0 else "no"
        assert (entry["index"], entry["label"], entry["num_classes"]) == (idx, label, 2)
    assert response["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    alone = post(path, Classifier(), input=TEXTS[1]).json()["data"][0]
    assert alone["probs"] == response["data"][1]["probs"]


def test_classes_of_a_conversation() -> None:
    engine = Classifier()
    assert post("/classify", engine, messages=MESSAGES).json()["data"][0]["num_classes"] == 2
    assert TOKENIZER.decode(engine.requests[0].prompt_ids).count("Hi") == 1


def test_what_does_not_classify_is_refused() -> None:
    assert "no classes" in refused("/classify", input="a")
    for path, body in (("/v1/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        response = post(path, Classifier(), **body)
        assert (response.status_code, "/classify" in response.json()["error"]["message"]) == (400, True)


class CrossEncoder(EmbeddingEngine):
    def __init__(self) -> None:
        super().__init__()
        one = msgspec.structs.replace(
            CLASSES, labels=("good",), weight=struct.pack(f"<{EMBEDDING_SIZE}f", 1.0, *[0.0] * (EMBEDDING_SIZE - 1)),
            bias=struct.pack("<f", 0.5), activation="sigmoid", pooling="cls", reads_pairs=True,
        )  # fmt: skip
        self.info = EngineInfo(**{**_fields(self.info), "classes": one, "pooling": "cls"})


def pair_score(ids: list[int]) -> float:
    return 1 / (1 + math.exp(-0.5 - struct.unpack(f"<{EMBEDDING_SIZE}f", embedding(ids))[0]))


def test_a_cross_encoder_reads_pairs() -> None:
    engine = CrossEncoder()
    want = [pair_score(TOKENIZER.encode_pair("Hi", text).ids) for text in TEXTS]
    results = post("/rerank", engine, query="Hi", documents=TEXTS).json()["results"]
    assert [entry["index"] for entry in results] == sorted(range(3), key=lambda i: -want[i])
    assert [entry["relevance_score"] for entry in results] == pytest.approx(sorted(want, reverse=True), rel=1e-6)
    scored = post("/v1/score", CrossEncoder(), text_1="Hi", text_2=TEXTS).json()
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(want, rel=1e-6)
    assert scored["usage"]["prompt_tokens"] == sum(len(request.prompt_ids) for request in engine.requests)


def test_the_second_text_of_a_pair_is_cut() -> None:
    query, text = TOKENIZER.encode_pair("Hi", ""), TOKENIZER.encode_pair("Hi", TEXTS[2])
    for side, kept in (("right", text.second[:2]), ("left", text.second[-2:])):
        engine = CrossEncoder()
        cut = {"truncate_prompt_tokens": len(query.ids) + 2, "truncation_side": side}
        assert post("/score", engine, text_1="Hi", text_2=TEXTS[2], **cut).status_code == 200
        (request,) = engine.requests
        left = [i for i in range(len(text.ids)) if i not in text.second or i in kept]
        assert request.prompt_ids == [text.ids[i] for i in left]
    response = post("/score", CrossEncoder(), text_1="Hi" * 50, text_2="a", truncate_prompt_tokens=4)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
