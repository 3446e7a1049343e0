"""Calibration data: text from local files, presets or the hub, as rows of tokens.

Sources: .txt; .jsonl and .parquet with `text`, or with `messages` that go through the model's chat template; folders of
these; names in calibration/presets.yaml, where `demo` is a small text that comes with lmkit. Long texts are cut into
pieces, pieces are shuffled with the seed, tokenized until there is enough, joined, and cut into rows of equal length.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from torch import Tensor

from lmkit.config import StrictStruct, parse
from lmkit.errors import CheckpointError, ConfigError, RequestError
from lmkit.log import get_logger
from lmkit.quant.recipe import CalibrationRecipe
from lmkit.text import Tokenizer

log = get_logger(__name__)

PRESETS = Path(__file__).parents[1] / "data" / "calibration" / "presets.yaml"
SUFFIXES = (".txt", ".jsonl", ".parquet")
HUB_DOCUMENTS = 4096  # of a hub dataset, which is streamed: its beginning, shuffled

Messages = list[dict[str, Any]]
Document = str | Messages


class Preset(StrictStruct, frozen=True):
    """Where a named data set lies: a file beside presets.yaml, or a dataset of the hub."""

    file: str | None = None
    sha256: str | None = None  # of `file`
    path: str | None = None  # of the hub's dataset
    name: str | None = None
    data_files: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class CalibrationData:
    """`rows` int64 [num_samples, seq_len]; `sha256` of the rows' tokens tells two calibrations apart."""

    rows: Tensor
    dataset: tuple[str, ...]
    sha256: str


def load_calibration(recipe: CalibrationRecipe, tokenizer: Tokenizer) -> CalibrationData:
    """Rows for a recipe. Raises ConfigError for an unknown source or too little text, CheckpointError for bad files."""
    names = (recipe.dataset,) if isinstance(recipe.dataset, str) else recipe.dataset
    pieces = [piece for name in names for piece in _pieces(_documents(name), 16 * recipe.seq_len)]
    random.Random(recipe.seed).shuffle(pieces)
    prefix = _row_prefix(tokenizer)
    width = recipe.seq_len - len(prefix)
    ids: list[int] = []
    for piece in pieces:
        if len(ids) >= recipe.num_samples * width:
            break
        ids += _encode(piece, tokenizer)
    if len(ids) < recipe.num_samples * width:
        raise ConfigError(
            f"calibration data {', '.join(names)}: {len(ids):,} tokens, too short for {recipe.num_samples} samples of "
            f"{recipe.seq_len}; lower num_samples or seq_len to fit, or give more text"
        )
    body = torch.tensor(ids[: recipe.num_samples * width]).view(recipe.num_samples, width)
    rows = torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(recipe.num_samples, -1), body], dim=1)
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    return CalibrationData(rows, names, digest)


def _row_prefix(tokenizer: Tokenizer) -> list[int]:
    """BOS, if the tokenizer starts a text with it: the model expects it in every sequence."""
    start = tokenizer.encode("")[:1]
    return start if start == [tokenizer.bos_token_id] else []


def _encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document, add_special_tokens=False)
    if tokenizer.chat_template is None:
        raise ConfigError("calibration data has `messages`, but the model has no chat template; use data with `text`")
    try:
        return tokenizer.encode_chat(document, add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"calibration data: the chat template refuses a conversation: {error.message}") from None


def _pieces(documents: Iterable[Document], size: int) -> Iterator[Document]:
    """Parts of about `size` characters: long texts are cut where a line ends, short ones joined with what follows (the
    rows of some datasets are single lines); conversations stay whole."""
    text = ""
    for document in documents:
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


def _documents(name: str) -> Iterator[Document]:
    """The documents of one preset, file or folder."""
    presets = load_presets()
    path = Path(name)
    if name in presets:
        yield from _preset_documents(name, presets[name])
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ConfigError(f"calibration data {path}: no {', '.join(SUFFIXES)} file in this folder")
        for file in files:
            yield from read_documents(file)
    elif path.exists():
        yield from read_documents(path)
    else:
        raise ConfigError(f"calibration data {name!r}: no such file or folder, and not one of {', '.join(presets)}")


def load_presets() -> dict[str, Preset]:
    data = yaml.safe_load(PRESETS.read_text("utf-8"))
    return parse(data, dict[str, Preset], str(PRESETS))


def _preset_documents(name: str, preset: Preset) -> Iterator[Document]:
    if preset.file is None:
        yield from _hub_documents(name, preset)
        return
    file = PRESETS.parent / preset.file
    if _sha256(file) != preset.sha256:
        raise CheckpointError(f"{file}: not the text that presets.yaml describes (sha256 differs); reinstall lmkit")
    yield from read_documents(file)


def read_documents(file: Path) -> Iterator[Document]:
    """Texts and conversations of one file. Raises ConfigError/CheckpointError naming the file and the row."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise ConfigError(f"calibration data {file}: expected one of {', '.join(SUFFIXES)}")
    try:
        yield from readers[file.suffix](file)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"calibration data {file}: cannot read: {error}") from None


def _read_txt(file: Path) -> Iterator[Document]:
    text = file.read_text("utf-8")
    if not text.strip():
        raise ConfigError(f"calibration data {file}: the file is empty")
    yield text


def _read_jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        yield from _row_documents(_json_rows(lines, file), file)


def _json_rows(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise CheckpointError(f"calibration data {file}:{number}: not a JSON object: {error}") from None


def _read_parquet(file: Path) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in ("text", "messages") if name in table.schema_arrow.names]
            if not columns:
                found = ", ".join(table.schema_arrow.names)
                raise ConfigError(f"calibration data {file}: no column `text` or `messages`, only {found}")
            rows = (row for batch in table.iter_batches(columns=columns[:1]) for row in batch.to_pylist())
            yield from _row_documents(rows, file)
    except pyarrow.ArrowException as error:
        raise CheckpointError(f"calibration data {file}: not a readable Parquet file: {error}") from None


def _row_documents(rows: Iterable[dict[str, Any]], where: object) -> Iterator[Document]:
    count = 0
    for count, row in enumerate(rows, 1):
        text, messages = row.get("text"), row.get("messages")
        if isinstance(text, str):
            yield text
        elif isinstance(messages, list) and messages and all(map(_is_message, messages)):
            yield messages
        else:
            raise ConfigError(
                f"calibration data {where}: row {count} has neither `text` (a string) nor `messages` (a list of "
                "objects with `role` and `content`)"
            )
    if count == 0:
        raise ConfigError(f"calibration data {where}: no rows")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _hub_documents(name: str, preset: Preset) -> Iterator[Document]:
    """The beginning of a dataset of the Hugging Face hub, streamed. Raises ConfigError if it cannot be reached."""
    import datasets
    import httpx

    try:
        stream = datasets.load_dataset(
            preset.path, preset.name, data_files=preset.data_files, split=preset.split, streaming=True
        )
        yield from _row_documents(stream.take(HUB_DOCUMENTS), name)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"calibration data {name}: cannot load {preset.path} from the hub ({reason}); give a local .txt, .jsonl or "
            f".parquet file, or `demo`"
        ) from None


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
