"""Constrained output: the tokens that may come next, so that an answer fits a JSON schema, a pattern or a grammar.

llguidance compiles a grammar for a tokenizer and walks through it token by token (github.com/guidance-ai/llguidance). A
grammar that it cannot hold is refused. A schema loses only the keywords that it cannot hold (`held_schema`). Here a
*grammar* is llguidance's JSON text.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.text.dialects.table import MARKS
from lmkit.text.grammar_process import LIMITS, compiled_tokenizer
from lmkit.text.held_schema import held
from lmkit.text.sandbox import Sandbox
from lmkit.text.structural_tag import lark_of, without

MAX_CHARS = 256 << 10  # of a schema, pattern or grammar
MAX_CHOICES = 4096
MAX_COMPILED = 64  # grammars that are kept
# Between the parts of a JSON text. A model may write it on lines of its own, but not spaces for ever.
WHITESPACE = r"[ \t\r\n]{0,32}"
MAX_CHECKED = 256  # grammars that are known to be right
CPU_SECONDS, MEMORY = 10.0, 2 << 30  # of the process that checks them
SHARED = Sandbox("grammar_process.py", CPU_SECONDS, MEMORY)


def json_schema(schema: Any, strict: bool | None = None) -> str:
    """JSON texts that a JSON Schema (draft 2020-12) accepts.

    A keyword that no grammar holds is left out alone, as a hint of the request. Raises ValueError for one that counts:
    with `strict`, and where no field is a hint.
    """
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON schema: an object, or its text")
    schema, left_out = held(schema)
    for name in left_out:
        if strict or not ignore(f"schema.{name}"):
            raise ValueError(f"the schema's {name} cannot be held by a grammar")
    return str(LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE}))


def json_object(wanted: Any = True) -> str:
    """Any JSON object."""
    if wanted is not True:
        raise ValueError("expected true")
    return json_schema({"type": "object"})


def regex(pattern: Any) -> str:
    """Texts that match a pattern as a whole. The syntax is that of Rust's regex crate."""
    return str(LLMatcher.grammar_from_regex(_text(pattern)))


def choice(texts: Any) -> str:
    """One of several texts."""
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_CHOICES:
        raise ValueError(f"expected a list of 1 to {MAX_CHOICES} texts")
    return lark("start: " + "\n  | ".join(json.dumps(_text(text), ensure_ascii=False) for text in texts))


def without_words(words: Any) -> str:
    """Texts that contain none of these."""
    if not isinstance(words, list) or not 0 < len(words) <= MAX_CHOICES:
        raise ValueError(f"expected a list of 1 to {MAX_CHOICES} texts")
    return lark_grammar(f"start: ANY\nANY: {without(list(map(_text, words)))}")


def only_tokens(wanted: Mapping[str, Any]) -> str:
    """Any of the tokens `ids`, in any number. Without `may_end` no token ends the answer: `NO` is never there."""
    ids = ",".join(map(str, wanted["ids"]))
    some = f"<[{ids}]>*" if ids else '""'
    return lark_grammar(f"start: {some}" + ("" if wanted["may_end"] else " NO\nNO: /a/ & ~/a/"))


def lark_grammar(text: str) -> str:
    """The grammar of a text in llguidance's own form of Lark."""
    return str(LLMatcher.grammar_from_lark(text))


def lark(text: Any) -> str:
    """A context-free grammar in Lark's syntax, or in that of GBNF (`root ::= ...`)."""
    return lark_grammar(_to_lark(text))


def _to_lark(text: Any) -> str:
    try:
        return str(any_to_lark(_text(text)))
    except Exception as error:
        if type(error) not in (GbnfToLarkError, Exception):  # the translator raises bare ones
            raise
        raise ValueError(str(error)) from None


def structural_tag(value: Any) -> str:
    """Free text, in which each `structures[i].begin` is followed by JSON of its `schema` and by its `end`.

    A tag begins with one of `triggers`. As in vLLM's API. Or {"format": ...}, see `text.structural_tag`.
    """
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, dict) and "format" in value and value.keys() <= {"type", "format"}:
        return lark_grammar(lark_of(value["format"], _to_lark))
    try:
        structures, triggers = value["structures"], value["triggers"]
        tags = [
            StructTag(
                trigger=next(trigger for trigger in triggers if tag["begin"].startswith(trigger)),
                begin=tag["begin"],
                grammar=tag["schema"],
                end=tag["end"],
            )
            for tag in structures
        ]
        if not tags:
            raise ValueError
        return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False)))
    except (KeyError, TypeError, AttributeError, AssertionError, StopIteration, ValueError):
        shape = '{"structures": [{"begin", "schema", "end"}], "triggers": [...]}'
        raise ValueError(f'expected {{"format": ...}}, or {shape} with a trigger at the begin of each') from None


KINDS: Mapping[str, Callable[..., str]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "choice": choice,
    "grammar": lark,
    "structural_tag": structural_tag,
    "bad_words": without_words,
    "allowed_token_ids": only_tokens,
}


