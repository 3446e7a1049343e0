"""The most that a request may use, read from its body before it goes to a node.

`ROUTES` says for each route which fields decide that. A route that does not stand there may use anything, so keys with
a limit of tokens or money may not use it. Numbers are read as nodes read them (`lmkit.whole`), and the node gets the
body as it was read here: each field once. What cannot be read is refused.

What a request leaves open is not guessed. For a key with limits it is set in the body, so that no node goes beyond it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from lmkit.errors import RequestError
from lmkit.proxy.accounts.account import Sizes, Usage
from lmkit.proxy.config import FORMS
from lmkit.wav import read_head
from lmkit.web.receive import decode_json
from lmkit.whole import whole

OPEN_TOKENS = 1024  # that an answer without a limit of its own may have at least, if they are left
OPEN_SHARE = 4  # and it may have one part in so many of what is left
UNKNOWN_CONTEXT = 4096  # tokens of an answer without a limit, where no node tells its model's context
UNKNOWN_PROMPT = 32768  # tokens of a prompt that is not in the body, where no node tells its model's context
MAX_CONTEXT = 1 << 31  # tokens; no model has more
TEMPLATE_TOKENS = 256  # that a chat template may add; more if its nodes say so
TOOLS_TOKENS = 1024  # that it may add where there are tools
BYTES_PER_TOKEN = 3  # of a text; few have less
# Of an audio. Whisper hears 30 s at a time. Where a text goes on in short steps, a node hears at most four times as
# many windows as the audio has (serve.audio.listener.MOST_WINDOWS), and one more to know the language.
WINDOW_SECONDS, HEARINGS = 30, 4
TOKENS_PER_SECOND = 50
BYTES_PER_SECOND = 750  # of a file that is no WAV file: no usual codec has fewer (Opus, 6 kbit/s)
# Parts of a prompt whose tokens the body's length does not bound; and JSON that hides the names of its fields.
_ELSEWHERE = re.compile(
    rb'"(?:input_)?(?:images?|audio|video|file)(?:_url|_id)?"|"item_reference"|"type"\s*:\s*"document"|\\u00[2-7]'
)
_CONTINUED = ("previous_response_id", "conversation")
Fields = dict[str, msgspec.Raw]


class Route(NamedTuple):
    """The fields of a route's body that say what it may use."""

    limits: tuple[str, ...] = ()  # the most tokens of an answer, by these names; one that is set goes into the first
    choices: tuple[str, ...] = ()  # the number of answers to each prompt
    default: int | None = 0  # tokens of an answer without a limit; None = until the context is full
    prompts: tuple[str, ...] = ()  # each a text, token ids, or a list of prompts; shorter lists are repeated
    each: int = 0  # tokens that are added to each prompt
    inner: str = ""  # an object in which all these fields may stand, too
    limits_inside: bool = False  # limits stand there alone


_NAMES = ("max_tokens", "max_completion_tokens", "n_predict")
_MANY = ("n", "best_of")
_COMPLETION = Route(_NAMES, _MANY, 16, ("prompt", "prompt_start_ids", "endings"), 8)
_PAIRS = Route(
    prompts=("query", "queries", "documents", "texts", "items", "text_1", "text_2", "data_1", "data_2", "instruction"),
    each=256,  # a reranker's own question
)
_TEXTS = Route(prompts=("input",), each=64)
_FREE = Route()

ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route(_NAMES, _MANY, None),
    "/v1/completions": _COMPLETION,
    "/v1/responses": Route(("max_output_tokens",), (), None),
    "/v1/messages": Route(("max_tokens",), (), None),
    "/generate": _COMPLETION._replace(
        limits=("max_new_tokens", *_NAMES),
        prompts=("text", "input_ids", *_COMPLETION.prompts),
        inner="sampling_params",
    ),
    **dict.fromkeys(
        ("/api/chat", "/api/generate"), Route(("num_predict",), (), None, inner="options", limits_inside=True)),
    **dict.fromkeys(("/completion", "/infill"), _COMPLETION._replace(
        limits=("n_predict", "max_tokens", "max_completion_tokens"), default=None)),
    **dict.fromkeys(("/api/embed", "/api/embeddings"), _TEXTS),
    "/v1/images/generations": Route((), ("n",), None),
    "/v1/audio/speech": Route((), (), None),
    **dict.fromkeys(FORMS, Route((), (), None, each=8)),
    **dict.fromkeys(("/v1/embeddings", "/v1/classify", "/classify", "/v1/moderations"), _TEXTS),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"), _PAIRS),
    **dict.fromkeys(
        ("/v1/chat/completions/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens",
         "/api/show", "/api/pull", "/tokenize", "/detokenize", "/apply-template", "/v1/encode"), _FREE),
}  # fmt: skip


