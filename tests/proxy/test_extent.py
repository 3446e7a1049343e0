"""What is reserved for a request is never less than what a node may use for it, whatever its body says.

The oracle is the node's own reading: its models of bodies, and the requests that its engine would get.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import tokenizers

from lmkit.errors import RequestError
from lmkit.proxy.accounts.account import Sizes
from lmkit.proxy.accounts.extent import ROUTES, Extent
from lmkit.proxy.config import FORMS
from lmkit.proxy.config import ROUTES as FORWARDED
from lmkit.serve.embeddings.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from lmkit.serve.fill_in import filled_in
from lmkit.serve.generate import completion_fields
from lmkit.serve.llama_cpp import InfillRequest, NativeRequest, _fields, _infill_fields
from lmkit.serve.messages.protocol import MessagesRequest
from lmkit.serve.messages.translate import to_chat as of_messages
from lmkit.serve.ollama.protocol import ChatBody, EmbedBody, GenerateBody
from lmkit.serve.ollama.translate import chat_of, chat_of_prompt, completion_of
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.responses.protocol import ResponsesRequest
from lmkit.serve.responses.translate import to_chat as of_responses
from lmkit.serve.to_request import LIMITS, NO_LIMIT, chat_requests, choices_per_prompt, completion_requests
from lmkit.strict import validate
from lmkit.text import Tokenizer
from lmkit.text.audio import AudioSettings
from lmkit.text.template import ChatTemplate
from lmkit.turbo.request import EngineInfo, Request
from tests.serve import in_process
from tests.serve.in_process import INFO, TOKENIZER, App, ScriptedEngine
from tests.serve.test_fill_in import MARKS, with_tokens
from tests.text.test_audio import wav

CONTEXT = 512
MODEL_INFO = EngineInfo(**{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"max_model_len": CONTEXT})
CASES = 250  # of a route
FILLS_IN = with_tokens(*MARKS)
Body = dict[str, Any]


def used(requests: Sequence[Request], choices: int) -> tuple[int, int]:
    """The most tokens of (prompts, answers)."""
    prompts = sum(len(request.prompt_ids) for request in requests[::choices])
    rooms = [(request.params.max_tokens, CONTEXT - len(request.prompt_ids)) for request in requests]
    return prompts, sum(room if most is None else min(most, room) for most, room in rooms)


def completion(body: Any) -> tuple[int, int]:
    read = validate(body, CompletionRequest)
    return used(completion_requests(read, TOKENIZER, MODEL_INFO, "x"), choices_per_prompt(read))


def native(read: CompletionRequest, tokenizer: Tokenizer = TOKENIZER) -> tuple[int, int]:
    """Of llama.cpp's routes: an answer that does not fit the context ends where that does."""
    info, choices = msgspec.structs.replace(MODEL_INFO, vocab_size=tokenizer.vocab_size), choices_per_prompt(read)
    try:
        return used(completion_requests(read, tokenizer, info, "x"), choices)
    except RequestError as error:
        if error.code != "context_length_exceeded":
            raise
        open_ended = read.model_copy(update=dict.fromkeys(LIMITS) | {"max_tokens": NO_LIMIT})
        return used(completion_requests(open_ended, tokenizer, info, "x"), choices)


def infill(body: Any) -> tuple[int, int]:
    read = validate(_infill_fields(body), InfillRequest)
    others = [(chunk.filename, chunk.text) for chunk in read.input_extra or ()]
    asked, begun = read.model_copy(update={"prompt": [read.input_prefix]}), str(read.prompt[0])
    between = filled_in(asked, read.input_suffix, FILLS_IN, MODEL_INFO, others=others, begun=begun)
    return native(between, FILLS_IN)


def ollama(body: Any) -> tuple[int, int]:
    read = validate(body, GenerateBody)
    return native(completion_of(read)) if read.raw else chat(chat_of_prompt(read))


def chat(read: ChatCompletionRequest, *, must_fit: bool = False) -> tuple[int, int]:
    return used(chat_requests(read, TOKENIZER, MODEL_INFO, "x", must_fit=must_fit)[0], read.n or 1)


def responses(body: Any) -> tuple[int, int]:
    read = validate(body, ResponsesRequest)
    return chat(of_responses(read, read.input))


def pairs(firsts: list[str], seconds: list[str], more: str | None) -> tuple[int, int]:
    count = max(len(firsts), len(seconds))
    both = zip(itertools.cycle(firsts), itertools.cycle(seconds), range(count), strict=False)
    return sum(len(TOKENIZER.encode(f"{more or ''}{a}{b}")) + 60 for a, b, _ in both), 0


