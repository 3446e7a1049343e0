"""A checkpoint's tokenizer.

`tokenizer.json` decides ids and decoding, or where there is none a tiktoken file (`tiktoken_file`).
`tokenizer_config.json` and files of older checkpoints add special tokens (`special_tokens`) and chat templates
(`template_files`). `generation_config.json` and `config.json` add the ids that end a sequence.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from lmkit.errors import CheckpointError, LMKitError, RequestError
from lmkit.small_files import exists, read
from lmkit.text import tiktoken_file
from lmkit.text.decoding import decoder_stages
from lmkit.text.messages import has_images
from lmkit.text.sentence_settings import lower_if_asked
from lmkit.text.special_tokens import CONFIG, add_special_tokens, read_config
from lmkit.text.template import ChatTemplate
from lmkit.text.template_files import chosen_template, given_template, read_templates
from lmkit.text.token_length import MAX_GROWTH, Growth, max_token_chars

if TYPE_CHECKING:
    from lmkit.text.grammar import Grammars

MAX_TOKENIZER_BYTES = 512 << 20


class EncodedPair(NamedTuple):
    """Two texts as one prompt."""

    ids: list[int]
    types: list[int]  # of each token: 1 from where the second text begins, if the model tells the texts apart
    second: list[int]  # positions of the second text's tokens, without special ones

    @property
    def second_start(self) -> int | None:
        return self.types.index(1) if 1 in self.types else None

    def cut(self, room: int, *, keep_end: bool) -> EncodedPair | None:
        """The pair with fewer tokens of the second text, `room` in all; None if that text has too few."""
        surplus = max(len(self.ids) - room, 0)
        if surplus > len(self.second):
            return None
        dropped = set(self.second[:surplus] if keep_end else self.second[len(self.second) - surplus :])
        kept = [i for i in range(len(self.ids)) if i not in dropped]
        return EncodedPair([self.ids[i] for i in kept], [self.types[i] for i in kept], [])


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads at once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        named_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        image_text: tuple[re.Pattern[str], str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.named_tokens = dict(named_tokens or {})  # "bos_token" -> its text, and so on
        self.chat_template = chat_template
        self.image_text = image_text  # what a template writes for an image, and what the model reads in its place
        self.bos_token_id: int | None = backend.token_to_id(self.named_tokens.get("bos_token", ""))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max_token_chars(backend, vocab)
        self._growth = Growth(backend.normalizer)
        self.make_stages = decoder_stages(backend.decoder)
        self._pieces: dict[int, str | None] = {}
        self._grammars: dict[int, Grammars] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read a folder, in which only tokenizer.json or a tiktoken file must exist, or a GGUF file.

        `chat_template` stands in place of the folder's: the name of one of its templates, or see `given_template`.
        Raises ConfigError for a wrong one, CheckpointError and UnsupportedError.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        with _library_errors(lambda why: CheckpointError(f"{file}: cannot read the tokenizer: {why}")):
            try:
                return cls._read(folder, _backend(folder, file), chat_template)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot read the tokenizer: {error}") from None

    @classmethod
    def _read(cls, folder: Path, backend: tokenizers.Tokenizer, chat_template: str | None) -> Tokenizer:
        config = read_config(folder / CONFIG)
        named = add_special_tokens(backend, folder, config)
        lower_if_asked(backend, folder)
        templates = read_templates(folder, config)
        if chat_template is not None:
            templates = {"default": templates.get(chat_template) or given_template(chat_template)}
        eos = [i for i in [backend.token_to_id(named.get("eos_token", ""))] if i is not None]
        eos += listed_ends(folder)
        return cls(
            backend,
            eos_token_ids=tuple(sorted(set(eos))),
            named_tokens=named,
            chat_template=chosen_template(templates, named),
            image_text=_image_text(config, named),
        )

    @property
    def start(self) -> list[int]:
        """BOS, if the tokenizer begins a text with it. The model then expects it in front of every sequence."""
        start = self.encode("")[:1]
        return start if start == [self.bos_token_id] else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens that are written out in it are recognised, as the tokenizer does."""
        with _library_errors(lambda _: RequestError("internal_error", "the model's tokenizer fails on this text")):
            try:  # the batch call releases the interpreter lock and skips offsets
                self._check_growth(text)
                ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            except (TypeError, UnicodeEncodeError):
                raise RequestError("invalid_request", "the text is not valid Unicode (lone surrogate)") from None
        return ids

    def encode_pair(self, first: str, second: str, *, special: bool = True) -> EncodedPair:
        """The tokens of two texts that a model reads together, as the tokenizer puts them."""
        with _library_errors(lambda _: RequestError("internal_error", "the model's tokenizer fails on this text")):
            try:
                self._check_growth(first + second)
                encoded = self.backend.encode_batch_fast([(first, second)], add_special_tokens=special)[0]
            except (TypeError, UnicodeEncodeError):
                raise RequestError("invalid_request", "the text is not valid Unicode (lone surrogate)") from None
        return EncodedPair(encoded.ids, encoded.type_ids, [i for i, n in enumerate(encoded.sequence_ids) if n == 1])

    def _check_growth(self, text: str) -> None:
        if self._growth.is_too_much(text):
            message = f"the model's tokenizer makes more than {MAX_GROWTH} times as many characters of this text"
            raise RequestError("invalid_request", message)

    def encode_behind(self, ids: Sequence[int], text: str) -> list[int]:
        """Token ids of a text that begins with `ids` and goes on with `text`.

        The given ids stay, unless this tokenizer writes `text` in another way after other text than alone. Then the
        whole text is encoded anew.
        """
        new = self.encode(text, add_special_tokens=False)
        if b"".join(map(self.token_bytes, new)) == text.encode():
            return [*ids, *new]
        return self.encode(self.decode(ids, skip_special_tokens=False) + text, add_special_tokens=False)

    def encode_ending(self, before: Sequence[int], text: str) -> tuple[list[int], int]:
        """As `encode_behind`, and how many of the ids `before` the result begins with."""
        ids = self.encode_behind(before, text)
        return ids, next(
            (i for i, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before)
        )

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, without tokenizing it. 0 if this tokenizer allows no bound."""
        return -(-len(text) // self.max_token_chars) if self.max_token_chars else 0

    def check_length(self, text: str, context: int, param: str) -> None:
        """Raise RequestError if `text` certainly has more tokens than `context`.

        Call this before `encode`, which takes about 0.4 s and 120 MB for a million characters.
        """
        if (num_tokens := self.min_tokens(text)) > context:
            message = (  # clients that retry with a larger model look for the first words, which are OpenAI's
                f"this model's maximum context length is {context} tokens, and the {param} has {num_tokens} or more; "
                "shorten it"
            )
            raise RequestError("context_length_exceeded", message, param, n_prompt_tokens=num_tokens, n_ctx=context)

    def check_template(self) -> None:
        """Raise CheckpointError if there is a chat template that does not compile, before a request needs it."""
        if self.chat_template is not None:
            _ = self.chat_template.parameters

    @cached_property
    def template_tokens(self) -> int | None:
        """How many tokens the chat template makes of the shortest message. None: there is none, or it refuses that."""
        try:
            text = self.render_chat([{"role": "user", "content": "a"}])
        except RequestError:
            return None
        return len(self.encode(text, add_special_tokens=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as one text. Encode it without further special tokens, because the template writes them.

        Raises RequestError if there is no template, or if it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "invalid_request",
                "this model has no chat template, as base models: send texts to /v1/completions of `lmkit serve`, or "
                "call pipe(text) in Python",
                "messages",
            )
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools
        )
        if self.image_text is None or not any(has_images(message.get("content")) for message in messages):
            return text
        mark, read = self.image_text
        return mark.sub(lambda _: read, text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the rendered conversation. Only the template writes BOS, so there is never a second one."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def grammars(self, vocab_size: int) -> Grammars:
        """Grammars over this tokenizer's tokens, for logits of `vocab_size`. Made at the first call.

        Raises RequestError if this tokenizer cannot follow a grammar.
        """
        from lmkit.text.grammar import Grammars

        with self._lock:
            if vocab_size not in self._grammars:
                self._grammars[vocab_size] = Grammars(self.backend.to_str(), self.eos_token_ids, vocab_size)
            return self._grammars[vocab_size]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a token (a padded vocabulary has some) decode to nothing."""
        text: str = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return text  # the batch call releases the interpreter lock

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry as tokenizer.json writes it, or None."""
        if token_id not in self._pieces:
            if not 0 <= token_id < self.vocab_size:
                return None
            self._pieces[token_id] = self.backend.id_to_token(token_id)
        return self._pieces[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text. They are not always valid UTF-8 by themselves."""
        piece = self.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        data: str | bytes = piece
        for stage in self.make_stages():
            data = stage.alone(data)
        return data.encode() if isinstance(data, str) else data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for display. Incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


