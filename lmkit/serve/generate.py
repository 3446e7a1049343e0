"""POST /generate: text or token ids in, text and token ids out.

The fields are those of /v1/completions, and SGLang's and LMDeploy's names for them. The answer has their form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.collect import Collected
from lmkit.serve.completions import CompletionResponse
from lmkit.serve.protocol import CompletionRequest
from lmkit.serve.response import clamped, respond, timings
from lmkit.serve.streaming import DONE, event, json_parts
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs, TokenText

# SGLang's and LMDeploy's names, and ours in /v1/completions.
NAMES = {
    "text": "prompt",
    "input_ids": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "return_prompt_token_ids": "return_token_ids",
}
LOGPROBS = ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob")  # SGLang's
HERE = ("sampling_params", "return_text_in_logprobs", *LOGPROBS)  # not fields of /v1/completions
ELSEWHERE = {  # fields of /v1/completions that this route has no place for
    "stream_options": "each event has the numbers of tokens",
    "return_tokens_as_token_ids": "logprobs here have the ids of tokens",
    "return_progress": "/v1/completions and chat have it",
}

router = APIRouter()


@router.post("/generate")
async def generate(request: Request) -> Response:
    return await respond(request, CompletionRequest, GenerateResponse, completion_fields)


def completion_fields(data: Any) -> Any:
    """A body of this route as one of /v1/completions. Raises RequestError."""
    if not isinstance(data, dict):
        return data
    inner = data.get("sampling_params")
    inner = {} if inner is None else inner
    if not isinstance(inner, dict):
        raise _invalid("sampling_params: expected one object, for all prompts of the body", "sampling_params")
    fields: dict[str, Any] = {}
    if str in _kinds(data.get("input_ids")):
        raise _invalid("input_ids: expected token ids", "input_ids")
    if _kinds(data.get("text")) - {str, type(None)}:
        raise _invalid("text: expected a text, or a list of texts", "text")
    if isinstance(data.get("text"), str | list) and isinstance(data.get("input_ids"), list):
        data = {("prompt_start_ids" if name == "input_ids" else name): value for name, value in data.items()}
    for name, value in (*data.items(), *inner.items()):
        if name in HERE or value is None:
            continue
        ours = NAMES.get(str(name), str(name))
        if ours in fields:
            raise _invalid(f"{name}: {ours} is given twice; send one of them", name)
        fields[ours] = value
    for name, why in ELSEWHERE.items():
        if fields.get(name, False) is not False:
            raise _invalid(f"{name}: leave it out; {why}", name)
    if "prompt" not in fields:
        raise _invalid("send text or input_ids", "text")
    return fields | _logprobs(data, fields)


def _kinds(value: Any) -> set[type]:
    """The types of a list's items, or of another value."""
    return set(map(type, value)) if isinstance(value, list) else {type(value)}


def _logprobs(data: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Our fields for SGLang's: log-probabilities of the answer's tokens, and of the prompt's after a start."""
    asked, num_top, start, ids = (data.get(name) for name in LOGPROBS)
    start = -1 if start is None else start
    if not (asked in (None, True, False) and type(num_top) in (type(None), int) and type(start) is int and start >= -1):
        raise _invalid("expected return_logprob: true, top_logprobs_num: 5, logprob_start_len: 0, 1 ...", LOGPROBS[0])
    if asked is False:  # SGLang's clients then send the others all the same
        return {}
    if not asked and (num_top or start >= 0 or ids):
        needs = "top_logprobs_num, logprob_start_len and token_ids_logprob need return_logprob: true"
        raise _invalid(needs, LOGPROBS[0])
    if ids and (num_top or start >= 0):
        raise _invalid("send token_ids_logprob, or top_logprobs_num and logprob_start_len", "token_ids_logprob")
    if asked and fields.keys() & {"logprobs", "prompt_logprobs"}:
        raise _invalid("send either return_logprob, or logprobs and prompt_logprobs", LOGPROBS[0])
    names = ["logprobs"] * bool(asked) + ["prompt_logprobs"] * (start >= 0)
    others = ({"logprob_start_len": start} if start > 0 else {}) | ({"logprob_token_ids": ids} if ids else {})
    return dict.fromkeys(names, num_top or 0) | others


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)


class GenerateResponse(CompletionResponse):
    prefix = "gen-"

    async def whole(self) -> Any:
        """One answer, or a list of them for several prompts or choices."""
        chosen = await self.chosen()
        answers = map(self._whole_answer, range(len(chosen)), chosen)
        return next(answers) if len(chosen) == 1 else answers

    async def chunks(self) -> AsyncGenerator[str]:
        """Events with the new text and the new token ids of one choice each."""
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                if output.token_ids or output.text or output.finish_reason is not None:
                    part = self._answer(idx, idx, output, output.text, output.token_ids, output.logprobs.__iter__)
                    yield event("".join(json_parts(part)))
        yield DONE

    def _whole_answer(self, index: int, choice: Collected) -> dict[str, Any]:
        first = index // (self.body.n or 1) * self.choices_per_prompt  # the first request with this prompt
        answer = self._answer(index, first, choice.last, choice.text, choice.token_ids, choice.answer_logprobs)
        if (num_top := self.body.prompt_logprobs) is not None:
            answer["meta_info"] |= _lists("input", num_top, choice.prompt_logprobs)
        return answer

    def _answer(
        self,
        index: int,
        request_idx: int,
        output: RequestOutput,
        text: str,
        ids: Sequence[int],
        logprobs: Callable[[], Iterator[TextLogprobs]],
    ) -> dict[str, Any]:
        """A whole answer, or a part. `output` is its last step."""
        about: dict[str, Any] = {
            "id": self.requests[request_idx].request_id,
            "finish_reason": _finish(output),
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": output.num_output_tokens,
            "cached_tokens": output.num_cached_tokens,
            "steps": output.num_steps,
        }
        if self.body.timings_per_token:
            about["timings"] = timings(output)
        if self.body.logprobs is not None:
            about |= _lists("output", self.body.logprobs, logprobs, self.body.logprob_token_ids or ())
        prompt = self.prompt_ids(request_idx)
        shown = {} if prompt is None else {"prompt_token_ids": iter(prompt)}
        return {"index": index, "text": text, "output_ids": iter(ids), **shown, "meta_info": about}


def _finish(output: RequestOutput) -> dict[str, Any] | None:
    """Why it ended; None while it goes on."""
    match output.finish_reason:
        case None:
            return None
        case "stop" | "length" as reason if output.end is not None:
            return {"type": reason, "matched": output.end}
        case reason:
            return {"type": reason}


def _lists(
    what: str, num_top: int, positions: Callable[[], Iterator[TextLogprobs]], shown: Sequence[int] = ()
) -> dict[str, Any]:
    """SGLang's lists for the tokens of the `input` or the `output`. An entry is [log-probability, token id, text].

    `shown`: the token ids that were asked for, in the place of the most likely ones.
    """
    lists: dict[str, Any] = {f"{what}_token_logprobs": (_entry(position.token) for position in positions())}
    if shown:
        lists[f"{what}_token_ids_logprobs"] = (_of_ids(position, shown) for position in positions())
    elif num_top:
        lists[f"{what}_top_logprobs"] = (list(map(_entry, position.top[:num_top])) for position in positions())
    return lists


def _of_ids(position: TextLogprobs, ids: Sequence[int]) -> list[list[Any]]:
    found = {token.token_id: token for token in position.top}
    return [_entry(found[token_id]) for token_id in ids]


def _entry(token: TokenText) -> list[Any]:
    return [clamped(token.logprob), token.token_id, token.text]
