"""The bodies of /v1/embeddings (OpenAI), /v1/rerank (Jina, Cohere) and /v1/score (vLLM)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.serve.protocol import CutTo, GivenPrompts, ModelName, Placed, prompts

MAX_TEXTS = 2048  # as OpenAI


def _inputs(value: Any) -> list[str | list[int]]:
    """As in completions, where llama.cpp's objects of texts may stand for texts."""
    return prompts(list(map(_text, value)) if isinstance(value, list) else _text(value), MAX_TEXTS)


def _text(item: Any) -> Any:
    """{"prompt_string": text} or {"content": [{"type": "text", "text": text}, ...]} -> text; others as they are."""
    match item:
        case {"prompt_string": str(text)} if len(item) == 1:
            return text
        case {"content": [*parts]} if len(item) == 1 and all(map(_is_text, parts)):
            return "".join(part["text"] for part in parts)
        case _:
            return item


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _texts(value: Any) -> Any:
    """A text, a list of texts, or of objects {"text": ...} -> texts."""
    items = value if isinstance(value, list) else [value]
    texts = [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in items]
    if not (texts and len(texts) <= MAX_TEXTS and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"expected 1 to {MAX_TEXTS} texts")
    return texts


GivenTexts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=GivenTexts)]


class TextsRequest(Placed):
    """Fields of all routes that compute embeddings. None means the default."""

    absent = neutral.EMBEDDING

    model: ModelName | None = None  # None: the only one
    user: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log
    truncate_prompt_tokens: CutTo | None = None  # at the end of a text by default
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None  # default true


class EmbeddingRequest(TextsRequest):
    input: Annotated[list[str | list[int]], BeforeValidator(_inputs, json_schema_input_type=GivenPrompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None  # the first so many, normalized again
    normalize: bool | None = None  # vLLM's; default true
    use_activation: bool | None = None  # vLLM's newer name for it

    @property
    def is_normalized(self) -> bool:
        """Raises RequestError if the two names differ."""
        given = {self.normalize, self.use_activation} - {None}
        if len(given) > 1:
            raise RequestError("invalid_request", "normalize and use_activation differ; send one", "use_activation")
        return False not in given


class RerankRequest(TextsRequest):
    """Jina's and Cohere's with `documents`; TEI's and llama.cpp's with `texts`, whose answer is a bare list."""

    absent = {**TextsRequest.absent, "raw_scores": (None, False), "truncate": (None, False)}

    query: str
    documents: Texts | None = None
    texts: Texts | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0 = all
    return_documents: bool | None = None  # default true
    return_text: bool | None = None  # with texts; default false

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if (self.documents is None) is (self.texts is None):
            raise RequestError("invalid_request", "send documents, or texts for TEI's answer", "documents")
        other = ("return_documents", "documents") if self.documents is None else ("return_text", "texts")
        if getattr(self, other[0]) is not None:
            raise RequestError("invalid_request", f"{other[0]}: it goes with {other[1]}", other[0])
        return self


PAIRS = {"text_1": ("queries", "data_1"), "text_2": ("documents", "items", "data_2")}  # vLLM's other names


class ScoreRequest(TextsRequest):
    """One text against each of the second ones, or as many pairs as there are texts."""

    text_1: Texts
    text_2: Texts

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ours = {name: name for name in PAIRS} | {other: name for name, others in PAIRS.items() for other in others}
        given = [ours[name] for name in data if name in ours]
        if twice := {name for name in given if given.count(name) > 1}:
            name = min(twice)
            raise RequestError("invalid_request", f"{name} is given twice; {', '.join(PAIRS[name])} mean it, too", name)
        return {ours.get(name, name): value for name, value in data.items()}
