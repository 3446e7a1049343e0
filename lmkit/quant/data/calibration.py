"""Calibration data: documents of one or several sources (quant.data.sources) as rows of tokens.

Long texts are cut into pieces. The pieces are shuffled with the seed, tokenized until there are enough tokens, joined,
and cut into rows of equal length. Conversations go through the model's chat template. Sources that are given by name
alone form one pool. With weights, each source fills its share of the rows, and the rows are shuffled.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from lmkit.config import StrictStruct
from lmkit.errors import ConfigError, RequestError
from lmkit.log import get_logger
from lmkit.quant.data.rows import Document
from lmkit.quant.data.sources import documents
from lmkit.quant.sections import CalibrationRecipe, DatasetRecipe
from lmkit.text import Tokenizer

log = get_logger(__name__)


class SourceReport(StrictStruct, frozen=True):
    """The data that one source gave.

    `sha256` hashes its documents in order. Each document is its length (8 bytes, little-endian) and then the UTF-8 of a
    text or the JSON of a conversation.
    """

    source: str
    weight: float | None  # None = in a pool with the other names
    samples: int  # rows of the source, or of its pool
    documents: int
    empty: int  # left out
    short: int  # documents with fewer characters than a row has tokens; they are joined with the next ones
    sha256: str


@dataclass(frozen=True)
class CalibrationData:
    """`rows` int64 [num_samples, seq_len]. `sha256` hashes the tokens of the rows and identifies the calibration."""

    rows: Tensor
    dataset: tuple[str, ...]
    sha256: str
    sources: tuple[SourceReport, ...] = ()

    def report(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "dataset": self.dataset, "rows": len(self.rows), "seq_len": self.rows.shape[1], "sha256": self.sha256,
            "sources": msgspec.to_builtins(self.sources),
        }  # fmt: skip


class TooLittleTextError(ConfigError):
    """The sources have fewer tokens than the rows take."""


@dataclass(frozen=True)
class _Part:
    """Sources that together fill one share of the rows."""

    names: tuple[str, ...]
    weight: float | None


def load_calibration(recipe: CalibrationRecipe, tokenizer: Tokenizer) -> CalibrationData:
    """Rows for a recipe. Raises ConfigError for an unknown source or too little text, CheckpointError for bad files."""
    if not recipe.has_text:
        return CalibrationData(torch.empty(0, recipe.seq_len, dtype=torch.int64), (), "")
    parts = _parts(recipe.dataset)
    counts = _shares(recipe.num_samples, parts)
    rows, sources = [], []
    for part, count in zip(parts, counts, strict=True):
        tallies = [_Tally(name, recipe.seq_len) for name in part.names]
        pieces = [
            piece for tally in tallies for piece in _pieces(tally.count(documents(tally.source)), 16 * recipe.seq_len)
        ]
        rows.append(_rows(pieces, part, count, recipe, tokenizer))
        sources += [tally.report(part.weight, count) for tally in tallies]
    order = list(range(recipe.num_samples))
    if len(parts) > 1:
        random.Random(recipe.seed).shuffle(order)
    joined = torch.cat(rows)[order]
    digest = hashlib.sha256(joined.numpy().tobytes()).hexdigest()
    return CalibrationData(joined, tuple(report.source for report in sources), digest, tuple(sources))


def encode_dataset(source: str, tokenizer: Tokenizer, count: int) -> list[int]:
    """At most `count` tokens of a source's documents, in their order, as a text to evaluate on.

    Raises the errors of `load_calibration`.
    """
    pieces = _pieces(_Tally(source, 0).count(documents(source)), 8192)
    return (tokenizer.start + _tokens(pieces, count, tokenizer, source))[:count]


def parse_source(argument: str) -> str | dict[str, Any]:
    """A command line's `NAME` or `NAME:WEIGHT` as a recipe's entry. Raises ConfigError."""
    name, colon, text = argument.rpartition(":")
    if not colon or Path(argument).exists():
        return argument
    try:
        weight = float(text)
    except ValueError:
        return argument
    if not 0 < weight < math.inf:
        raise ConfigError(f"--calibration {argument}: the weight must be a number above 0")
    return {"source": name, "weight": weight}


def _parts(dataset: str | Sequence[str | DatasetRecipe]) -> list[_Part]:
    entries = [dataset] if isinstance(dataset, str) else list(dataset)
    names = tuple(entry for entry in entries if isinstance(entry, str))
    if len(names) == len(entries):
        return [_Part(names, None)]
    weighted = [DatasetRecipe(entry) if isinstance(entry, str) else entry for entry in entries]
    return [_Part((entry.source,), entry.weight) for entry in weighted]


def _shares(num_samples: int, parts: Sequence[_Part]) -> list[int]:
    """Rows of each part, in proportion to the weights and rounded by the largest remainder."""
    weights = [part.weight or 1.0 for part in parts]
    exact = [num_samples * weight / math.fsum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: num_samples - sum(counts)]:
        counts[i] += 1
    for part, count in zip(parts, counts, strict=True):
        if count == 0:
            raise ConfigError(
                f"calibration data {part.names[0]}: a weight of {part.weight:g} among {math.fsum(weights):g} is less "
                f"than one of {num_samples} samples; raise it, or num_samples"
            )
    return counts


@dataclass
class _Tally:
    """Counts and hashes a source's documents while they are read."""

    source: str
    seq_len: int
    num_documents: int = 0
    short: int = 0
    empty: list[int] = field(default_factory=list)  # rows, from 1
    digest: Any = field(default_factory=hashlib.sha256)

    def count(self, found: Iterable[Document]) -> Iterator[Document]:
        """The documents that are not empty."""
        for document in found:
            self.num_documents += 1
            if isinstance(document, str):
                text, content = document, document.encode(errors="surrogatepass")
            else:
                text, content = "".join(message["content"] for message in document), msgspec.json.encode(document)
            self.digest.update(len(content).to_bytes(8, "little") + content)
            if not document:
                self.empty.append(self.num_documents)
                continue
            self.short += len(text) < self.seq_len
            yield document
        if self.empty:
            log.warning(
                "calibration data %s: %d of %d rows hold no text and are left out, the first: row %d",
                self.source, len(self.empty), self.num_documents, self.empty[0],
            )  # fmt: skip

    def report(self, weight: float | None, samples: int) -> SourceReport:
        return SourceReport(
            source=self.source,
            weight=weight,
            samples=samples,
            documents=self.num_documents,
            empty=len(self.empty),
            short=self.short,
            sha256=self.digest.hexdigest(),
        )


