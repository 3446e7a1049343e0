"""Between the messages of gRPC and the JSON of POST /generate."""

from __future__ import annotations

from typing import Any

from lmkit.web.rpc.messages import Answer, Position, Token


def body_of(request: Any) -> dict[str, Any]:
    """A GenerateRequest as a body of /generate: the fields that are set."""
    body = _fields(request)
    if "input_ids" in body:
        body["input_ids"] = body["input_ids"].get("ids", [])
    return body


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: _plain(field, value) for field, value in message.ListFields()}


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): item for key, item in value.items()}
    if field.is_repeated:
        return list(value)
    return value if field.message_type is None else _fields(value)


def answer_of(data: dict[str, Any]) -> Any:
    """An answer of /generate, or a part of one, as an Answer."""
    about = data["meta_info"]
    finish = about["finish_reason"] or {}
    matched = finish.get("matched")
    return Answer(
        index=data["index"],
        id=about["id"],
        text=data["text"],
        output_ids=data["output_ids"],
        finish_reason=finish.get("type", ""),
        matched_stop=matched if isinstance(matched, str) else None,
        matched_token=matched if isinstance(matched, int) else None,
        prompt_tokens=about["prompt_tokens"],
        completion_tokens=about["completion_tokens"],
        cached_tokens=about["cached_tokens"],
        prompt_token_ids=data.get("prompt_token_ids", ()),
        output_logprobs=_positions(about, "output"),
        prompt_logprobs=_positions(about, "input"),
    )


def _positions(about: dict[str, Any], what: str) -> list[Any]:
    tokens = about.get(f"{what}_token_logprobs", ())
    tops = about.get(f"{what}_top_logprobs", [()] * len(tokens))
    return [Position(token=_token(token), top=map(_token, top)) for token, top in zip(tokens, tops, strict=True)]


def _token(entry: list[Any]) -> Any:
    logprob, token_id, text = entry
    return Token(id=token_id, text=text, logprob=logprob)
