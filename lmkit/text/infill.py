"""Fill in the middle: prompts of a text before and a text after the answer, by the tokens that a model has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmkit.errors import RequestError

if TYPE_CHECKING:
    from lmkit.text.tokenizer import Tokenizer

# Names that files give the three tokens: those of tokenizer_config.json, which a GGUF file's metadata become.
NAMES = (
    ("fim_pre_token", "fim_suf_token", "fim_mid_token"),
    ("fim_prefix_token", "fim_suffix_token", "fim_middle_token"),
    ("prefix_token", "suffix_token", "middle_token"),
)
# Their texts where no file names them: before the prefix, before the suffix, before the answer.
TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),  # Mistral's: the suffix comes first, and the answer follows the prefix
)
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<reponame>")  # before each file of several
# These end an answer, too: what follows is another file.
ENDS = (
    "<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|repo_name|>", "<reponame>", "<|fim_pad|>", "<fim_pad>",
    "<|endoftext|>", "\u2581<EOT>", "<EOT>", "<|cursor|>",
)  # fmt: skip


class Marks(NamedTuple):
    """Token ids of a model that fills in."""

    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first
    file: int | None  # before another file's name
    ends: tuple[int, ...]  # that end an answer

    def prompt(self, start: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt for tokens `before` and `after` the answer. `start` is BOS, or nothing."""
        if self.middle is None:
            return [*start, self.suffix, *after, self.prefix, *before]
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]


def find_marks(tokenizer: Tokenizer) -> Marks | None:
    """The tokens that a tokenizer has for it: those that its files name, or such as are known; None without any."""
    to_id, named = tokenizer.backend.token_to_id, tokenizer.named_tokens
    by_name = [tuple(named.get(name, "") for name in names) for names in NAMES]
    for prefix, suffix, middle in [texts for texts in by_name if all(texts)] + list(TEXTS):
        ids = to_id(prefix), to_id(suffix), to_id(middle) if middle else None
        if ids[0] is None or ids[1] is None or (middle and ids[2] is None):
            continue
        ends = {ids[0], ids[1], ids[2], *map(to_id, ENDS)} - {None}
        file = next((id for text in FILES if (id := to_id(text)) is not None), None)
        return Marks(ids[0], ids[1], ids[2], file, tuple(sorted(id for id in ends if id is not None)))
    return None


def marks(tokenizer: Tokenizer, param: str) -> Marks:
    """As `find_marks`. Raises RequestError for a model that has none."""
    if (found := find_marks(tokenizer)) is None:
        message = f"{param}: this model's tokenizer has no tokens for it, so it cannot fill in the middle of a text"
        raise RequestError("unsupported_parameter", message, param)
    return found