class Extent:
    """What one request may use."""

    def __init__(self, path: str, body: bytes, file: bytes | None = None) -> None:
        """`file`: an audio beside the body's fields. Raises RequestError for a body or a field that cannot be read."""
        seconds, hearings = (0.0, 0) if file is None else _hearings(file)
        self._heard = hearings * (math.ceil(TOKENS_PER_SECOND * min(seconds, WINDOW_SECONDS)) + 1)  # tokens at most
        self.audio_tokens = math.ceil(TOKENS_PER_SECOND * seconds)  # if each second is heard once
        self.is_known = path in ROUTES
        self._route = route = ROUTES.get(path, Route(default=None))
        self.fields: Fields = decode_json(body, Fields, mismatch="the body must be a JSON object")
        self._inner: Fields | None = None
        self._inner = self._object(route.inner) if route.inner else None
        self.num_bytes = len(body)
        self.stream, self.background, options = map(self._plain, ("stream", "background", "stream_options"))
        self.stream = self.stream == "true" if isinstance(self.stream, str) else self.stream  # as serve.protocol.switch
        self.stream_options: dict[str, Any] = options if isinstance(options, dict) else {}
        self.priority = min((number for _, number in self._numbers(("priority",))), default=None)
        self.num_choices = self._choices()
        limits = list(self._numbers(route.limits, only_inside=route.limits_inside))
        is_open = not limits or any(number < 0 for _, number in limits)
        self._limit = (None if limits else route.default) if is_open else max(number for _, number in limits)
        self._is_set = not is_open and any(name == route.limits[0] for name, _ in limits)
        prompts = [(memoryview(raw).nbytes, _count(raw)) for _, raw in self._given(route.prompts)]
        self._num_prompts = max(hearings, *(count for _, count in prompts), 1)
        self._prompt = len(body) + self._template_tokens() + route.each * self._num_prompts
        self._prompt += sum(size * (math.ceil(self._num_prompts / count) - 1) for size, count in prompts)
        self._is_elsewhere = _ELSEWHERE.search(body) is not None or any(self._given(_CONTINUED))

    def allot(self, sizes: Sizes, room: Callable[[int], float]) -> Usage:
        """The most that it may use of a model of these sizes. `room` says how many tokens of answers the key has left
        after a prompt of so many.

        A key with limits gets the limit of a request that leaves it open, or has it by another name, into the body.
        """
        route, answers = self._route, self._num_prompts * self.num_choices
        context = sizes.context
        prompt = self._prompt + max(0, (sizes.template or 0) - TEMPLATE_TOKENS)
        whole_prompts = (context or UNKNOWN_PROMPT) * self._num_prompts
        if self._is_elsewhere:
            prompt = max(prompt, whole_prompts)
        if context is not None:
            prompt = min(prompt, whole_prompts)
        prompt += self._heard
        if route.default == 0:
            return Usage(prompt)
        longest = context or UNKNOWN_CONTEXT
        each = longest if self._limit is None else min(self._limit, context or self._limit)
        left = room(prompt)
        if left < math.inf and route.limits and not self._is_set:
            if self._limit is None:
                share = min(max(OPEN_TOKENS, left // answers // OPEN_SHARE), left // answers)
                each = longest if share >= longest else self._fitting(int(share), context)
            if self._limit is not None or each < longest or context is None:
                self._set_limit(each if self._limit is None else self._limit)
        return Usage(prompt, 0, each * answers)

    def most_told(self, context: int | None) -> Usage:
        """More than this no node can have used, whatever it tells."""
        longest = (context or MAX_CONTEXT) * self._num_prompts
        return Usage(longest + self._heard, longest, longest * self.num_choices)

    def body(self) -> bytes:
        """What the node gets."""
        inner = {} if self._inner is None else {self._route.inner: msgspec.Raw(msgspec.json.encode(self._inner))}
        return msgspec.json.encode(self.fields | inner)

    def _fitting(self, share: int, context: int | None) -> int:
        """A limit of an answer of at most `share` tokens, with which its prompt most likely fits the context."""
        text = self.num_bytes // self._num_prompts // BYTES_PER_TOKEN
        return max(1, share if context is None else min(share, max(context - text, 16)))

    def _set_limit(self, tokens: int) -> None:
        if self._route.limits_inside and self._inner is None:
            self._inner = {}
        places = [self.fields] if self._inner is None else [self.fields, self._inner]
        for place in places:
            for name in self._route.limits:
                place.pop(name, None)
        places[-1][self._route.limits[0]] = msgspec.Raw(b"%d" % tokens)

    def _object(self, name: str) -> Fields | None:
        for _, raw in self._given((name,)):
            found: Fields = decode_json(raw, Fields, mismatch=f"{name}: expected an object", param=name)
            return found
        return None

    def _given(self, names: Iterable[str], *, only_inside: bool = False) -> Iterator[tuple[str, msgspec.Raw]]:
        """Those of these fields that are not null."""
        places = [] if only_inside else [self.fields]
        places += [] if self._inner is None else [self._inner]
        for place, name in itertools.product(places, names):
            if name in place and bytes(memoryview(place[name])[:5]) != b"null":
                yield name, place[name]

    def _plain(self, name: str) -> Any:
        return next((decode_json(raw) for _, raw in self._given((name,))), None)

    def _numbers(self, names: Iterable[str], *, only_inside: bool = False) -> Iterator[tuple[str, int]]:
        for name, raw in self._given(names, only_inside=only_inside):
            if (number := whole(decode_json(raw))) is None:
                raise RequestError("invalid_request", f"{name}: expected a whole number", name)
            yield name, number

    def _choices(self) -> int:
        numbers = list(self._numbers(self._route.choices))
        if wrong := [name for name, number in numbers if number < 1]:
            raise RequestError("invalid_request", f"{wrong[0]}: expected at least 1", wrong[0])
        return max((number for _, number in numbers), default=1)

    def _template_tokens(self) -> int:
        """What a template may add. It may write tools with more spaces than the body has."""
        sizes = [memoryview(raw).nbytes for _, raw in self._given(("tools",))]
        return TOOLS_TOKENS + sizes[0] if sizes and sizes[0] > len("[]") else TEMPLATE_TOKENS


def _hearings(file: bytes) -> tuple[float, int]:
    """The seconds of an audio, and the number of windows that a node may hear."""
    try:
        seconds = read_head(file).seconds
    except RequestError:  # another make of nodes may read it, which hears each window once
        seconds = len(file) / BYTES_PER_SECOND
        return seconds, math.ceil(seconds / WINDOW_SECONDS)
    return seconds, HEARINGS * math.ceil(seconds / WINDOW_SECONDS) + 1


def _count(raw: msgspec.Raw) -> int:
    """How many prompts a field holds: a text and token ids are one."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return 1
    try:
        msgspec.json.decode(raw, type=list[float])  # token ids
        return 1
    except msgspec.ValidationError:
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
