"""The tokenizer inside a GGUF file, as tokenizer.json, tokenizer_config.json and generation_config.json of a Hugging
Face checkpoint.

Ids are those of llama.cpp, with special tokens recognised in the text. It differs where llama.cpp approximates the
model's own tokenizer (docs/formats.md).
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec

from lmkit.errors import CheckpointError
from lmkit.formats.gguf_vocabulary import PREFIX, TokenType, Vocabulary, numbers, read_vocabulary, setting

if TYPE_CHECKING:
    from lmkit.formats.gguf_file import GgufFile

MARK = "\u2581"  # SentencePiece's space
NAMES = (
    "bos", "eos", "unk", "sep", "pad", "cls", "mask", "fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle",
)  # fmt: skip
# Keys of general.sampling -> fields of generation_config.json.
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
    "xtc_probability": "xtc_probability", "mirostat": "mirostat",
}  # fmt: skip


def tokenizer_json(file: GgufFile) -> str:
    """The text of a tokenizer.json.

    Raises CheckpointError for metadata that is broken, and UnsupportedError for a tokenizer that is not known.
    """
    vocabulary = read_vocabulary(file)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i} | token for i, token in _added_tokens(file, vocabulary).items()],
        "post_processor": _post_processor(file, vocabulary),
        **_BUILDERS[vocabulary.kind](file, vocabulary),
    }
    return msgspec.json.encode(content).decode()


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json: named tokens, whether they are added, and the chat templates.

    Raises as `tokenizer_json`.
    """
    vocabulary = read_vocabulary(file)
    names = [name for name in NAMES if name in vocabulary.ids]
    if vocabulary.kind == "bert":
        names = [name for name in names if name not in ("bos", "eos", "cls")]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": vocabulary.text(name) for name in names},
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
    }
    if vocabulary.kind == "bert":
        config["cls_token"] = vocabulary.text("bos")
    # As checkpoints have it, but of named tokens alone: others add nothing to tokenizer.json.
    added, named = _added_tokens(file, vocabulary), {vocabulary.ids[name] for name in names}
    config["added_tokens_decoder"] = {str(i): token for i, token in added.items() if i in named}
    context = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    if type(context) is int:
        config["model_max_length"] = context
    if (template := _chat_template(file)) is not None:
        config["chat_template"] = template
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: ids that end a sequence, and the sampling that the file recommends.

    Raises as `tokenizer_json`.
    """
    vocabulary = read_vocabulary(file)
    config: dict[str, Any] = {}
    for name in ("bos", "pad"):
        if name in vocabulary.ids:
            config[f"{name}_token_id"] = vocabulary.ids[name]
    if ends := sorted(vocabulary.ends()):
        config["eos_token_id"] = ends
    if suppressed := file.array(PREFIX + "suppress_tokens"):
        config["suppress_tokens"] = suppressed
    sampling = {}
    for key, field in SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            sampling[field] = (
                float(f"{value:.7g}") if isinstance(value, float) else value
            )  # 0.6 as it was before float32
    if sampling:
        config |= sampling | {"do_sample": sampling.get("temperature") != 0}
    return config


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    """The one template, or the named ones as tokenizer_config.json lists them."""
    key = "tokenizer.chat_template"
    templates: dict[str, Any] = {"default": file.metadata[key]} if key in file.metadata else {}
    templates |= {
        name.removeprefix(key + "."): text for name, text in file.metadata.items() if name.startswith(key + ".")
    }
    for name, text in templates.items():
        if not isinstance(text, str):
            raise CheckpointError(f"{file.path}: chat template {name!r} is {text!r:.40}, expected a text")
    for name in file.array("tokenizer.chat_templates"):
        if name not in templates:
            raise CheckpointError(f"{file.path}: tokenizer.chat_templates names {name!r:.60}, which is not there")
    if templates.keys() - {"default"}:
        return [{"name": name, "template": text} for name, text in templates.items()]
    return templates.get("default")


def _added_tokens(file: GgufFile, vocabulary: Vocabulary) -> dict[int, dict[str, Any]]:
    """Tokens that are recognised in a text before it is cut into words, by id."""
    special = {i for i, kind in enumerate(vocabulary.types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special |= vocabulary.ends()
    defined = {i for i, kind in enumerate(vocabulary.types) if kind == TokenType.USER_DEFINED}
    # llama.cpp knows by the model's name that Phi-3's own tokens take the white space after them.
    phi3 = any(name in str(file.metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return {
        i: {
            "content": vocabulary.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": phi3 and vocabulary.tokens[i] not in kept,
            "normalized": False,
            "special": i in special,
        }
        for i in sorted(special | defined)
    }


def _post_processor(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any] | None:
    """What is put around a text, and between two."""
    bert = vocabulary.kind == "bert"
    begin = ["bos"] * vocabulary.add_bos
    end = ["sep"] if bert else ["eos"] * vocabulary.add_eos
    between = ["sep"] * (not bert and "sep" in vocabulary.ids and setting(file, "add_sep_token", bool, False))
    if not begin + end + between:
        return None

    def part(name: str, type_id: int = 0) -> dict[str, Any]:
        kind, text = ("Sequence", name) if name in ("A", "B") else ("SpecialToken", vocabulary.text(name))
        return {kind: {"id": text, "type_id": type_id}}

    single = [part(name) for name in (*begin, "A", *end)]
    texts = {name: vocabulary.text(name) for name in {*begin, *end, *between}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *(part(name) for name in between), *(part(name, int(bert)) for name in ("B", *end))],
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[name]], "tokens": [text]} for name, text in texts.items()
        },
    }


def _bpe(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """Byte pair encoding: of GPT-2's alphabet of bytes, or of texts whose spaces are marks."""
    pre = vocabulary.pre
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    model = {"ignore_merges": pre.ignore_merges, "merges": _merges(file, vocabulary)}
    if not pre.byte_level:
        return {
            "normalizer": _replace(" ", MARK),
            "pre_tokenizer": _sequence("pretokenizers", splits),
            "decoder": _marks_decoder(prefix=False),
            "model": _bpe_model(vocabulary, **model, byte_fallback=True),
        }
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": _sequence("pretokenizers", [*splits, alphabet]),
        "decoder": alphabet,
        "model": _bpe_model(vocabulary, **model),
    }


