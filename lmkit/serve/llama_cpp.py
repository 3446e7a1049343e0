"""llama.cpp's own routes, which editors' plugins call: POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from lmkit import __version__
from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.chat import shown_logprob
from lmkit.serve.choose import choose, pool
from lmkit.serve.completions import CompletionResponse
from lmkit.serve.fill_in import filled_in
from lmkit.serve.protocol import CompletionRequest
from lmkit.serve.response import respond, timings
from lmkit.serve.streaming import event
from lmkit.serve.to_request import NO_LIMIT
from lmkit.strict import Nullable
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs

MAX_FILES = 256
SPEED = ("n_indent", "samplers", "t_max_predict_ms", "t_max_prompt_ms")  # wishes of editors for a quick answer

router = APIRouter()


class Chunk(Nullable):
    """A part of another file."""

    filename: Annotated[str, Field(max_length=4096)] = ""
    text: str = ""


class NativeRequest(CompletionRequest):
    """The body of POST /completion."""

    n_probs: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # log-probabilities of so many tokens


class InfillRequest(NativeRequest):
    """The body of POST /infill: what stands between two texts. `prompt` is how it begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Field(max_length=MAX_FILES)] | None = None  # of other files

    @property
    def num_chars(self) -> int:
        others = sum(len(chunk.filename) + len(chunk.text) for chunk in self.input_extra or ())
        return len(self.input_prefix) + len(self.input_suffix) + others


def _fields(data: Any) -> Any:
    """A body with what llama.cpp takes for granted: a prompt is answered until it ends."""
    if not isinstance(data, dict):
        return data
    data = {name: value for name, value in data.items() if name not in SPEED or not ignore(name)}
    if not any(data.get(name) is not None for name in ("max_tokens", "max_completion_tokens", "n_predict")):
        data["n_predict"] = NO_LIMIT
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

    async def whole(self) -> Any:
        """One answer, or a list of them for several prompts or choices."""
        chosen = await self.chosen()
        answers = [
            self._part(idx, choice.text, choice.token_ids.tolist(), choice.answer_logprobs())
            | self._end(idx, choice.last)
            for idx, choice in enumerate(chosen)
        ]
        return answers[0] if len(answers) == 1 else iter(answers)

    async def chunks(self) -> AsyncGenerator[str]:
        """Events with the new text. The last of a choice has its numbers; nothing follows it."""
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                for report in self.progress(output):
                    shown = self._part(idx, "", [], ()) | {"prompt_progress": msgspec.to_builtins(report)}
                    yield event(msgspec.json.encode(shown).decode())
                if output.token_ids:
                    part = self._part(idx, output.text, output.token_ids, output.logprobs) | _counts(output)
                    yield event(msgspec.json.encode(part).decode())
                if output.finish_reason is not None:
                    end = self._part(idx, "" if output.token_ids else output.text, [], ()) | self._end(idx, output)
                    yield event(msgspec.json.encode(end).decode())

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

    def _end(self, idx: int, output: RequestOutput) -> dict[str, Any]:
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        kind = "word" if word else "limit" if output.finish_reason == "length" else "eos"
        params = self.requests[idx].params
        settings = {
            "n_predict": params.max_tokens or NO_LIMIT,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "stop": list(params.stop),
        }
        return {
            "stop": True,
            "model": self.server.model_name,
            **_counts(output),
            "tokens_cached": output.num_prompt_tokens + output.num_output_tokens,
            "generation_settings": settings,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "timings": msgspec.to_builtins(timings(output)),
        }


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
        "modalities": {"vision": not isinstance(info.images, str), "audio": False},
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
