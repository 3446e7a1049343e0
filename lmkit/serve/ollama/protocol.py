"""The part of Ollama's API that this server supports. What it lacks is refused by name, or a hint (`lmkit.hints`).

The model's context, its place in memory and the time that it stays there are the server's own: fields about them are
hints. Only `keep_alive: 0` is an order, where the client may give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.embeddings.protocol import MAX_TEXTS
from lmkit.serve.numbers import Penalty, Repetition, Share, Temperature, TokenId, TopK, TopP
from lmkit.serve.protocol import ChatExtensions, NumTop, Placed
from lmkit.strict import LAZY, Nullable
from lmkit.text.chat.conversation import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, CalledName, Tool
from lmkit.turbo.request import MAX_STOPS

MAX_IMAGES = 256
# Options about the machine: how a model is loaded, and by how many threads it runs.
_MACHINE = """
draft_num_predict embedding_only f16_kv kv_cache_type logits_all low_vram main_gpu num_batch num_ctx num_gpu num_gqa
num_keep num_thread numa rope_frequency_base rope_frequency_scale shift use_mlock use_mmap vocab_only
"""
MACHINE = frozenset(_MACHINE.split())
AT_ONCE = (0, "0", "0s", "0m", "0h", "0ms")  # values of `keep_alive`
Text = Annotated[str, Field(max_length=1 << 26)]
Images = Annotated[list[Text], Field(max_length=MAX_IMAGES)]  # base64


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _unlimited(value: Any) -> Any:
    """Ollama's two numbers for no limit: -1, and -2 for what fills the context."""
    return -1 if value == -2 else value


NumPredict = Annotated[int, Field(ge=-1, lt=1 << 31), BeforeValidator(_unlimited)]  # tokens of an answer


class Options(Nullable):
    """Of one answer. None means the default."""

    absent = {
        name: neutral.GENERATION[name] for name in ("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p")
    } | dict.fromkeys(("penalize_newline", "penalize_nl"), (None, True, False))  # penalties look at all tokens

    num_predict: NumPredict | None = None
    temperature: Temperature | None = None
    top_k: Annotated[TopK, BeforeValidator(lambda value: value or -1)] | None = None  # 0 is off
    top_p: TopP | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: (
        Annotated[
            list[str], Field(max_length=MAX_STOPS), BeforeValidator(_stops, json_schema_input_type=str | list[str])
        ]
        | None
    ) = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_machine(cls, data: Any) -> Any:
        """Without what only the server decides. Raises ValueError where every field counts."""
        if not isinstance(data, dict):
            return data
        for name in data.keys() & MACHINE:
            if not ignore(f"options.{name}"):
                raise ValueError(f"{name}: the server's own options decide it")
        return {name: value for name, value in data.items() if name not in MACHINE}

    @model_validator(mode="after")
    def _penalties_see_all(self) -> Options:
        """repeat_last_n counts only with a penalty, and lmkit's penalties look at the whole answer."""
        has_penalty = self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty
        if self.repeat_last_n not in (None, -1) and has_penalty and not ignore("options.repeat_last_n"):
            raise ValueError("repeat_last_n: penalties look at all tokens; leave it out")
        return self


def _stays(value: Any) -> int | None:
    """`keep_alive`: 0 if the model is to leave memory, else None: the server's --keep-alive says how long one stays.

    Raises ValueError.
    """
    if value is None:
        return None
    if value in AT_ONCE and not isinstance(value, bool):
        return 0
    if not ignore("keep_alive"):
        raise ValueError("--keep-alive of the server decides it; leave it out")
    return None


KeepAlive = Annotated[Literal[0] | None, BeforeValidator(_stays, json_schema_input_type=str | float | None)]


class _Body(ChatExtensions):
    """Fields of both routes that generate."""

    model_config = LAZY
    # a conversation that is too long is refused, and an answer ends where the context does
    absent = {**neutral.GENERATION, **dict.fromkeys(("truncate", "shift"), (None, True, False))}
    aliases = {**ChatExtensions.aliases, "name": "model"}

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None  # default true
    options: Options | None = None
    num_predict: NumPredict | None = None  # Open WebUI writes it here, too; the smaller one counts
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["none", "minimal", "low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None


class CalledFunction(Nullable):
    name: CalledName
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class ToolCall(Nullable):
    id: Annotated[str, Field(max_length=256)] | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Nullable):
    absent = {**neutral.MESSAGE, "images": (None, []), "done_reason": (None,)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None  # of a result
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None


def _functions(tools: Any) -> Any:
    """Tools whose kind is not told are functions."""
    if not isinstance(tools, list):
        return tools
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools")
    return [{"type": "function", **tool} if isinstance(tool, dict) else tool for tool in tools]


class ChatBody(_Body):
    """The body of POST /api/chat. Without messages it asks only that the model be loaded."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] = []
    tools: Annotated[list[Tool], BeforeValidator(_functions)] | None = None


def _no_template(value: Any) -> None:
    if value not in (None, ""):
        rule = "a template in Go is not supported; --chat-template of the server takes one in Jinja"
        raise RequestError("unsupported_parameter", f"template: {rule}", "template")


class GenerateBody(_Body):
    """The body of POST /api/generate. Without a prompt it asks only that the model be loaded."""

    prompt: str | None = None
    suffix: str | None = None  # the answer stands between the prompt and this
    images: Images | None = None
    system: str | None = None
    template: Annotated[None, BeforeValidator(_no_template, json_schema_input_type=Literal[""] | None)] = None
    context: Annotated[list[TokenId], Field(fail_fast=True)] | None = None  # of the answer that this one follows
    raw: bool | None = None  # the prompt is written as it is, without the template


class EmbedBody(Placed):
    """The body of POST /api/embed."""

    absent = neutral.EMBEDDING
    aliases = {"name": "model"}

    model: Annotated[str, Field(max_length=1024)]
    input: Annotated[
        list[str],
        Field(max_length=MAX_TEXTS),
        BeforeValidator(_stops, json_schema_input_type=str | Annotated[list[str], Field(max_length=MAX_TEXTS)]),
    ]
    truncate: bool | None = None  # default true
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(Placed):
    """The body of POST /api/embeddings: one text."""

    absent = neutral.EMBEDDING
    aliases = {"name": "model"}

    model: Annotated[str, Field(max_length=1024)]
    prompt: str
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowBody(Nullable):
    aliases = {"name": "model"}
    absent = {"system": ("",), "template": ("",), "options": ({},)}

    model: Annotated[str, Field(max_length=1024)]
    verbose: bool | None = None


class PullBody(Nullable):
    aliases = {"name": "model"}

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None  # default true
    insecure: bool | None = None


# Names of the chat request that this one becomes, in the words of this API.
NAMES: Mapping[str, str] = {
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
}