def _merges(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The file's merges. A pair that is there twice keeps its first rank."""
    known = set(vocabulary.tokens)
    merges: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(file.array(PREFIX + "merges")):
        text = merge if isinstance(merge, str) else ""
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or left not in known or right not in known or left + right not in known:
            raise vocabulary.error(f"{PREFIX}merges: merge {rank}, {merge!r:.60}, is not of tokens to a token")
        merges[left, right] = None
    if not merges:
        raise vocabulary.error(f"{PREFIX}merges is missing")
    return list(merges)


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE: of all neighbours, those whose token has the highest score are merged first."""
    scores = numbers(file, "scores", len(vocabulary.tokens), 0.0, float)
    prefix = setting(file, "add_space_prefix", bool, True)
    steps = [{"type": "Prepend", "prepend": MARK}] * prefix + [_replace(" ", MARK)]
    return {
        "normalizer": _sequence("normalizers", steps),
        "pre_tokenizer": None,
        "decoder": _marks_decoder(prefix),
        "model": _bpe_model(
            vocabulary,
            merges=_scored_merges(vocabulary, scores),
            unk_token=vocabulary.text("unk"),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _scored_merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two, in the order of the scores; equal scores by id."""
    mergeable = (TokenType.NORMAL, TokenType.UNUSED)
    ids = [i for i, kind in enumerate(vocabulary.types) if kind in mergeable]
    known = {vocabulary.tokens[i] for i in ids}
    merges: list[tuple[str, str]] = []
    for i in sorted(ids, key=scores.__getitem__, reverse=True):
        text = vocabulary.tokens[i]
        cuts = range(len(text) - 1, 0, -1)
        merges += [(left, right) for cut in cuts if (left := text[:cut]) in known and (right := text[cut:]) in known]
    return merges


def _unigram(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's unigram model, with its map of characters."""
    scores = numbers(file, "scores", len(vocabulary.tokens), 0.0, float)
    merged = setting(file, "remove_extra_whitespaces", bool, False)
    steps: list[dict[str, Any]] = []
    if charsmap := file.array(PREFIX + "precompiled_charsmap"):
        if not all(type(byte) is int and -128 <= byte < 256 for byte in charsmap):
            raise vocabulary.error(f"{PREFIX}precompiled_charsmap: expected bytes")
        data = base64.b64encode(bytes(byte & 255 for byte in charsmap)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": data})
    if merged:
        steps += [_replace(r"\A +| +\z", "", "Regex"), _replace(" {2,}", " ", "Regex")]
    if merged or setting(file, "add_space_prefix", bool, False):
        steps.append({"type": "Prepend", "prepend": MARK})
    steps.append(_replace(" ", MARK))
    if "unk" not in vocabulary.ids:
        raise vocabulary.error(f"{PREFIX}unknown_token_id is missing")
    metaspace = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "never", "split": True}
    whole = any(token.rfind(MARK) > 0 for token in vocabulary.tokens)  # such a token may reach over two words
    return {
        "normalizer": _sequence("normalizers", steps),
        "pre_tokenizer": None if whole else metaspace,
        "decoder": metaspace | {"prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.ids["unk"],
            "vocab": list(zip(vocabulary.tokens, scores, strict=True)),
            "byte_fallback": False,
        },
    }


def _word_piece(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """BERT's word pieces. The file marks pieces that begin a word, and BERT the others."""
    lowercase = setting(file, "normalizer.lowercase", bool, True)
    strip = setting(file, "normalizer.strip_accents", bool, lowercase)
    pieces = {
        token if kind == TokenType.CONTROL else token[1:] if token.startswith(MARK) else "##" + token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    }
    if len(pieces) < len(vocabulary.tokens) or "unk" not in vocabulary.ids:
        raise vocabulary.error("the pieces of the vocabulary are not those of BERT, or it has no unknown token")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strip,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.text("unk"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": pieces,
        },
    }


def _bpe_model(vocabulary: Vocabulary, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        **fields,
    }


def _marks_decoder(prefix: bool) -> dict[str, Any]:
    steps = [_replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _sequence("decoders", steps + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix)


def _replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def _sequence(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


_BUILDERS = {"gpt2": _bpe, "gemma4": _bpe, "llama": _sentencepiece, "t5": _unigram, "bert": _word_piece}