def rerank(body: Any) -> tuple[int, int]:
    read = validate(body, RerankRequest)
    return pairs([read.query], read.documents or read.texts or [], read.instruction)


def score(body: Any) -> tuple[int, int]:
    read = validate(body, ScoreRequest)
    return pairs(read.text_1, read.text_2, read.instruction)


def embedding(body: Any) -> tuple[int, int]:
    texts = validate(body, EmbeddingRequest).input or []
    return sum(len(TOKENIZER.encode(text) if isinstance(text, str) else text) + 16 for text in texts), 0


def embed(body: Any) -> tuple[int, int]:
    texts = validate(body, EmbedBody).input
    return sum(len(TOKENIZER.encode(text)) + 16 for text in texts), 0


NUMBERS = [
    None, 0, 1, 2, 5, 16, 16.0, 5e1, 300, 3000.0, -1, -1.0, -2, 2.5, "16", True, False, 1 << 70, 1e300, [], {},
]  # fmt: skip
TEXTS = [
    "hi", "", "one two three", "x" * 60, ["hi"] * 3, ["a", "bb", [1, 2, 3]], [[1, 2]] * 4, [5, 6, 7], [5.0, 6.0], [],
    [[]], ["hi", ""] * 8, [""], None, 3, ["x" * 30], {"prompt_string": "a"}, [{"text": "abc"}] * 5,
]  # fmt: skip
MESSAGES = [
    [{"role": "user", "content": "hi"}],
    [{"role": role, "content": "x y " * 5} for role in ("system", "user", "assistant", "user")],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
]
LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens", "num_predict", "max_output_tokens")
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1] * 40}}}}
FIELDS: dict[str, list[Any]] = {
    **dict.fromkeys(("n", "best_of", "min_tokens", "min_new_tokens", "prompt_logprobs"), NUMBERS),
    **dict.fromkeys((*LENGTHS, "priority"), NUMBERS), "echo": [True, None], "stream": [True, False, None],
    "prompt_start_ids": [[1] * 40, [2], None], "endings": [["a"] * 9, ["b"]],
}  # fmt: skip

OPTIONS: dict[str, list[Any]] = {"num_predict": NUMBERS, "temperature": [0, 1.0], "seed": [1]}

# By route: how a node reads its body, the fields that it needs, and others that some bodies have.
NODES: dict[str, tuple[Callable[[Any], tuple[int, int]], dict[str, list[Any]], dict[str, list[Any]]]] = {
    "/v1/completions": (completion, {"prompt": TEXTS}, FIELDS),
    "/generate": (
        lambda body: completion(completion_fields(body)),
        {"text": TEXTS},
        {**FIELDS, "text": TEXTS, "input_ids": TEXTS, "prompt": TEXTS},
    ),
    "/v1/chat/completions": (
        lambda body: chat(validate(body, ChatCompletionRequest), must_fit=True),
        {"messages": MESSAGES},
        {**FIELDS, "tools": [[{"type": "function", "function": TOOL}], []]},
    ),
    "/v1/responses": (
        responses,
        {"input": [*MESSAGES, "hi"]},
        {**FIELDS, "tools": [[{"type": "function", **TOOL}]]},
    ),
    "/v1/messages": (
        lambda body: chat(of_messages(validate(body, MessagesRequest))),
        {"messages": MESSAGES, "max_tokens": NUMBERS},
        FIELDS,
    ),
    "/v1/rerank": (rerank, {"query": TEXTS[:4], "documents": [["hi"] * 9, *TEXTS]}, {"instruction": ["judge " * 20]}),
    "/v1/score": (score, {"text_1": TEXTS, "text_2": [["hi"] * 9, *TEXTS]}, {"instruction": ["judge " * 20]}),
    "/v1/embeddings": (embedding, {"input": TEXTS}, FIELDS),
    "/completion": (lambda body: native(validate(_fields(body), NativeRequest)), {"prompt": TEXTS}, FIELDS),
    "/infill": (
        infill,
        {"input_prefix": TEXTS[:4], "input_suffix": TEXTS[:4]},
        {
            **dict.fromkeys(LENGTHS[:3], NUMBERS),
            "prompt": TEXTS[:4],
            "input_extra": [[{"filename": "a", "text": "b " * 9}] * 4],
        },
    ),
    "/api/chat": (lambda body: chat(chat_of(validate(body, ChatBody))), {"messages": MESSAGES[:2]}, OPTIONS),
    "/api/generate": (ollama, {"prompt": TEXTS[:4]}, {**OPTIONS, "raw": [True], "context": [[1] * 40]}),
    "/api/embed": (embed, {"input": [*TEXTS[:4], ["hi"] * 9, []]}, {"truncate": [False], "dimensions": [8, 3.0]}),
}


