"""llama.cpp's own routes, which editors' plugins call: POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from starlette.responses import JSONResponse

from lmkit import __version__
from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.chat import shown_logprob
from lmkit.serve.choose import choose, pool
from lmkit.serve.collect import Collected
from lmkit.serve.completions import CompletionResponse
from lmkit.serve.fill_in import filled_in
from lmkit.serve.numbers import TOKEN_ID
from lmkit.serve.protocol import CompletionRequest, GivenPrompts, prompts
from lmkit.serve.response import respond, timings
from lmkit.serve.streaming import event
from lmkit.serve.to_request import NO_LIMIT
from lmkit.strict import OF_MODEL, Nullable, Schema
from lmkit.text.tokenizer import Tokenizer
from lmkit.turbo import request as engine
from lmkit.turbo.request import MAX_LOGIT_BIAS
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs

MAX_FILES = 256
MAX_BIASED = 256  # characters of a text whose tokens have a bias
BAN = -100.0
SPEED = ("n_indent", "samplers", "t_max_predict_ms", "t_max_prompt_ms")  # wishes of editors for a quick answer

router = APIRouter()
B = TypeVar("B", bound=CompletionRequest)


class Chunk(Nullable):
    """A part of another file."""

    filename: Annotated[str, Field(max_length=4096)] = ""
    text: str = ""


def _is_one(value: Any) -> bool:
    """Whether a list is one prompt: token ids, perhaps with texts between them."""
    is_known = isinstance(value, list) and all(isinstance(item, str) or type(item) is int for item in value)
    return is_known and (not value or not all(isinstance(item, str) for item in value))


def _token_biases(value: Any) -> dict[int | str, float]:
    """An object or a list of pairs. A key that is no number is a text: each of its tokens has the bias."""
    if isinstance(value, dict):
        value = [[int(key) if re.fullmatch(TOKEN_ID, key) else key, bias] for key, bias in value.items()]
    if not isinstance(value, list) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"expected an object, or a list of pairs, of at most {MAX_LOGIT_BIAS} tokens")
    found: dict[int | str, float] = {}
    for pair in value:
        token, bias = pair if isinstance(pair, list) and len(pair) == 2 else (-1, None)
        bias = BAN if bias is False else bias
        is_token = len(token) <= MAX_BIASED if isinstance(token, str) else type(token) is int and token >= 0
        if not is_token or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("expected token ids or short texts, each with a number or false")
        found[token] = float(bias)
    return found


_BIAS: Schema = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_BIASES: Schema = {"type": "array", "maxItems": MAX_LOGIT_BIAS, "items": {
    "type": "array", "minItems": 2, "maxItems": 2,
    "prefixItems": [{"type": "integer", "minimum": 0, OF_MODEL: "token"}, _BIAS],
}}  # fmt: skip
Biases = Annotated[dict[int | str, float], PlainValidator(_token_biases), WithJsonSchema(_BIASES)]


class NativeRequest(CompletionRequest):
    """The body of POST /completion."""

    prompt: Annotated[  # type: ignore[assignment]
        list[str | list[int | str]],
        BeforeValidator(partial(prompts, are_tokens=_is_one), json_schema_input_type=GivenPrompts),
    ]
    logit_bias: Biases | None = None  # type: ignore[assignment]
    n_probs: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # log-probabilities of so many tokens
    return_tokens: bool | None = None  # a whole answer has the ids of its tokens; parts of a stream have them anyway
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None  # of the answer; "a/b" is b of a


class InfillRequest(NativeRequest):
    """The body of POST /infill: what stands between two texts. `prompt` is how it begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Field(max_length=MAX_FILES)] | None = None  # of other files

    @property
    def num_chars(self) -> int:
        others = sum(len(chunk.filename) + len(chunk.text) for chunk in self.input_extra or ())
        return len(self.input_prefix) + len(self.input_suffix) + others


def with_ids(body: B, tokenizer: Tokenizer) -> B:
    """`body` without texts between the token ids of a prompt, and without biases of texts."""

    def ids(one: list[int | str]) -> list[int]:
        found: list[int] = []
        for place, item in enumerate(one):
            found += tokenizer.encode(item, not place) if isinstance(item, str) else [item]
        return found

    biases: dict[int | str, float] = {}
    for token, bias in (body.logit_bias or {}).items():
        biases |= dict.fromkeys(tokenizer.encode(token, False) if isinstance(token, str) else [token], bias)
    prompt = [one if isinstance(one, str) else ids(list(one)) for one in body.prompt]
    return body.model_copy(update={"prompt": prompt, "logit_bias": biases or None})


