"""A lower bound of a text's tokens: it never exceeds them, and is given up where nothing is known."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from tests.text.samples import BYTES, DEMO, TOKENIZERS

HANGUL, ROCKY = "\u1112\u1161\u11ab", "\u03b1\u0313\u0342\u0345"  # each becomes one character in NFC


def demo(normalizer: Any = None, *added: Any) -> Tokenizer:
    """The demo's byte-level tokenizer with other parts."""
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if normalizer:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return Tokenizer(backend)


def bpe(pre_tokenizer: Any = None, vocab: tuple[str, ...] = ("a", "b"), **options: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, [], **options))
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    return Tokenizer(backend)


BOUNDED = TOKENIZERS | {
    "NFC": demo(normalizers.NFC(), "\u1f82", HANGUL * 20),
    "NFKC, lower case": demo(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), "\ufdfa" * 9),
    "shrinking replacement": demo(normalizers.Replace("abcabc", "zz")),
    "unknown characters": bpe(vocab=("a", "b", "<unk>"), unk_token="<unk>"),
}
BASE = Path(DEMO.parent / "text" / "heldout.txt").read_text()[:20_000]
LONGEST = max(TOKENIZERS["demo"].backend.get_vocab(), key=len).replace("Ġ", " ")
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.sampled_from(["abcabc", " ", "\n", "a", HANGUL, ROCKY, "\ufdfa", "日本", "<|im_end|>", LONGEST, "<unk>"]),
        st.integers(0, len(BASE)).map(lambda start: BASE[start : start + 200]),
    ).flatmap(lambda text: st.integers(1, 40).map(lambda times: text * times)),
    max_size=6,
).map("".join)


@settings(max_examples=30, deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    assert tokenizer.max_token_chars is not None
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= tokenizer.min_tokens(text)


@pytest.mark.parametrize(
    ("name", "text"), [("demo", LONGEST * 50), ("NFC", HANGUL * 20 * 50), ("shrinking replacement", "abcabc" * 900)]
)
def test_the_bound_is_of_use(name: str, text: str) -> None:
    """Each of these texts has tokens of nearly as many characters as the bound allows."""
    tokenizer = BOUNDED[name]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert num_tokens / 25 <= tokenizer.min_tokens(text) <= num_tokens


@pytest.mark.parametrize(
    "tokenizer",
    [
        demo(normalizers.Strip()),
        demo(normalizers.StripAccents()),
        demo(normalizers.Replace(Regex(" +"), " ")),
        demo(normalizers.Replace("a", "")),
        demo(normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer()])),
        demo(None, AddedToken("<mask>", lstrip=True)),
        demo(None, AddedToken("<end>", rstrip=True)),
        bpe(pre_tokenizers.WhitespaceSplit(), unk_token="a"),
        bpe(pre_tokenizers.Split("x", "removed"), unk_token="a"),
        bpe(pre_tokenizers.Punctuation("removed"), unk_token="a"),
        bpe(),  # drops unknown characters
        bpe(unk_token="a", fuse_unk=True),
        bpe(vocab=("a", *BYTES[1:]), byte_fallback=True),
        bpe(pre_tokenizers.ByteLevel()),
        Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
        Tokenizer(tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))),
    ],
)
def test_no_bound_where_one_token_may_stand_for_any_number_of_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_token_chars is None
    assert tokenizer.min_tokens("a" * 1_000_000) == 0


@pytest.mark.parametrize(
    ("normalizer", "text", "is_refused"),
    [
        (normalizers.Replace("a", "a" * 100), "a" * 9000, True),
        (
            normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("x*"), "yyyyyyyyy")]),
            "z" * 900,
            True,
        ),
        (normalizers.NFKC(), "\ufdfa" * 9000, True),
        (normalizers.NFKD(), "\ufdfa plain" * 900, False),
        (normalizers.NFKC(), "a" * 9000, False),
        (normalizers.NFD(), "\ud55c" * 9000, False),
        (normalizers.Replace("a", "a" * 100), "a" * 9, False),
        (None, "\ufdfa" * 9000, False),
    ],
)
def test_a_text_that_grows_too_much_is_refused(normalizer: Any, text: str, is_refused: bool) -> None:
    tokenizer = bpe(unk_token="a")
    tokenizer.backend.normalizer = normalizer
    tokenizer = Tokenizer(tokenizer.backend)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_pair(text, "b")):
        with pytest.raises(RequestError, match="4 times as many") if is_refused else nullcontext():
            encode(text)