def drawn(rng: Random, needed: dict[str, list[Any]], others: dict[str, list[Any]], inner: str) -> bytes:
    """A body. Some have a field twice, and some have fields in their inner object."""

    def some(most: int) -> list[tuple[str, Any]]:
        names = rng.sample(sorted(others), min(len(others), rng.randint(0, most)))
        # small numbers pass together more often than odd ones
        return [(name, rng.choice(others[name][:6] if rng.random() < 0.7 else others[name])) for name in names]

    fields = [("model", "m"), *((name, rng.choice(values)) for name, values in needed.items()), *some(4)]
    if rng.random() < 0.2:
        fields += some(2)
    shown = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields]
    if inner and rng.random() < 0.6:
        shown.append(f'"{inner}": {{' + ", ".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in some(4)) + "}")
    return ("{" + ", ".join(shown) + "}").encode()


@pytest.mark.parametrize("path", NODES)
def test_no_request_uses_more_than_is_reserved_for_it(path: str) -> None:
    read, needed, others = NODES[path]
    rng, served = Random(f"reserve {path}"), 0
    for _ in range(CASES):
        body = drawn(rng, needed, others, ROUTES[path].inner)
        left = rng.choice([math.inf, 5000, 900, 40])
        try:
            asked = Extent(path, body)
            most = asked.allot(Sizes(CONTEXT), lambda prompt, left=left: left - prompt)  # type: ignore[misc]
            if most.tokens > left:
                continue  # refused
            prompts, answers = read(msgspec.json.decode(asked.body()))
        except RequestError:
            continue
        served += 1
        assert prompts <= most.input, body
        assert answers <= most.output, body
    assert served > CASES // 20  # most odd bodies are refused, but not all


WORDS, TIMES = 70, 2001  # tokens: of a text, and of 0 s
HEARING = AudioSettings(
    seconds=30, start=1990, end=1991, no_timestamps=TIMES - 1, languages={"en": 1992, "de": 1993},
    tasks={"transcribe": 1994, "translate": 1995}, previous=1996,
)  # fmt: skip