def grammar_of(kind: str, value: Any, param: str, **options: Any) -> str:
    """The grammar of one of KINDS, whose function has these options.

    Raises RequestError, which names `param`, for a value of a wrong shape.
    """
    try:
        if len(json.dumps(value)) > MAX_CHARS:
            raise ValueError(f"at most {MAX_CHARS} characters of JSON")
        return KINDS[kind](value, **options)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError("invalid_request", f"{param}: {reason}", param) from None


def response_format(value: Mapping[str, Any]) -> str:
    """The grammar of OpenAI's `response_format`, "" for plain text. Raises RequestError.

    Also LMDeploy's `regex_schema`, vLLM's `structural_tag`, and a `schema` beside `json_object` as in llama.cpp.
    """
    param = "response_format"
    match dict(value):
        case {"type": "text", **rest} if not rest:
            return ""
        case {"type": "json_object", **rest} if not rest:
            return json_object()
        case {"type": "json_object" | "json_schema", "schema": schema, **rest} if not rest:
            return grammar_of("json_schema", schema, param)
        case {"type": "json_schema", "json_schema": {"schema": schema, **about}, **rest} if not rest:
            if unknown := [name for name in about if name not in ("name", "description", "strict")]:
                raise RequestError("invalid_request", f"{param}: unknown field {str(unknown[0])[:64]!r}", param)
            return grammar_of("json_schema", schema, param, strict=about.get("strict"))
        case {"type": "regex_schema", "regex_schema": pattern, **rest} if not rest:
            return grammar_of("regex", pattern, param)
        case {"type": "structural_tag", **tag}:
            return grammar_of("structural_tag", tag, param)
    raise RequestError(
        "invalid_request",
        f'{param}: expected {{"type": "text"}}, {{"type": "json_object"}} or {{"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": ...}}',
        param,
    )


def with_special_marks(tokenizer: str) -> str:
    """The text of a tokenizer.json in which marks of reasoning and calls are special tokens, so that no text has them.

    Most models declare them as ordinary added tokens.
    """
    data = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(data.get("added_tokens", msgspec.Raw(b"[]")), type=list[dict[str, Any]])
    for token in added:
        token["special"] = token["special"] or token["content"] in MARKS
    return msgspec.json.encode(data | {"added_tokens": added}).decode()


class Grammars:
    """Grammars compiled for one tokenizer. The last ones are kept. Several threads may use it."""

    def __init__(self, tokenizer: str, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """`tokenizer` is the text of tokenizer.json, `vocab_size` that of the logits, which may be more.

        Raises RequestError if no token ends an answer, or for a kind of tokenizer that has no bytes.
        """
        if not eos_token_ids:
            raise _unsupported("the model has no token that ends an answer")
        tokenizer = with_special_marks(tokenizer)
        self._parts = (tokenizer, vocab_size, list(eos_token_ids))
        self._name = hashlib.sha256(repr(self._parts).encode()).hexdigest()
        try:
            self._tokenizer = compiled_tokenizer(*self._parts)
        except ValueError:
            raise _unsupported("the model's tokenizer is of a kind that cannot follow one") from None
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._checked: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str, param: str) -> None:
        """Raise RequestError, which names `param` and the reason, unless the grammar can be followed.

        Call it before `guide`: a grammar that nobody has checked may end this process.
        """
        with self._lock:
            if grammar in self._checked:
                return
        kind, reason = self._asked(grammar)
        if kind == "limit":
            reason = "compiling it takes too much time, memory or depth; make it simpler"
        if kind != "ok":
            raise RequestError("invalid_request", f"{param}: {reason}", param)
        with self._lock:
            self._checked[grammar] = None
            while len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)

    def _asked(self, grammar: str) -> tuple[str, str]:
        for _ in range(3):  # another thread's grammar may end the process in between
            kind, reason = SHARED.ask("grammar", self._name, grammar)
            if kind != "unknown":
                return kind, reason
            SHARED.ask("tokenizer", self._name, *self._parts)
        return "limit", ""

    def guide(self, grammar: str) -> Guide:
        """A guide at the start of an answer."""
        return Guide(self._matcher(grammar).deep_copy(), self.vocab_size)

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)  # other threads go on meanwhile
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


class Guide:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        # A bit for each token, from the lowest bit on. A guide that has failed allows none.
        self.allowed = np.zeros(-(-vocab_size // 32), np.int32)
        self._look()

    def advance(self, token_ids: list[int]) -> None:
        """Take in the answer's next tokens, and find those that may follow."""
        if not self._matcher.is_stopped():  # a token behind the end was computed for nothing
            self._matcher.consume_tokens(token_ids)
        self._look()

    @property
    def may_be_forced(self) -> bool:
        """False if several tokens may come next. It may be asked at any moment."""
        return int(np.count_nonzero(self.allowed)) == 1  # 32 tokens share a number

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write their text; none where there is a choice."""
        return list(self._matcher.compute_ff_tokens()) if self.may_be_forced else []

    def _look(self) -> None:
        if self._matcher.is_error():
            self.allowed[:] = 0
            return
        self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        if self._matcher.is_error():  # out of fuel
            self.allowed[:] = 0


def _unsupported(reason: str) -> RequestError:
    return RequestError("unsupported_parameter", f"answers that follow a schema or grammar: {reason}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value
