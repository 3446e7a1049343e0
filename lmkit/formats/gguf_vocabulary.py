"""A GGUF file's vocabulary, checked: tokens, their types, the ids with a meaning, and the ids that end a sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from lmkit.formats.gguf_file import GgufFile

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 21
MAX_TOKEN_CHARS = 1 << 12
NO_ID = 0xFFFFFFFF  # -1 as writers put it

# Name of an id -> its key.
ID_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id",
    "pad": "padding_token_id", "cls": "cls_token_id", "mask": "mask_token_id", "eot": "eot_token_id",
    "eom": "eom_token_id", "fim_pad": "fim_pad_token_id", "fim_rep": "fim_rep_token_id", "fim_sep": "fim_sep_token_id",
    "fim_pre": "fim_pre_token_id", "fim_suf": "fim_suf_token_id", "fim_mid": "fim_mid_token_id",
    "prefix": "prefix_token_id", "suffix": "suffix_token_id", "middle": "middle_token_id",  # older names of these
}  # fmt: skip
# Texts of tokens that end a sequence, as llama.cpp knows them: many files name one such id and have several.
ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
# These also stand for a tag of HTML or a filler: they end a sequence where the file calls them control tokens.
CONTROL_ENDS = frozenset(("</s>", "<PAD>", "[PAD]", "<REPO>"))


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Kind:
    """What holds for a value of `tokenizer.ggml.model` where the file does not say."""

    ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False


KINDS: Mapping[str, Kind] = {
    "gpt2": Kind({}),
    "gemma4": Kind({}, add_bos=True),
    "llama": Kind({"bos": 1, "eos": 2, "unk": 0}, add_bos=True, space_prefix=True),
    "t5": Kind({"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "bert": Kind({"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103}, add_bos=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. `ids` has those of ID_KEYS that the file names or its kind implies."""

    path: Path
    kind: str
    pre: PreTokenizer
    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool

    def text(self, name: str) -> str | None:
        """The token whose id has this name in ID_KEYS."""
        return self.tokens[self.ids[name]] if name in self.ids else None

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def ends(self) -> frozenset[int]:
        """Ids of tokens that end a sequence: those that the file names, and those known by their text."""
        named = {self.ids[name] for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if name in self.ids}
        if self.kind == "bert":
            return frozenset()
        id_of = {token: i for i, token in enumerate(self.tokens) if token in ENDS or token in CONTROL_ENDS}
        known = {i for token, i in id_of.items() if token not in CONTROL_ENDS or self.types[i] == TokenType.CONTROL}
        if {"<|call|>", "<|return|>"} <= id_of.keys() or {"<|flush|>", "<|calls|>"} <= id_of.keys():
            known.discard(id_of.get("<|end|>", -1))  # there it ends a message, and not the turn
        if "<|tool_response>" in id_of:
            known.discard(id_of.get("</s>", -1))
        return frozenset(known | named)


def has_tokenizer(file: GgufFile) -> bool:
    """Whether the file says how texts become tokens."""
    return file.metadata.get(PREFIX + "model", "none") not in ("none", "no_vocab")


@lru_cache(maxsize=1)
def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The file's vocabulary, read once for all that is made of it.

    Raises CheckpointError for metadata that is broken, and UnsupportedError for a kind that is not known.
    """
    name = setting(file, "model", str, None)
    if name not in KINDS:
        raise UnsupportedError(f"{file.path}: tokenizer.ggml.model is {name!r}; lmkit reads {', '.join(KINDS)}")
    kind, pre = KINDS[name], _pre_tokenizer(file, name)
    tokens = _tokens(file)
    types = numbers(file, "token_type", len(tokens), TokenType.NORMAL, int)
    ids = _ids(file, kind, types)
    add_bos = setting(file, "add_bos_token", bool, kind.add_bos or pre.add_bos) or name in ("gemma4", "bert")
    add_eos = setting(file, "add_eos_token", bool, kind.add_eos)
    for wanted, needed in ((add_bos, "bos"), (add_eos, "eos"), (name == "bert", "sep")):
        if wanted and needed not in ids:
            raise CheckpointError(f"{file.path}: a {needed} token is to be added, and {ID_KEYS[needed]} is missing")
    return Vocabulary(file.path, name, pre, tokens, types, ids, add_bos, add_eos)


def setting(file: GgufFile, key: str, kind: type, default: Any) -> Any:
    """The value of `tokenizer.ggml.`key. Raises CheckpointError if it has another type."""
    value = file.metadata.get(PREFIX + key, default)
    if value is not default and type(value) is not kind:
        raise CheckpointError(f"{file.path}: {PREFIX}{key} is {value!r:.40}, expected {kind.__name__}")
    return value


def numbers(file: GgufFile, key: str, count: int, default: float, kind: type) -> list[Any]:
    """A finite number for each of `count` tokens; `default` for all if the key is missing."""
    values = file.array(PREFIX + key)
    if not values:
        return [default] * count
    if len(values) < count or not ({*map(type, values)} <= {int, kind} and all(map(isfinite, values))):
        raise CheckpointError(
            f"{file.path}: {PREFIX}{key}: expected {count} numbers ({kind.__name__}), one a token; it has {len(values)}"
        )
    return values[:count]


def _pre_tokenizer(file: GgufFile, kind: str) -> PreTokenizer:
    name = "gemma4" if kind == "gemma4" else setting(file, "pre", str, "default")
    if kind in ("gpt2", "gemma4") and name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{file.path}: tokenizer.ggml.pre {name!r:.60} is not known; lmkit knows {known}")
    return PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.array(PREFIX + "tokens")
    if not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{file.path}: {PREFIX}tokens: expected a list of texts")
    if len(tokens) > MAX_TOKENS or max(map(len, tokens)) > MAX_TOKEN_CHARS:
        limits = f"more than {MAX_TOKENS} tokens, or one of more than {MAX_TOKEN_CHARS} characters"
        raise CheckpointError(f"{file.path}: {PREFIX}tokens: {limits}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise CheckpointError(f"{file.path}: {PREFIX}tokens: token {twice!r:.60} is there twice")
    return tokens


def _ids(file: GgufFile, kind: Kind, types: list[int]) -> dict[str, int]:
    marked = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids = {name: i for name, i in kind.ids.items() if i < len(types) and types[i] in marked}
    for name, key in ID_KEYS.items():
        value = setting(file, key, int, None)
        if value is None or value in (NO_ID, -1):
            continue
        if not 0 <= value < len(types):
            raise CheckpointError(f"{file.path}: {PREFIX}{key} is {value}, and there are {len(types)} tokens")
        ids[name] = value
    return ids