def _rows(pieces: list[Document], part: _Part, count: int, recipe: CalibrationRecipe, tokenizer: Tokenizer) -> Tensor:
    """int64 [count, seq_len]"""
    random.Random(recipe.seed).shuffle(pieces)
    start = tokenizer.start
    width = recipe.seq_len - len(start)
    ids = _tokens(pieces, count * width, tokenizer, ", ".join(part.names))
    if len(ids) < count * width:
        raise TooLittleTextError(
            f"calibration data {', '.join(part.names)}: {len(ids):,} tokens, too short for {count} samples of "
            f"{recipe.seq_len}; lower num_samples or seq_len to fit, or give more text"
        )
    body = torch.tensor(ids[: count * width]).view(count, width)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(count, -1), body], dim=1)


def _tokens(pieces: Iterable[Document], count: int, tokenizer: Tokenizer, where: str) -> list[int]:
    """The tokens of the first pieces, `count` or a few more, or of all pieces.

    Conversations that the chat template refuses are left out with a warning. Raises ConfigError if it refuses all.
    """
    ids: list[int] = []
    refused: list[str] = []
    for piece in pieces:
        if len(ids) >= count:
            break
        try:
            ids += _encode(piece, tokenizer)
        except RequestError as error:
            refused.append(error.message)
    if refused and not ids:
        raise ConfigError(f"calibration data {where}: the chat template refuses every conversation: {refused[0]}")
    if refused:
        log.warning(
            "calibration data %s: the chat template refuses %d conversations, which are left out; the first: %s",
            where, len(refused), refused[0],
        )  # fmt: skip
    return ids


def _encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document, add_special_tokens=False)
    if tokenizer.chat_template is None:
        raise ConfigError("calibration data has conversations, the model no chat template; use data with `text`")
    return tokenizer.encode_chat(document, add_generation_prompt=False)


def _pieces(found: Iterable[Document], size: int) -> Iterator[Document]:
    """Parts of about `size` characters.

    Long texts are cut where a line ends. Short texts are joined with the next ones, as the rows of some datasets are
    single lines. Conversations stay whole.
    """
    text = ""
    for document in found:
        if not isinstance(document, str):
            yield document
            continue
        text += document if document.endswith("\n") else document + "\n"
        start = 0
        while len(text) - start >= size:
            end = text.rfind("\n", start, start + size) + 1 or start + size
            yield text[start:end]
            start = end
        text = text[start:]
    if text.strip():
        yield text
