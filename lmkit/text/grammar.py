"""Constrained output: the tokens that may come next, so that an answer fits a JSON schema, a pattern or a grammar.

llguidance compiles a grammar for a tokenizer and walks through it token by token (github.com/guidance-ai/llguidance). A
grammar that it cannot hold is refused. A schema loses only the keywords that it cannot hold (`held_schema`). Here a
*grammar* is llguidance's JSON text.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.text.dialects.table import MARKS
from lmkit.text.fair_turns import TENANT
from lmkit.text.grammar_process import LIMITS, compiled_tokenizer
from lmkit.text.held_schema import WHITESPACE, held
from lmkit.text.sandbox import Sandboxes
from lmkit.text.structural_tag import lark_of, without
from lmkit.text.tenant_cache import TenantCache

MAX_CHARS = 256 << 10  # of a schema, pattern or grammar
MAX_CHOICES = 4096
# What llguidance says of a grammar that goes beyond its limits, and of one whose rules have no end.
TOO_MUCH, NO_RULE = ("too many", "too big", "fuel", "max is"), "NoExtensionBias"
MAX_CHECKED = 4096  # verdicts on grammars that are remembered, a sixteenth of them for one tenant
CHECKERS = Sandboxes(2, "grammar_process.py", cpu_seconds=10.0, memory=2 << 30)  # a grammar's limits are tighter
MAX_BYTES = 256 << 20  # of compiled grammars that are kept, a quarter of it for one tenant
# llguidance tells no sizes. What it builds takes 100 to 300 MB for a second of work, and it does so as answers get on.
MIN_BYTES, BYTES_A_SECOND = 32 << 10, 250e6
QUICK_SECONDS = 2e-3  # a mask that takes no longer builds next to nothing
# The time of a guide: at the start, and for each token. A mask usually takes 0.1 to 2 ms.
MAX_SECONDS, TOKEN_SECONDS = 1.0, 0.02


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
    return lark(
        "start: CHOICE\nCHOICE: " + "\n  | ".join(json.dumps(_text(text), ensure_ascii=False) for text in texts)
    )


def without_words(words: Any) -> str:
    """Texts that contain none of these."""
    if not isinstance(words, list) or not 0 < len(words) <= MAX_CHOICES:
        raise ValueError(f"expected a list of 1 to {MAX_CHOICES} texts")
    return lark_grammar(f"start: ANY\nANY: {without(list(map(_text, words)))}")


def only_tokens(wanted: Mapping[str, Any]) -> str:
    """Any of the tokens `ids`, in any number. Without `may_end` no token ends the answer: `NO` is never there."""
    ids = ",".join(map(str, wanted["ids"]))
    some = f"<[{ids}]>*" if ids else '""'
    # One token that nothing ends is forced for ever: following that has no end.
    unforced = '%llguidance {"no_forcing": true}\n'
    return lark_grammar(f"{unforced}start: {some}" + ("" if wanted["may_end"] else " NO\nNO: /a/ & ~/a/"))


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
    """Grammars compiled for one tokenizer. Each tenant's last ones are kept. Several threads may use it."""

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
        self.compiled: TenantCache[LLMatcher] = TenantCache(MAX_BYTES // 4, MAX_BYTES)
        self._verdicts: TenantCache[str] = TenantCache(MAX_CHECKED // 16, MAX_CHECKED)

    def check(self, grammar: str, param: str) -> None:
        """Raise RequestError, which names `param` and the reason, unless the grammar can be followed.

        Call it before `guide`: a grammar that nobody has checked may end this process. It waits for its tenant's turn.
        """
        tenant, key = TENANT.get(), _digest(grammar)
        if (reason := self._verdicts.get(tenant, key)) is None:
            kind, reason = CHECKERS.ask(self._name, self._parts, grammar)
            if kind == "limit" or any(words in reason.lower() for words in TOO_MUCH):
                reason = "following it takes too much time, memory or depth; make it simpler"
            elif NO_RULE in reason:
                reason = "no answer fits it: a part of it is only itself"
            self._verdicts.put(tenant, key, reason, 1)
        if reason:
            raise RequestError("invalid_request", f"{param}: {reason}", param)

    def has(self, grammar: str, tenant: str = "") -> bool:
        """Whether the grammar is compiled for this tenant."""
        return self.compiled.get(tenant, _digest(grammar)) is not None

    def guide(self, grammar: str, tenant: str = "") -> Guide:
        """A guide at the start of an answer."""
        key = _digest(grammar)
        start = time.thread_time()
        matcher = self.compiled.get(tenant, key)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            size = MIN_BYTES + 16 * len(grammar) + int(BYTES_A_SECOND * (time.thread_time() - start))
            self.compiled.put(tenant, key, matcher, size)

        def grown(seconds: float) -> None:
            if seconds == math.inf:  # its copies share what they have built, and that they cannot go on
                self.compiled.drop(tenant, key)
            else:
                self.compiled.grow(tenant, key, int(BYTES_A_SECOND * seconds))

        return Guide(matcher.deep_copy(), self.vocab_size, grown)


class Guide:
    """One answer on its way through a grammar. One that takes too much time fails: it allows no token."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, grown: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`grown` is told the seconds in which the grammar was built further; infinity if the guide failed."""
        self._matcher, self._grown = matcher, grown
        # A bit for each token, from the lowest bit on.
        self.allowed = np.zeros(-(-vocab_size // 32), np.int32)
        self._seconds = MAX_SECONDS
        self._advance([])

    def advance(self, token_ids: list[int]) -> None:
        """Take in the answer's next tokens, and find those that may follow."""
        self._seconds += len(token_ids) * TOKEN_SECONDS
        self._advance(token_ids)

    @property
    def has_failed(self) -> bool:
        return self._seconds <= 0 or self._matcher.is_error()

    @property
    def may_be_forced(self) -> bool:
        """False if several tokens may come next. It may be asked at any moment."""
        return int(np.count_nonzero(self.allowed)) == 1  # 32 tokens share a number

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write their text; none where there is a choice."""
        return list(self._matcher.compute_ff_tokens()) if self.may_be_forced else []

    def _advance(self, token_ids: list[int]) -> None:
        start = time.thread_time()
        if token_ids and not self._matcher.is_stopped():  # a token after the end was computed for nothing
            self._matcher.consume_tokens(token_ids)
        if not self._matcher.is_error() and self._seconds > 0:
            self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        seconds = time.thread_time() - start
        self._seconds = min(self._seconds - seconds, MAX_SECONDS)
        if self.has_failed:  # out of fuel, or of time
            self.allowed[:] = 0
            self._grown(math.inf)
        elif seconds > QUICK_SECONDS:
            self._grown(seconds)


def _unsupported(reason: str) -> RequestError:
    return RequestError("unsupported_parameter", f"answers that follow a schema or grammar: {reason}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
