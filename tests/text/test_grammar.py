"""Grammars: what is accepted, what is refused, and that a guide allows exactly what the grammar does."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.text import grammar as grammars
from lmkit.text.fair_turns import FairTurns
from lmkit.text.grammar import Guide, grammar_of, response_format
from lmkit.text.tenant_cache import TenantCache
from tests.serve.fake_engine import DEMO

TOKENIZER = Tokenizer.from_pretrained(DEMO)
VOCAB = 4096 + 40  # logits are wider than the vocabulary, and no multiple of 32
GRAMMARS = TOKENIZER.grammars(VOCAB)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(guide: Guide) -> np.ndarray:
    """The ids that may come next."""
    return np.flatnonzero(np.unpackbits(guide.allowed.view(np.uint8), bitorder="little"))


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` can be the whole answer."""
    guide = GRAMMARS.guide(grammar)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(guide):
            return False
        guide.advance([token])
    return not set(TOKENIZER.eos_token_ids).isdisjoint(allowed(guide))


def random_answer(grammar: str, seed: int, most: int = 400) -> str:
    """A random walk through the grammar, up to its end."""
    rng, guide, tokens = random.Random(seed), GRAMMARS.guide(grammar), list[int]()
    for _ in range(most):
        token = rng.choice(allowed(guide).tolist())
        if token in TOKENIZER.eos_token_ids:
            return TOKENIZER.decode(tokens)
        tokens.append(token)
        guide.advance([token])
    raise AssertionError(f"no end: {TOKENIZER.decode(tokens)!r}")


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("json_schema", PERSON, ['{"name":"Ada","age":36}', '{\n  "name": "A",\n  "age": 0\n}'],
         ['{"name":"Ada"}', '{"name":"Ada","age":151}', '{"name":"","age":3,"x":1}', '{"name":"123456789","age":3}']),
        ("json_schema", json.dumps(PERSON), ['{"name":"Ada","age":36}'], ["[]"]),
        ("json_object", True, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a": nul}']),
        ("regex", "[0-9]{3}-[a-f]+", ["123-abc"], ["12-abc", "123-xyz", "123-"]),
        ("choice", [f"number {i}" for i in range(grammars.MAX_CHOICES)], ["number 0", "number 4095"], ["number 4096"]),
        ("choice", ["yes", "no", 'say "no"\n', "naïve"], ["yes", "no", 'say "no"\n', "naïve"], ["maybe", "yesno", ""]),
        ("grammar", 'start: "a" ("b" | "c")+', ["ab", "abcb"], ["a", "ba"]),
        ("grammar", 'root ::= "a" ("b" | "c")+', ["ab", "abcb"], ["a", "ba"]),
        ("structural_tag", {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]},
         ["no call", 'so <f>{"name":"A","age":1}</f> it is'], ["so <f>{}</f>", "<f>"]),
    ],
)  # fmt: skip
def test_a_guide_allows_what_the_grammar_allows(kind: str, value: Any, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(kind, value, "field")
    GRAMMARS.check(grammar, "field")
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_random_answers_fit_the_schema() -> None:
    for seed in range(20):
        answer = json.loads(random_answer(grammar_of("json_schema", PERSON, "f"), seed))
        assert answer.keys() == {"name", "age"}
        assert 0 <= answer["age"] <= 150
        assert len(answer["name"]) <= 8
        assert re.fullmatch("[0-9]{3}-[a-f]{1,9}", random_answer(grammar_of("regex", "[0-9]{3}-[a-f]{1,9}", "f"), seed))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a+"},
        {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        {"type": "string", "pattern": r"^\p{Letter}{2,9}$"},
        {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 40, "pattern": "^[ -~]*$"}]},
        {"type": "array", "items": {"anyOf": [{"format": "email"}, {"format": "uri"}, {"maxLength": 4}]}},
        {"type": "object", "patternProperties": {"f.*o": {"pattern": r"^[^\s]+$"}}},
    ],
    ids=str,
)
def test_masks_are_those_of_a_walk_through_all_tokens(schema: dict[str, Any]) -> None:
    grammar, rng = grammars.json_schema(schema), random.Random(0)
    plain = LLTokenizer(TOKENIZER.backend.to_str(), n_vocab=VOCAB, eos_token=list(TOKENIZER.eos_token_ids), slices=[])
    for _ in range(10):
        guide, walked = GRAMMARS.guide(grammar), Guide(LLMatcher(plain, grammar, log_level=0), VOCAB)
        for _ in range(20):
            np.testing.assert_array_equal(guide.allowed, walked.allowed)
            if (token := int(rng.choice(allowed(guide)))) in TOKENIZER.eos_token_ids:
                break
            guide.advance([token])
            walked.advance([token])


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"type": "object", "unevaluatedProperties": {"type": "null"}}, "unevaluatedProperties"),
        ("json_schema", {"type": "flub"}, "type"),
        ("json_schema", {"$ref": "http://127.0.0.1/x"}, "$ref"),  # nothing is fetched
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ("json_schema", [], "JSON schema"),
        ("json_schema", "{", "Expecting"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "", "text"),
        ("regex", "a" * (grammars.MAX_CHARS + 1), "characters"),
        ("choice", [], "list"),
        ("choice", ["a", ""], "text"),
        ("choice", ["x"] * (grammars.MAX_CHOICES + 1), "list"),
        ("grammar", 'start: "a" foo', "foo"),
        ("grammar", "start: start", "no answer fits it"),
        ("json_schema", {"$ref": "#"}, "no answer fits it"),
        ("json_schema", {"anyOf": [{"$ref": "#"}]}, "no answer fits it"),
        ("structural_tag", {"structures": [], "triggers": []}, "structures"),
        ("structural_tag", {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["x"]}, "trigger"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(kind: str, value: Any, named: str) -> None:
    with pytest.raises(RequestError, match="field: ") as refusal:
        GRAMMARS.check(grammar_of(kind, value, "field"), "field")
    assert named in refusal.value.message
    assert refusal.value.param == "field"
    assert len(refusal.value.message) < 400


def test_a_deep_schema_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        grammar_of("json_schema", deep, "field")


def test_a_step_that_needs_too_much_fuel_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(step_lexer_fuel=1, step_max_items=1, verbose_errors=False))
    guide = Tokenizer.from_pretrained(DEMO).grammars(4096).guide(grammar_of("regex", "(.*a.{60}){9}", "field"))
    guide.advance(TOKENIZER.encode("banana", add_special_tokens=False))
    assert len(allowed(guide)) == 0


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_object"},
        {"type": "json_object", "schema": PERSON},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        {"type": "json_schema", "schema": PERSON},
        {"type": "regex_schema", "regex_schema": "[0-9]+"},
    ],
)
def test_response_formats(value: dict[str, Any]) -> None:
    GRAMMARS.check(response_format(value), "response_format")


