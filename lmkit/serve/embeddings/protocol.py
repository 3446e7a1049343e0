"""The bodies of /v1/embeddings (OpenAI), /v1/rerank (Jina, Cohere), /v1/score and /classify (vLLM)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.serve.embeddings.encoding import DType, Endianness
from lmkit.serve.numbers import TokenId
from lmkit.serve.protocol import CutTo, GivenPrompts, GivenText, ModelName, Placed, prompts
from lmkit.strict import OF_MODEL, Schema, exactly_one, given, goes_with
from lmkit.text.chat.conversation import Messages, TemplateVariables

MAX_TEXTS = 2048  # as OpenAI
NOTHING = (None, False, "float32", "native", "little")  # values of fields that change nothing
Text = str | list[int] | list[int | str]  # a text, token ids, or token ids with texts between them
_Some = Field(min_length=1)
_TOKEN: Schema = {"type": "integer", "minimum": 0, OF_MODEL: "token"}
_MIXED: Schema = {
    "type": "array",
    "items": {"anyOf": [_TOKEN, {"type": "string", OF_MODEL: "text"}]},
    "contains": {"type": "integer"},
}
GivenInputs = (
    GivenPrompts
    | Annotated[list[TokenId | GivenText], _Some]
    | Annotated[list[GivenText | Annotated[list[int | str], WithJsonSchema(_MIXED)]], _Some]
)


def _inputs(value: Any) -> list[Text]:
    """As in completions, with llama.cpp's other forms: objects of texts, and texts between token ids."""
    return prompts(list(map(_text, value)) if isinstance(value, list) else _text(value), MAX_TEXTS, _are_tokens)


def _are_tokens(value: Any) -> bool:
    """Whether it is one text: token ids, with texts between them or not."""
    kinds = {type(part) for part in value} if isinstance(value, list) else {str}
    return kinds <= {int, str} and kinds != {str}


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


GivenTexts = GivenText | Annotated[list[GivenText], Field(min_length=1, max_length=MAX_TEXTS)]
Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=GivenTexts)]


SIDE = goes_with("truncation_side", given("truncate_prompt_tokens"))


class TextsRequest(Placed):
    """Fields of all routes that compute embeddings. None means the default."""

    absent = neutral.EMBEDDING

    model: ModelName | None = None  # None: the only one
    user: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log
    truncate_prompt_tokens: CutTo | None = None  # at the end of a text by default
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None  # default true


OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class InputRequest(TextsRequest):
    """Of texts, or of one conversation as the chat template writes it (vLLM's)."""

    conditions = (
        SIDE,
        exactly_one("input", "messages"),
        *(goes_with(name, given("messages"), (None, False)) for name in OF_MESSAGES),
    )

    input: Annotated[list[Text], BeforeValidator(_inputs, json_schema_input_type=GivenInputs)] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None  # of messages; default false
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.input is None) is (self.messages is None):
            raise RequestError("invalid_request", "send input, or messages", "input")
        if any(message.parts for message in self.messages or ()):
            raise RequestError("unsupported_parameter", "this route reads text; leave images out", "messages")
        if self.messages is None and (wrong := self._first_of(OF_MESSAGES)):
            raise RequestError("invalid_request", f"{wrong}: it goes with messages", wrong)
        return self

    def _first_of(self, names: tuple[str, ...]) -> str | None:
        """The first field of these that asks for something."""
        return next((name for name in names if getattr(self, name) not in NOTHING), None)


class ClassifyRequest(InputRequest):
    """vLLM's."""

    use_activation: bool | None = None  # default true; false: logits


OF_TEXTS = ("prompt_name", "input_type")
OF_BYTES = ("embed_dtype", "endianness")
SWITCHES = ("normalize", "use_activation")  # two names
_SIZE = WithJsonSchema({"type": "integer", "minimum": 1, OF_MODEL: "dimensions"})
_PROMPT = WithJsonSchema({"type": "string", "maxLength": 256, OF_MODEL: "prompt"})
_KIND = WithJsonSchema({"type": "string", "maxLength": 256, OF_MODEL: "kind"})
_BYTES = given("encoding_format", encoding_format={"enum": ["base64", "bytes", "bytes_only"]})


class EmbeddingRequest(InputRequest):
    aliases = {**InputRequest.aliases, "normalized": "normalize"}  # Jina's name
    conditions = (
        *InputRequest.conditions,
        *(goes_with(name, _BYTES, NOTHING) for name in OF_BYTES),
        *(goes_with(name, given("input")) for name in OF_TEXTS),
        {"not": {"allOf": [given(name) for name in OF_TEXTS]}},
        {"anyOf": [{"properties": {name: {"enum": [value, None]} for name in SWITCHES}} for value in (True, False)]},
    )

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None  # the last two are vLLM's
    embed_dtype: DType | None = None  # of bytes; default float32
    endianness: Endianness | None = None  # of bytes; default little
    dimensions: Annotated[int, Field(ge=1), _SIZE] | None = None  # the first so many, normalized again
    prompt_name: Annotated[str, Field(max_length=256), _PROMPT] | None = None  # sentence-transformers' and TEI's
    input_type: Annotated[str, Field(max_length=256), _KIND] | None = None  # of Cohere, Voyage and NVIDIA: query ...
    normalize: bool | None = None  # vLLM's; default true
    use_activation: bool | None = None  # vLLM's newer name for it

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.prompt_name is not None and self.input_type is not None:
            raise RequestError("invalid_request", "send prompt_name or input_type, not both", "input_type")
        if self.messages is not None and (wrong := self._first_of(OF_TEXTS)):
            raise RequestError("invalid_request", f"{wrong}: it goes with input", wrong)
        if self.encoding_format in (None, "float") and (wrong := self._first_of(OF_BYTES)):
            raise RequestError(
                "invalid_request", f"{wrong}: it goes with encoding_format base64, bytes, bytes_only", wrong
            )
        return self

    @property
    def is_normalized(self) -> bool:
        """Raises RequestError if the two names differ."""
        given = {self.normalize, self.use_activation} - {None}
        if len(given) > 1:
            raise RequestError("invalid_request", "normalize and use_activation differ; send one", "use_activation")
        return False not in given


_INSTRUCTION = WithJsonSchema({"type": "string", "maxLength": 4096, OF_MODEL: "instruction"})


class PairsRequest(TextsRequest):
    """Of the routes that score pairs of texts."""

    instruction: Annotated[str, Field(max_length=4096), _INSTRUCTION] | None = None  # what a reranker is to judge by


class RerankRequest(PairsRequest):
    """Jina's and Cohere's with `documents`; TEI's and llama.cpp's with `texts`, whose answer is a bare list."""

    absent = {**TextsRequest.absent, "raw_scores": (None, False), "truncate": (None, False)}
    conditions = (
        SIDE,
        exactly_one("documents", "texts"),
        goes_with("return_documents", given("documents")),
        goes_with("return_text", given("texts")),
    )

    query: GivenText
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


class ScoreRequest(PairsRequest):
    """One text against each of the second ones, or as many pairs as there are texts."""

    conditions = (
        SIDE,
        *({"anyOf": [{"required": [name], "properties": dict.fromkeys({ours, *others} - {name}, False)}
                     for name in (ours, *others)]}
          for ours, others in PAIRS.items()),
    )  # fmt: skip

    text_1: Texts
    text_2: Texts

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Schema:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        schema["properties"] |= {
            other: schema["properties"][name] for name, others in PAIRS.items() for other in others
        }
        schema["required"] = [name for name in schema["required"] if name not in PAIRS]
        return schema

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
