"""Texts and conversations to calibrate or evaluate with, one document at a time.

Sources: .txt; .jsonl, .json and .parquet with rows in one of several schemas (quant.data.rows); folders of these;
folders that `datasets` saved; `hub:ORG/NAME`, `hub:ORG/NAME/CONFIG@SPLIT`; names in calibration/presets.yaml.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from lmkit.config import StrictStruct, parse
from lmkit.errors import JSON_ERRORS, CheckpointError, ConfigError
from lmkit.extras import needed_for
from lmkit.quant.data.rows import COLUMNS, Document, nothing_usable, read_row, row_documents

PRESETS = Path(__file__).parents[2] / "data" / "calibration" / "presets.yaml"
SUFFIXES = (".txt", ".jsonl", ".parquet", ".json")
HUB_DOCUMENTS = 4096  # limit for a dataset of the hub (its beginning) and for a saved one (evenly spaced)
HUB_NAME = re.compile(r"hub:(?P<path>[^/@]+/[^/@]+)(?:/(?P<name>[^@]+))?(?:@(?P<split>.+))?")


class Preset(StrictStruct, frozen=True):
    """A named data set: a file beside presets.yaml or a dataset of the hub."""

    file: str | None = None
    sha256: str | None = None  # of `file`
    licence: str | None = None  # of `file`
    path: str | None = None  # of the hub's dataset
    name: str | None = None
    data_files: str | None = None
    revision: str | None = None
    split: str = "train"


def documents(source: str) -> Iterator[Document]:
    """The documents of one source. Raises ConfigError or CheckpointError; the error names the file and the row."""
    presets, path = load_presets(), Path(source)
    if source in presets:
        yield from _preset_documents(source, presets[source])
    elif (hub := HUB_NAME.fullmatch(source)) is not None:
        given = {key: value for key, value in hub.groupdict().items() if value is not None}
        yield from _hub_documents(source, msgspec.convert(given, Preset))
    elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved_documents(path)
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        files = [file for file in found if file.suffix != ".json"] or found  # beside others, .json describes them
        if not files:
            raise ConfigError(f"calibration data {path}: no {', '.join(SUFFIXES)} file in this folder")
        for file in files:
            yield from read_documents(file)
    elif path.exists():
        yield from read_documents(path)
    else:
        raise ConfigError(_unknown(source, presets))


def _unknown(source: str, presets: Iterable[str]) -> str:
    name, colon, weight = source.rpartition(":")
    if colon and (name in presets or Path(name).exists()):
        return f"calibration data {source!r}: the weight of {name} must be a number, not {weight!r}"
    return f"calibration data {source!r}: no such file or folder, and not one of {', '.join(presets)} or hub:ORG/NAME"


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
    """Texts and conversations of one file. Raises ConfigError or CheckpointError; the error names the file and the
    row."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise ConfigError(f"calibration data {file}: expected one of {', '.join(SUFFIXES)}")
    try:
        yield from readers[file.suffix](file)
    except OSError as error:
        raise CheckpointError(f"calibration data {file}: cannot read: {error}") from None


def _read_txt(file: Path) -> Iterator[Document]:
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise CheckpointError(f"calibration data {file}:{line}: not UTF-8 text: {error}") from None
    if not text.strip():
        raise ConfigError(f"calibration data {file}: the file is empty")
    yield text


def _read_jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        yield from row_documents(_json_rows(lines, file), file)


def _read_json(file: Path) -> Iterator[Document]:
    """A list of rows, an object with one list of rows, or, as some files are named so, rows in lines."""
    content = file.read_bytes()
    try:
        data = msgspec.json.decode(content)
    except JSON_ERRORS:
        yield from row_documents(_json_rows(content.splitlines(), file), file)
        return
    lists = [value for value in data.values() if isinstance(value, list)] if isinstance(data, dict) else []
    in_object = len(lists) == 1 and all(isinstance(row, dict) for row in lists[0]) and read_row(data) is None
    rows = data if isinstance(data, list) else lists[0] if in_object else [data]
    if unreadable := next((row for row in rows if not isinstance(row, dict | list | str)), None):
        raise CheckpointError(f"calibration data {file}: a row is not a JSON object: {str(unreadable)[:64]}")
    yield from row_documents(rows, file)


def _json_rows(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, Any] | list[dict[str, Any]] | str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=dict[str, Any] | list[dict[str, Any]] | str)
            except JSON_ERRORS as error:
                raise CheckpointError(f"calibration data {file}:{number}: not a JSON object: {error}") from None


def _read_parquet(file: Path) -> Iterator[Document]:
    with needed_for(f"calibration data {file}"):
        import pyarrow
        from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            columns = [name for name in names if name.lower() in COLUMNS]
            if not columns:
                raise ConfigError(nothing_usable(file, "no column holds a text", names))
            rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
            yield from row_documents(rows, file)
    except pyarrow.ArrowException as error:
        raise CheckpointError(f"calibration data {file}: not a readable Parquet file: {error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"calibration data {file}: not UTF-8 text: {error}") from None


def _saved_documents(folder: Path) -> Iterator[Document]:
    """Documents of a folder that `save_to_disk` of the `datasets` library wrote."""
    with needed_for(f"calibration data {folder}"):
        import datasets
        import pyarrow

    try:
        data = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise CheckpointError(f"calibration data {folder}: not a readable dataset: {_first_line(error)}") from None
    if isinstance(data, datasets.DatasetDict):
        name = "train" if "train" in data else next(iter(data), "")
        if name != "train" and len(data) != 1:
            splits = ", ".join(data)
            raise ConfigError(f"calibration data {folder}: no split `train` among {splits}; name one: {folder}/SPLIT")
        data = data[name]
    count = min(len(data), HUB_DOCUMENTS)
    yield from row_documents((data[i * len(data) // count] for i in range(count)), folder)


def _hub_documents(name: str, preset: Preset) -> Iterator[Document]:
    """The beginning of a dataset of the Hugging Face hub, streamed. Raises ConfigError if it cannot be reached."""
    import httpx

    with needed_for(f"calibration data {name}"):
        import datasets

    try:
        stream = datasets.load_dataset(
            preset.path,
            preset.name,
            data_files=preset.data_files,
            revision=preset.revision,
            split=preset.split,
            streaming=True,
        )
        yield from row_documents(stream.take(HUB_DOCUMENTS), name)
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"calibration data {name}: cannot load {preset.path} from the hub ({_first_line(error)}); give a local "
            f".txt, .jsonl, .json or .parquet file, or `demo`"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