@pytest.mark.parametrize(
    "value",
    [{}, {"type": "xml"}, {"type": "json_object", "x": 1}, {"type": "json_schema"}, {"type": ["text"]},
     {"type": "json_schema", "json_schema": {"schema": {}, "surprise": 1}}, {"type": "json_schema", "json_schema": 3}],
)  # fmt: skip
def test_a_wrong_response_format_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        response_format(value)
    assert refusal.value.param == "response_format"


def test_a_guide_is_the_same_wherever_it_starts() -> None:
    grammar = grammar_of("json_schema", PERSON, "field")
    tokens = TOKENIZER.encode('{"name":"Ada","age":36}', add_special_tokens=False)
    guide = GRAMMARS.guide(grammar)
    for count in range(len(tokens) + 1):
        again = GRAMMARS.guide(grammar)
        again.advance(tokens[:count])
        np.testing.assert_array_equal(again.allowed, guide.allowed)
        guide.advance(tokens[count : count + 1])


def test_a_guide_that_is_led_astray_allows_nothing_and_one_at_its_end_stays_there() -> None:
    astray = GRAMMARS.guide(grammar_of("choice", ["yes"], "field"))
    astray.advance(TOKENIZER.encode("no", add_special_tokens=False))
    assert len(allowed(astray)) == 0
    ended = GRAMMARS.guide(grammar_of("choice", ["yes"], "field"))
    ended.advance([*TOKENIZER.encode("yes", add_special_tokens=False), TOKENIZER.eos_token_ids[0]])
    ended.advance([5])  # computed for nothing
    assert set(allowed(ended)) <= set(TOKENIZER.eos_token_ids)