@pytest.mark.parametrize("path", FORMS)
def test_no_audio_uses_more_than_is_reserved_for_it(path: str) -> None:
    """Whatever the node's decoder writes: texts of short steps are heard again and again."""
    rng, engine = Random(f"hear {path}"), ScriptedEngine(max_model_len=64)
    engine.info = msgspec.structs.replace(engine.info, audio=HEARING)
    app = App(engine)

    def answer(request: Request) -> list[int]:
        if len(request.prompt_ids) == 1:
            return [HEARING.languages["en"]]
        most = 64 - len(request.prompt_ids)
        step = TIMES + rng.choice([1, 9, 1000])
        return [TIMES, *[WORDS] * (most - 3), step, step] if rng.random() < 0.8 else [WORDS] * most

    engine._answer = answer
    for _ in range(24):
        rate, bits, channels = rng.choice([(8000, 8, 1), (16000, 16, 1), (44100, 16, 2)])
        sound = bytes(int(rng.choice([0.001, 0.5, 29.99, 30.01, 61]) * rate) * bits // 8 * channels)
        fields = {"model": "model"} | rng.choice([{}, {"language": "en"}, {"language": "de", "prompt": "a b " * 9}])
        fields["response_format"] = rng.choice(["json", "verbose_json"])
        data = wav(sound, bits, channels=channels, rate=rate)
        most = Extent(path, json.dumps(fields).encode(), data).allot(Sizes(64), lambda prompt: 1e9 - prompt)
        told = {"x-lmkit-prompt-tokens": str(most.input)}
        answered = app.request("POST", path, files={"file": ("a.wav", data)}, data=fields, headers=told)
        assert answered.status_code == 200, answered.text
        prompts, _, written = map(int, answered.headers["x-lmkit-usage"].split())
        assert prompts <= most.input
        assert written <= most.output


def test_each_forwarded_route_says_what_it_uses() -> None:
    stored = {"/v1/files", "/v1/batches", "/v1/conversations"}  # they cost nothing, or are refused to charged keys
    assert set(FORWARDED) - stored <= set(ROUTES)


def test_what_is_not_in_the_body_is_taken_at_its_maximum() -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    hidden = json.dumps(image).replace("image_url", "\\u0069mage_url").encode()
    sound = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
    pages = [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://a/b"}}]}]
    for path, body in (
        ("/v1/chat/completions", json.dumps(image).encode()),
        ("/v1/chat/completions", hidden),
        ("/v1/chat/completions", json.dumps({"messages": sound}).encode()),
        ("/v1/messages", json.dumps({"messages": pages}).encode()),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}'),
        ("/api/chat", b'{"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}'),
        ("/api/generate", b'{"prompt": "a", "images": ["AAAA"]}'),
        ("/v1/responses", b'{"input": "hi", "previous_response_id": "resp_1"}'),
        ("/v1/responses", b'{"input": "hi", "conversation": {"id": "conv_1"}}'),
        ("/v1/responses", b'{"input": [{"type": "item_reference", "id": "msg_1"}]}'),
    ):
        assert Extent(path, body).allot(Sizes(100_000), lambda prompt: math.inf).input == 100_000, body
    usual = Extent("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "what is an \\"image\\"?"}]}')
    assert usual.allot(Sizes(100_000), lambda prompt: math.inf).input < 400


def test_an_open_limit_is_set_for_keys_with_limits_alone() -> None:
    def body(path: str, left: float, context: int | None = 4096, **fields: Any) -> Any:
        asked = Extent(path, json.dumps({"model": "m", **fields}).encode())
        asked.allot(Sizes(context), lambda prompt: left)
        return msgspec.json.decode(asked.body())

    chats = "/v1/chat/completions"
    assert body(chats, math.inf) == {"model": "m"}
    assert body(chats, 20_000) == {"model": "m"}  # all of the context is reserved
    assert body(chats, 10_000)["max_tokens"] == 2500  # a quarter of what is left
    assert body(chats, 700)["max_tokens"] == 700
    assert body(chats, 700, n=2)["max_tokens"] == 350
    assert body(chats, 10_000, None)["max_tokens"] == 2500
    assert body(chats, 10_000, max_tokens=-1, n_predict=5) == {"model": "m", "max_tokens": 2500}
    assert body(chats, 10_000, n_predict=5.0) == {"model": "m", "max_tokens": 5}  # not every node knows the other name
    assert body("/v1/responses", 700)["max_output_tokens"] == 700
    assert body("/v1/completions", 700)["max_tokens"] == 16  # as the API has it
    inner = body("/generate", 700, text="a", sampling_params={"temperature": 0, "n": 2})
    assert inner["sampling_params"] == {"temperature": 0, "n": 2, "max_new_tokens": 16}


def test_a_node_refuses_what_grows_beyond_its_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that the normalizer makes 18 of, and a template that writes much more than its messages."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.normalizer = tokenizers.normalizers.NFKC()
    template = ChatTemplate("{{ 'word ' * 400 }}{{ messages[0].content }}")
    tokenizer = Tokenizer(backend, eos_token_ids=TOKENIZER.eos_token_ids, chat_template=template)
    monkeypatch.setattr(in_process, "TOKENIZER", tokenizer)
    app, context = App(ScriptedEngine(max_model_len=1 << 15)), 1 << 15
    (card,) = app.request("GET", "/v1/models").json()["data"]
    grown, chat = {"prompt": "\ufdfa" * 100}, {"messages": MESSAGES[0]}

    def asked(path: str, sizes: Sizes, **fields: Any) -> tuple[int, int, int]:
        """(the status, tokens of the prompt, those that are reserved)"""
        body = json.dumps({"model": "model", "max_tokens": 2, **fields}, ensure_ascii=False).encode()
        most = Extent(path, body).allot(sizes, lambda prompt: 1e9 - prompt).input
        kind = {"content-type": "application/json"}
        whole = app.request("POST", path, content=body, headers=kind).json()["usage"]["prompt_tokens"]
        answer = app.request("POST", path, content=body, headers=kind | {"x-lmkit-prompt-tokens": str(most)})
        assert answer.is_success or answer.json()["error"]["code"] == "context_length_exceeded"
        return answer.status_code, whole, most

    for path, fields in (("/v1/completions", grown), ("/v1/chat/completions", chat)):
        status, tokens, most = asked(path, Sizes(context), **fields)
        assert (status, tokens > most) == (400, True)
    status, tokens, most = asked("/v1/chat/completions", Sizes(context, card["template_tokens"]), **chat)
    assert (status, tokens <= most) == (200, True)
    assert asked("/v1/completions", Sizes(context), prompt="\u00bd a plain text")[0] == 200