def _prompt(value: Any) -> Any:
    """Prompts without llama.cpp's objects around texts. Raises RequestError for one with images."""
    return list(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> Any:
    if not isinstance(value, dict) or "prompt_string" not in value:
        return value
    if value.get("multimodal_data"):
        message = "prompt: multimodal_data is not supported here; send images in a chat"
        raise RequestError("unsupported_parameter", message, "prompt")
    return value["prompt_string"]


def _fields(data: Any) -> Any:
    """A body with what llama.cpp takes for granted: a prompt is answered until it ends."""
    if not isinstance(data, dict):
        return data
    data = {name: value for name, value in data.items() if name not in SPEED or not ignore(name)}
    if not any(data.get(name) is not None for name in ("max_tokens", "max_completion_tokens", "n_predict")):
        data["n_predict"] = NO_LIMIT
    if "prompt" in data:
        data["prompt"] = _prompt(data["prompt"])
    if data.get("n_probs"):
        data.setdefault("logprobs", data["n_probs"])
    return data


def _infill_fields(data: Any) -> Any:
    data = _fields(data)
    if isinstance(data, dict):
        data = {"input_prefix": "", "input_suffix": "", "prompt": "", **data}
        if not isinstance(data["prompt"], str):
            raise RequestError("invalid_request", "prompt: expected a text, with which the answer begins", "prompt")
    return data


@router.post("/completion")
async def completion(request: Request) -> Response:
    """llama.cpp's: an answer to a prompt as it is."""
    return await respond(request, NativeRequest, NativeAnswer, _fields)


@router.post("/infill")
async def infill(request: Request) -> Response:
    """llama.cpp's: what stands between a text before and a text after."""
    return await respond(request, InfillRequest, InfillAnswer, _infill_fields)


class NativeAnswer(CompletionResponse):
    prefix = "native-"
    must_fit = False

    @property
    def only_tokens(self) -> bool:
        return super().only_tokens and not self.body.logit_bias

    @property
    def num_chars(self) -> int:
        pieces: list[Any] = [item for one in self.body.prompt if not isinstance(one, str) for item in one]
        pieces += self.body.logit_bias or ()
        return super().num_chars + sum(len(piece) for piece in pieces if isinstance(piece, str))

    def make_requests(self) -> list[engine.Request]:
        """The prompts and biases as tokens."""
        self.body = with_ids(self.body, self.server.tokenizer)
        return super().make_requests()

    async def whole(self) -> Any:
        """One answer, or a list of them for several prompts or choices."""
        chosen = await self.chosen()
        answers = [self._whole(idx, choice) for idx, choice in enumerate(chosen)]
        return answers[0] if len(answers) == 1 else iter(answers)

    def _whole(self, idx: int, choice: Collected) -> dict[str, Any]:
        ids = choice.token_ids.tolist() if self._asked.return_tokens else []
        end = self._end(idx, choice.last, has_line="\n" in choice.text)
        return self._chosen_fields(idx, self._part(idx, choice.text, ids, choice.answer_logprobs()) | end)

    @property
    def _asked(self) -> NativeRequest:
        assert isinstance(self.body, NativeRequest)
        return self.body

    def _chosen_fields(self, idx: int, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that the request names, and all of them if it names none."""
        names = self._asked.response_fields
        if not names:
            return answer
        if "prompt" in names:
            answer["prompt"] = self.server.tokenizer.decode(self.requests[idx].prompt_ids, skip_special_tokens=False)
        return {name: found for name in names if (found := _found(answer, name.split("/"))) is not None}

    async def chunks(self) -> AsyncGenerator[str]:
        """Events with the new text. The last of a choice has its numbers; nothing follows it."""
        lines: set[int] = set()  # choices with more than one line
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                lines |= {idx} if "\n" in output.text else set()
                for report in self.progress(output):
                    shown = self._part(idx, "", [], ()) | {"prompt_progress": msgspec.to_builtins(report)}
                    yield event(msgspec.json.encode(shown).decode())
                if output.token_ids:
                    part = self._part(idx, output.text, output.token_ids, output.logprobs) | _counts(output)
                    yield event(msgspec.json.encode(part).decode())
                if output.finish_reason is not None:
                    end = self._part(idx, "" if output.token_ids else output.text, [], ())
                    end = self._chosen_fields(idx, end | self._end(idx, output, has_line=idx in lines))
                    yield event(msgspec.json.encode(end | {"stop": True}).decode())

    def _part(self, idx: int, text: str, ids: list[int], logprobs: Iterable[TextLogprobs]) -> dict[str, Any]:
        part: dict[str, Any] = {"index": idx, "content": text, "tokens": ids, "stop": False, "id_slot": -1}
        if self.body.logprobs is not None:
            part["completion_probabilities"] = [self._shown_token(entry) for entry in logprobs]
        return part

    def _shown_token(self, entry: TextLogprobs) -> dict[str, Any]:
        top = self.num_top(self.body.logprobs)
        shown: dict[str, Any] = msgspec.to_builtins(shown_logprob(entry, top))
        tokens = [entry.token, *entry.top[:top]]
        for token, about in zip(tokens, [shown, *shown["top_logprobs"]], strict=True):
            about["id"] = token.token_id
        return shown

    def _end(self, idx: int, output: RequestOutput, *, has_line: bool) -> dict[str, Any]:
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        kind = "word" if word else "limit" if output.finish_reason == "length" else "eos"
        params = self.requests[idx].params
        biases: dict[int, float | None] = dict(params.logit_bias)
        biases |= dict.fromkeys(self.server.tokenizer.eos_token_ids if params.ignore_eos else ())
        settings = {
            "n_predict": params.max_tokens or NO_LIMIT,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": params.ignore_eos,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
            "stop": list(params.stop),
        }
        return {
            "stop": True,
            "model": self.server.model_name,
            **_counts(output),
            "tokens_cached": output.num_prompt_tokens + output.num_output_tokens,
            "generation_settings": settings,
            "has_new_line": has_line,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "timings": msgspec.to_builtins(timings(output)),
        }


def _found(answer: Any, path: list[str]) -> Any:
    """The value at a path of names; None if there is none."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


def _counts(output: RequestOutput) -> dict[str, int]:
    return {"tokens_predicted": output.num_output_tokens, "tokens_evaluated": output.num_prompt_tokens}


class InfillAnswer(NativeAnswer):
    @property
    def only_tokens(self) -> bool:
        return False

    @property
    def num_chars(self) -> int:
        assert isinstance(self.body, InfillRequest)
        return super().num_chars + self.body.num_chars

    def make_requests(self) -> list[engine.Request]:
        asked, self.body = self.body, self._prompted(self.body)
        try:
            return super().make_requests()
        finally:
            self.body = asked

    def _prompted(self, body: CompletionRequest) -> CompletionRequest:
        assert isinstance(body, InfillRequest)
        (begun,) = body.prompt
        assert isinstance(begun, str)
        others = [(chunk.filename, chunk.text) for chunk in body.input_extra or ()]
        plain = body.model_copy(update={"prompt": [body.input_prefix]})
        return filled_in(
            plain,
            body.input_suffix,
            self.server.tokenizer,
            self.server.info,
            "input_suffix",
            others=others,
            begun=begun,
        )


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Response:
    """llama.cpp's: what the server and its model are. It cannot be changed."""
    server = await choose(request, model)
    info, tokenizer, template = server.info, server.tokenizer, server.tokenizer.chat_template
    sampling = info.sampling.sampling()
    return JSONResponse({
        "default_generation_settings": {"n_ctx": info.max_model_len, "params": sampling},
        "total_slots": server.engine.max_batch_size,
        "model_alias": server.model_name,
        "model_path": server.model_name,
        "modalities": {"vision": not isinstance(info.images, str), "audio": not isinstance(info.audio, str)},
        "chat_template": "" if template is None else template.source,
        "bos_token": tokenizer.named_tokens.get("bos_token", ""),
        "eos_token": tokenizer.named_tokens.get("eos_token", ""),
        "build_info": f"lmkit-{__version__}",
    })  # fmt: skip


@router.get("/slots")
async def slots(request: Request, model: str | None = None) -> Response:
    """llama.cpp's: the places of the batch. Which request has which place is not told."""
    models = pool(request)
    server = models.find(model).serving
    engine = server.engine
    running = engine.stats().num_running
    context = engine.info.max_model_len if engine.info else 0
    return JSONResponse([
        {"id": i, "n_ctx": context, "is_processing": i < running} for i in range(engine.max_batch_size)
    ])  # fmt: skip