@contextmanager
def _library_errors(error: Callable[[str], LMKitError]) -> Iterator[None]:
    """Raise `error` where the tokenizers library fails on a file that it has read.

    It then raises a plain `Exception`, or a `PanicException`, which is no `Exception`.
    """
    try:
        yield
    except BaseException as raised:
        if type(raised) is Exception or type(raised).__name__ == "PanicException":
            raise error(str(raised).partition("\n")[0]) from None
        raise


def _backend(folder: Path, file: Path) -> tokenizers.Tokenizer:
    """What `file` describes, or a tiktoken file where there is no such file."""
    if not exists(file) and (ranks := tiktoken_file.file_of(folder)) is not None:
        return tiktoken_file.backend(ranks, read_config(folder / CONFIG))
    return tokenizers.Tokenizer.from_buffer(read(file, MAX_TOKENIZER_BYTES))


def listed_ends(folder: Path) -> list[int]:
    """The ids that end a sequence, as generation_config.json and config.json have them. Raises CheckpointError."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return [i for file in files for i in _eos_ids(read_config(file).get("eos_token_id"), file)]


def _eos_ids(value: Any, where: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id={value!r}: expected a token id or a list of them")
    return ids


def _image_text(config: Mapping[str, Any], named: Mapping[str, str]) -> tuple[re.Pattern[str], str] | None:
    """A model's mark of an image in a template, and what transformers' processor makes of it before it counts tokens.
    Tokens join what stands beside them, so the text is changed, not the tokens.

    Gemma 3: marks of begin and end around the token of its cells, and line breaks. InternVL: such marks alone. Idefics
    2: a space before a word.
    """
    if config.get("processor_class") == "Idefics2Processor":
        return re.compile(r"<image>(?=[^\s<])"), "<image> "
    if config.get("processor_class") == "InternVLProcessor":
        begin, image, end = (named.get(f"{name}_token", "") for name in ("start_image", "context_image", "end_image"))
        return (re.compile(re.escape(image)), f"{begin}{image}{end}") if image else None
    marks = [named.get(f"{name}_token", "") for name in ("boi", "image", "eoi")]
    if config.get("processor_class") != "Gemma3Processor" or not all(marks):
        return None
    return re.compile(re.escape(marks[0])), f"\n\n{''.join(marks)}\n\n"
