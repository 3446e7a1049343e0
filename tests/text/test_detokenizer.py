"""Streamed text adds up to what the library decodes at once, and stop strings end it wherever they are split."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmkit.text import IncrementalDetokenizer, Tokenizer
from tests.text.samples import BYTES, TOKENIZERS, UNBOUNDED


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return TOKENIZERS["demo"]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*parts, detokenizer.finish()]


def cut_short(data: bytes) -> int:
    """How many bytes at the end of `data` begin a character whose last bytes are missing."""
    for size in range(min(3, len(data)), 0, -1):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return size
    return 0


def decoded(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """What the library decodes, without a character at the end that is cut short."""
    text = tokenizer.decode(ids, skip)
    shown = [i for i in ids if tokenizer.id_to_token(i) is not None and not (skip and i in tokenizer.special_ids)]
    pieces = [tokenizer.id_to_token(i) or "" for i in shown]
    if '"ByteLevel"' in tokenizer.backend.decoder.__getstate__().decode() if tokenizer.backend.decoder else False:
        data = b"".join(map(tokenizer.token_bytes, shown))
        return text[:-1] if cut_short(data) else text
    run = next((pieces[i + 1 :] for i in range(len(pieces) - 1, -1, -1) if pieces[i] not in BYTES), pieces)
    data = bytes(int(piece[3:5], 16) for piece in run)
    if run and text.endswith("\ufffd" * len(run)) and (size := cut_short(data)):
        try:
            return text[: -len(run)] + data[:-size].decode()
        except UnicodeDecodeError:
            return text
    return text


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Any ids, with byte tokens and the specials made likely, and ids no token has."""
    some = st.one_of(
        st.integers(0, tokenizer.vocab_size + 3),
        st.integers(0, min(300, tokenizer.vocab_size)),
        st.integers(max(0, tokenizer.vocab_size - 16), tokenizer.vocab_size - 1),
    )
    return draw(st.lists(some, max_size=40))


@pytest.mark.parametrize("name", [*TOKENIZERS, *UNBOUNDED])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_decode(name: str, data: st.DataObject) -> None:
    tokenizer = (TOKENIZERS | UNBOUNDED)[name]
    ids = data.draw(token_ids(tokenizer))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, cuts, skip_special_tokens=skip)) == decoded(tokenizer, ids, skip)
    one_by_one = stream(tokenizer, ids, list(range(len(ids))), skip_special_tokens=skip)
    assert "".join(one_by_one) == decoded(tokenizer, ids, skip)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=30))
@example(raw=b"\xed\xa0")  # half a surrogate: wrong, not unfinished
@example(raw=b"a\xe0\x80")
@example(raw=b"\xf4\x90")
@example(raw=b"\xed\x9f")
def test_any_bytes_through_byte_level_tokens(raw: bytes) -> None:
    tokenizer = TOKENIZERS["demo"]
    byte_ids = {tokenizer.token_bytes(i): i for i in range(4, 300) if len(tokenizer.token_bytes(i)) == 1}
    ids = [byte_ids[bytes([byte])] for byte in raw]
    assert raw.decode(errors="replace") == tokenizer.decode(ids)
    whole = raw[: len(raw) - cut_short(raw)]
    assert "".join(stream(tokenizer, ids, list(range(len(ids))))) == whole.decode(errors="replace")


@pytest.mark.parametrize("name", ["demo", "llama", "gemma"])
def test_split_utf8_waits_and_is_left_out_at_the_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    singles = {tokenizer.token_bytes(i): i for i in range(3, 300) if len(tokenizer.token_bytes(i)) == 1}
    smile = [singles[bytes([byte])] for byte in "🙂".encode()]
    parts = stream(tokenizer, [*smile, *tokenizer.encode("a", add_special_tokens=False)], [1, 2, 3, 4])
    assert parts[:3] == ["", "", ""]
    assert "".join(parts).strip() in ("🙂a", "🙂 a")
    cut = stream(tokenizer, smile[:3], [1, 2, 3])
    assert cut == [""] * 5
    more = stream(tokenizer, [*smile, *smile[:3]], [4, 5, 6])
    assert "".join(more).strip() == "🙂"
    assert "".join(stream(tokenizer, [*smile, *smile[:3]], [7], stop=["never"])).strip() == "🙂"


@pytest.mark.parametrize("case", ["plain", "bad bytes", "a run of bytes"])
def test_detokenization_is_linear(demo: Tokenizer, case: str) -> None:
    """Neither whole texts nor runs of bytes are decoded again."""
    tokenizer, unit = {
        "plain": (demo, demo.encode("some words, again and again. ")),
        "bad bytes": (demo, [next(i for i in range(4, 300) if demo.token_bytes(i) == b"\xff")]),
        "a run of bytes": (TOKENIZERS["llama"], [BYTES.index("<0xE2>") + 3]),
    }[case]
    short, long = (_work(tokenizer, (unit * size)[:size]) for size in (2_000, 4_000))
    assert long < 2.5 * short  # four times, if it were quadratic


def _work(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Lines that run, and elements of what the functions of the package work on."""
    work = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal work
        if "lmkit" not in frame.f_code.co_filename:
            return None
        if event == "line":
            work += 1
        elif event == "return":  # then it has all of its variables
            work += sum(len(value) for value in frame.f_locals.values() if isinstance(value, str | bytes | list))
        return count

    detokenizer = IncrementalDetokenizer(tokenizer, stop=["never " * 10, "s" * 90])
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for token_id in ids:
            detokenizer.push([token_id])
        detokenizer.finish()
    finally:
        sys.settrace(before)
    return work


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of those, ends the text."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab c", max_size=30),
    stops=st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=10),
    include=st.booleans(),
)
def test_stop_strings_across_tokens(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    demo = TOKENIZERS["demo"]
    letters = [demo.encode(char)[0] for char in text]
    detokenizer = IncrementalDetokenizer(demo, stop=stops, include_stop=include)
    expected, matched = naive_stop(text, stops, include)
    shown = ""
    for a, b in pairwise([0, *sorted(min(cut, len(letters)) for cut in cuts), len(letters)]):
        shown += detokenizer.push(letters[a:b])
        assert expected.startswith(shown)  # never a part of the stop string that ends the text
    assert (shown + detokenizer.finish(), detokenizer.matched) == (expected, matched)


def test_only_the_possible_start_of_a_stop_is_held_back(demo: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(demo, stop=["END"])
    assert detokenizer.push(demo.encode("abc")) == "abc"
    assert detokenizer.push(demo.encode("xE")) == "x"
    assert detokenizer.push(demo.encode("N")) == ""
    assert detokenizer.push(demo.encode("E")) == "EN"
    assert detokenizer.finish() == "E"


def test_an_unarmed_stop_string_passes(demo: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(demo, stop=["b"])
    first = detokenizer.push(demo.encode("ab"), armed=False)
    rest = detokenizer.push(demo.encode("cb"))
    assert first + rest + detokenizer.finish() == "abc"
    assert detokenizer.matched == "b"


def test_a_stop_string_in_the_held_back_rest_counts() -> None:
    """A run of byte tokens shows only at its end, so a newline may be found by `finish`."""
    llama = TOKENIZERS["llama"]
    newline = BYTES.index("<0x0A>") + 3
    detokenizer = IncrementalDetokenizer(llama, stop=["\n"])
    text = detokenizer.push([*llama.encode("a", add_special_tokens=False), newline])
    assert (text + detokenizer.finish()).strip(" ") == "a"
    assert detokenizer.matched == "\n"
