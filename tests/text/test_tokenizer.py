"""The tokenizer against the tokenizers library itself, and what it refuses to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import decoders

from lmkit.errors import CheckpointError, RequestError, UnsupportedError
from lmkit.text import Tokenizer
from tests.text.samples import BYTES, TOKENIZERS, UNBOUNDED, sentencepiece_like, write_folder


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return TOKENIZERS["demo"]


def test_encode_and_decode_are_the_library_s(demo: Tokenizer) -> None:
    text = "Hello <|im_end|> wörld 日本 🙂\n\n"
    assert demo.encode(text) == demo.backend.encode(text).ids
    assert 2 in demo.encode(text)  # special tokens in a prompt are recognised
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text
    assert "<|im_end|>" not in demo.decode(demo.encode(text))


def test_demo_facts(demo: Tokenizer) -> None:
    assert demo.vocab_size == 4096
    assert demo.eos_token_ids == (0, 2)
    assert demo.special_ids == {0, 1, 2, 3}
    assert demo.bos_token_id is None
    assert demo.id_to_token(0) == "<|endoftext|>"
    assert demo.id_to_token(1 << 40) is None
    assert demo.id_to_token(-1) is None


def test_bos_of_the_post_processor_is_added_once() -> None:
    llama = TOKENIZERS["llama"]
    assert llama.bos_token_id == 1
    assert llama.encode("a")[0] == 1
    assert 1 not in llama.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogate_is_refused(demo: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        demo.encode(text)


def test_token_bytes_add_up_to_the_text(demo: Tokenizer) -> None:
    text = "naïve 日本 🙂🙂 <|im_end|> x"
    assert b"".join(map(demo.token_bytes, demo.encode(text))).decode() == text
    llama = TOKENIZERS["llama"]
    assert llama.token_bytes(BYTES.index("<0xE2>") + 3) == b"\xe2"
    assert llama.token_text(BYTES.index("<0xE2>") + 3) == "\ufffd"
    assert llama.token_text(llama.encode("Hello")[-1]) == "o"
    assert [llama.token_text(i) for i in range(llama.vocab_size) if llama.id_to_token(i) == "▁Hello"] == [" Hello"]
    assert llama.token_bytes(99999) == b""


@pytest.mark.parametrize("name", ["demo", "llama", "gemma"])
def test_text_behind_token_ids_adds_nothing_of_its_own(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("Hello wor")
    for text in ("ld", " Hello", "", "é日\n"):
        both = tokenizer.encode_behind(ids, text)
        assert tokenizer.decode(both) == tokenizer.decode(ids) + text
        assert both[: len(ids)] == ids or name != "demo"


def test_eos_ids_come_from_every_file(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
        generation_config={"eos_token_id": [5, 7]},
        config={"eos_token_id": 0},
    )
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (0, 2, 5, 7)


def test_tokens_only_the_config_declares_are_added(tmp_path: Path) -> None:
    declared = {"4096": {"content": "<tool>", "special": False}, "4097": {"content": "<end>", "special": True}}
    folder = write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": declared, "eos_token": "<end>"})
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == 4098
    assert tokenizer.encode("<tool><end>") == [4096, 4097]
    assert tokenizer.eos_token_ids == (4097,)
    assert tokenizer.decode([4096, 4097]) == "<tool>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer", "{"),
        ("tokenizer", '{"model": {"type": "Nothing"}}'),
        ("tokenizer_config", "[1]"),
        ("tokenizer_config", "\ud800".encode("utf-8", "surrogatepass")),
        ("tokenizer_config", "[" * 100_000),
        ("tokenizer_config", '{"added_tokens_decoder": {"9": {"content": "<new>"}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"x": {"content": "<new>"}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"9": {}}}'),
        ("tokenizer_config", '{"extra_special_tokens": "abc"}'),
        ("tokenizer_config", '{"chat_template": 5}'),
        ("generation_config", '{"eos_token_id": "2"}'),
        ("generation_config", '{"eos_token_id": [-1]}'),
        ("generation_config", '{"eos_token_id": true}'),
        ("config", "not json"),
    ],
)
def test_bad_files_are_checkpoint_errors(tmp_path: Path, name: str, content: str | bytes) -> None:
    write_folder(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=str(tmp_path) if "template" not in str(content) else "template"):
        Tokenizer.from_pretrained(tmp_path)


def test_missing_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_decoder_that_cannot_stream_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="CTC"):
        sentencepiece_like(decoders.CTC())
    with pytest.raises(UnsupportedError, match="Strip"):
        sentencepiece_like(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]))


def test_a_pair_of_texts() -> None:
    tokenizer = UNBOUNDED["word pieces"]

    def written(ids: list[int]) -> str:
        return " ".join(str(tokenizer.id_to_token(i)) for i in ids)

    pair = tokenizer.encode_pair("do not", "not doing .")
    assert written(pair.ids) == "[CLS] do not [SEP] not do ##ing . [SEP]"
    assert (pair.second_start, pair.second) == (4, [4, 5, 6, 7])
    right, left = pair.cut(7, keep_end=False), pair.cut(7, keep_end=True)
    assert right is not None
    assert left is not None
    assert written(right.ids) == "[CLS] do not [SEP] not do [SEP]"
    assert written(left.ids) == "[CLS] do not [SEP] ##ing . [SEP]"
    assert right.second_start == left.second_start == 4
    assert pair.cut(4, keep_end=False) is None