def test_grammars_are_kept_by_bytes_and_no_tenant_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "BYTES_A_SECOND", 0)  # of work, which differs from run to run
    mine = Tokenizer.from_pretrained(DEMO).grammars(4096)
    mine.compiled = TenantCache(10 * grammars.MIN_BYTES, 100 * grammars.MIN_BYTES)
    other = mine.guide(grammar_of("choice", ["mine"], "field"), "other")
    for number in range(12):
        mine.guide(grammar_of("choice", [f"x{number}"], "field"), "greedy")
    assert 5 <= len(mine.compiled) < 12
    assert mine.compiled.size <= 11 * grammars.MIN_BYTES
    kept = len(mine.compiled)
    mine.guide(grammar_of("choice", ["mine"], "field"), "other")
    assert len(mine.compiled) == kept
    assert len(allowed(other))


def test_a_guide_that_takes_too_much_time_fails_and_its_grammar_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Tokenizer.from_pretrained(DEMO).grammars(4096)
    guide = mine.guide(grammar_of("regex", "[a-z]{1,100}", "field"))
    monkeypatch.setattr(grammars, "TOKEN_SECONDS", -grammars.MAX_SECONDS)
    guide.advance(TOKENIZER.encode("a", add_special_tokens=False))
    assert len(allowed(guide)) == 0
    assert len(mine.compiled) == 0


def test_turns_are_fair_between_tenants() -> None:
    turns, order, entered, leave = FairTurns(2), list[str](), threading.Semaphore(0), threading.Semaphore(0)

    def work(tenant: str) -> None:
        with turns.turn(tenant):
            order.append(tenant)
            entered.release()
            leave.acquire()

    threads = [threading.Thread(target=work, args=(tenant,)) for tenant in ("greedy",) * 6 + ("small",)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=10)
    assert entered.acquire(timeout=10)
    assert sorted(order) == ["greedy", "small"]  # one tenant never has all places
    leave.release(len(threads))
    for thread in threads:
        thread.join(10)
    assert len(order) == 7


CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(10_000)), 'r10000: "a"'])
REFERENCES = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}}
REFERENCES["$defs"]["5000"] = {"type": "null"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("grammar", CHAIN),
        ("json_schema", REFERENCES),
        ("json_schema", {"const": -(2**63) + 1}),
        ("json_schema", {"type": "integer", "minimum": -(2**63) + 1, "maximum": -(2**63) + 1}),
        ("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(9000)}}),
        ("json_schema", {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}),
        ("regex", "[a-z]{3}((a{1000}){1000}){1000}"),
        ("regex", "a{1000000000}"),
        ("grammar", 'start: C\nA: "a"{1000}\nB: A{1000}\nC: B{1000}'),
        ("grammar", 'start: (("a"{1000}){1000}){1000}'),
        ("structural_tag", {"format": {"type": "regex", "pattern": "((a{1000}){1000}){1000}"}}),
    ],
    ids=[
        "chain of rules", "chain of references", "constant", "range", "properties", "pattern", "late", "long",
        "terminals", "rules", "tag",
    ],
)  # fmt: skip
def test_a_grammar_that_takes_too_much_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(RequestError, match=r"field: following it takes too much") as error:
        GRAMMARS.check(grammar_of(kind, value, "field"), "field")
    assert (error.value.code, error.value.param) == ("invalid_request", "field")
    GRAMMARS.check(grammar_of("choice", ["x"], "field"), "field")


def test_a_tokenizer_without_an_end_follows_no_grammar() -> None:
    endless = Tokenizer(TOKENIZER.backend)
    with pytest.raises(RequestError, match="no token that ends"):
        endless.grammars(4096)
