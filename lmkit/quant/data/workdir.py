"""The work folder of a quantization, `.NAME.partial` beside the output. It lets a killed run resume.

manifest.json                the identity of the run; a run with another identity is refused
hidden-0.f32 hidden-1.f32    hidden states before the present layer and of the next, in turn (hidden_states.py)
hidden-scratch               hidden states inside the present layer
rank-1/                      the same files of another process
layer-00003.safetensors      tensors of a finished layer, as the checkpoint will hold them
layer-00003.kv.safetensors   statistics of its keys and values
layer-00003.json             its report and more, and checksums of both; it is written last and marks the layer as
                             finished
layer-00003.parts/           the finished experts of a layer that is not finished, if they are held one at a time
                             (layer/split_layer.py): a checkpoint of each, with its report and a checksum
schemes.json                 the schemes that were chosen within a budget of bits
checkpoint/                  the result while it is put together; it is moved out of the folder whole
complete                     marks that the result is about to be moved; files that remain afterwards are waste
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.atomic import lock, put_in_place, refuse_occupied, sync_directory, write_errors, write_file
from lmkit.formats.checkpoint import SINGLE
from lmkit.formats.safetensors_file import SafetensorsFile, write_safetensors
from lmkit.jsonfile import parse_json, read_json, to_json
from lmkit.log import get_logger

log = get_logger(__name__)
T = TypeVar("T")

MANIFEST, COMPLETE, CHECKPOINT = "manifest.json", "complete", "checkpoint"
PARTS, PART = ".parts", "part.json"
MAX_JSON_BYTES = 256 << 20
CRC_BYTES = 16 << 20  # read at a time


class Committed(msgspec.Struct):
    """A finished layer."""

    crc32: list[int]  # of the layer's other files
    record: msgspec.Raw


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: its bytes have changed since they were written; start over with --restart")


@dataclass(frozen=True)
class WorkFolder:
    """`path` is the work folder of the output `target`."""

    path: Path
    target: Path

    @classmethod
    def beside(cls, output: str | Path) -> WorkFolder:
        target = Path(os.path.realpath(output))
        return cls(target.parent / f".{target.name}.partial", target)

    @property
    def num_done(self) -> int:
        """The number of finished layers, counted from the first."""
        count = 0
        while self._layer(count, ".json").exists():
            count += 1
        return count

    def states(self, rank: int) -> Path:
        """The folder of one process's hidden states."""
        folder = self.path / f"rank-{rank}" if rank else self.path
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def remove_states(self, rank: int) -> None:
        """Remove the hidden states of a process. It may run on another machine than the one that publishes."""
        shutil.rmtree(self.path / f"rank-{rank}", ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def layer_file(self, index: int) -> Path:
        return self._layer(index, ".safetensors")

    def commit(
        self,
        index: int,
        tensors: dict[str, Tensor],
        stats: Any,
        record: bytes,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Mark a layer as finished: write its tensors, the tensors and numbers of the dataclass `stats`, and the JSON
        `record`. `written`: see write_safetensors."""
        kv = {
            field.name: value if isinstance(value, Tensor) else torch.tensor(value)
            for field in dataclasses.fields(stats)
            if isinstance(value := getattr(stats, field.name), Tensor | int | float)
        }
        for file, content in zip(self._layer_files(index), (tensors, kv), strict=True):
            file.unlink(missing_ok=True)  # it may remain from a run that was killed before the layer was finished
            write_safetensors(file, content, written)
        sync_directory(self.path)
        committed = Committed(list(map(crc32, self._layer_files(index))), msgspec.Raw(record))
        self._write(self._layer(index, ".json"), msgspec.json.encode(committed))

    def record(self, index: int, kind: type[T]) -> T:
        """The JSON record that was passed to `commit`. Raises CheckpointError."""
        return self._decoded(index, kind, self._committed(index).record)

    def check(self, index: int) -> None:
        """Raise CheckpointError if a file of a finished layer is not what `commit` wrote."""
        for file, expected in zip(self._layer_files(index), self._committed(index).crc32, strict=False):
            try:
                found = crc32(file)
            except OSError as error:
                raise CheckpointError(f"{file}: {error.strerror}; start over with --restart") from None
            if found != expected:
                raise damaged(file)

    def _committed(self, index: int) -> Committed:
        try:
            data = self._layer(index, ".json").read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self._layer(index, '.json')}: {error.strerror}") from None
        return self._decoded(index, Committed, data)

    def _decoded(self, index: int, kind: type[T], data: bytes | msgspec.Raw) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._layer(index, '.json')}: {error}") from None

    def keep(self, name: str, data: bytes) -> None:
        """Write a file of that name. It stays until the run is over."""
        self._write(self.path / name, data)

    def kept(self, name: str) -> bytes:
        """The data that was passed to `keep`; empty if there is none yet."""
        file = self.path / name
        return file.read_bytes() if file.exists() else b""

    def restore(self, index: int, stats: Any) -> None:
        """Fill the dataclass `stats` with the values that `commit` stored. Raises CheckpointError."""
        file = SafetensorsFile(self._layer(index, ".kv.safetensors"))
        for name in file.infos:
            tensor = file.tensor(name).clone()
            try:
                is_number = not isinstance(getattr(stats, name), Tensor | None)
                setattr(stats, name, tensor.item() if is_number else tensor)
            except (AttributeError, RuntimeError):  # a name that is none, several numbers for one
                raise CheckpointError(f"{self.path}: {name!r} is damaged; delete this folder and start anew") from None

    def new_checkpoint(self) -> Path:
        """An empty folder for the result. The folder of an earlier attempt is removed."""
        folder = self.path / CHECKPOINT
        shutil.rmtree(folder, ignore_errors=True)
        with write_errors(folder):
            folder.mkdir()
        return folder

    def publish(self) -> None:
        """Move the whole result to its place and remove the rest."""
        write_file(self.path / COMPLETE, b"")
        put_in_place(self.path / CHECKPOINT, self.target)
        shutil.rmtree(self.path, ignore_errors=True)

    def part(self, index: int, name: str) -> Path:
        """The folder of a finished part of a layer that is not finished."""
        return self._layer(index, PARTS) / name

    def keep_part(self, folder: Path, write: Callable[[Path], None], record: bytes) -> None:
        """Mark a part as finished: `write(folder)` writes its tensors, and `record` is JSON."""
        new = folder.with_name(folder.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        with write_errors(new):
            new.mkdir(parents=True)
        write(new)
        content = Committed([crc32(new / SINGLE)], msgspec.Raw(record))
        write_file(new / PART, msgspec.json.encode(content))
        new.rename(folder)
        sync_directory(folder.parent)

    def kept_part(self, folder: Path) -> bytes:
        """The record of a finished part; empty if it is not finished. Raises CheckpointError if its bytes changed."""
        if not (folder / PART).exists():
            return b""
        found = msgspec.json.decode((folder / PART).read_bytes(), type=Committed)
        if found.crc32 != [crc32(folder / SINGLE)]:
            raise damaged(folder / SINGLE)
        return bytes(found.record)

    def drop_parts(self, index: int) -> None:
        """Remove the parts of a finished layer."""
        shutil.rmtree(self._layer(index, PARTS), ignore_errors=True)

    @property
    def has_work(self) -> bool:
        """Whether there is something to go on from."""
        return bool(self.num_done) or any(self.path.glob(f"layer-*{PARTS}/*/{PART}"))

    def _layer_files(self, index: int) -> tuple[Path, Path]:
        return self.layer_file(index), self._layer(index, ".kv.safetensors")

    def _layer(self, index: int, suffix: str) -> Path:
        return self.path / f"layer-{index:05d}{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file that appears whole or not at all."""
        new = path.with_name(path.name + ".new")
        write_file(new, data)
        new.rename(path)
        sync_directory(self.path)

    def _begin(self, identity: dict[str, Any], *, restart: bool) -> None:
        """Resume the same run, or begin. Raises ConfigError if the folder holds the work of another run."""
        manifest, content = self.path / MANIFEST, to_json(identity)
        if manifest.exists() and self.has_work and not restart:
            stored = read_json(manifest, MAX_JSON_BYTES)
            if different := differences(stored, parse_json(content, "identity")):
                raise ConfigError(
                    f"{self.path}: holds {self.num_done} finished layers of another run: {'; '.join(different)}; "
                    "start it as before to go on, or start over with --restart"
                )
            for index in range(self.num_done):
                self.check(index)
            return
        for file in self.path.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._write(manifest, content)


@contextmanager
def open_work(
    output: str | Path, identity: dict[str, Any], *, num_layers: int, restart: bool = False
) -> Iterator[WorkFolder]:
    """The locked work folder of one output. If the block raises, finished layers stay so that the run can resume, and
    the log says so. A KeyboardInterrupt carries that line itself.

    `identity` (plain JSON) decides whether existing work belongs to the same run. Raises ConfigError if the output is
    occupied, another process is writing it, or the existing work belongs to another run.
    """
    work = WorkFolder.beside(output)
    held = _claim(work)
    try:
        work._begin(identity, restart=restart)
        try:
            yield work
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_leave(work, num_layers)) from None
        except BaseException:
            log.warning(_leave(work, num_layers))
            raise
    finally:
        os.close(held)


def _claim(work: WorkFolder) -> int:
    """Make the folder and lock it. Returns the lock's descriptor. A lock lives as long as its process."""
    try:
        work.path.parent.mkdir(parents=True, exist_ok=True)
        if (work.path / COMPLETE).exists() and not (work.path / CHECKPOINT).exists():
            shutil.rmtree(work.path)
        refuse_occupied(work.target)
        work.path.mkdir(exist_ok=True)
        fd = os.open(work.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{work.target}: cannot be made: {error.strerror}") from None
    try:
        lock(fd)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"{work.target}: another process is writing it in {work.path.name}") from None
    return fd


def _leave(work: WorkFolder, num_layers: int) -> str:
    """Remove a work folder without a finished layer. Returns what is kept, and how to go on."""
    if work.has_work:
        return (
            f"{work.num_done} of {num_layers} layers are kept in {work.path}; "
            "the same command goes on, --restart starts over"
        )
    shutil.rmtree(work.path, ignore_errors=True)
    return "no layer was finished, so nothing is kept"


def crc32(path: Path) -> int:
    """The checksum of a file's bytes."""
    found = 0
    with path.open("rb") as file:
        while data := file.read(CRC_BYTES):
            found = zlib.crc32(data, found)
    return found


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """`recipe.scheme.group_size was 128, is 64` for every place in which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{where}.{key}".strip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i in range(len(old)) for line in differences(old[i], new[i], f"{where}[{i}]")]
    return [] if old == new else [f"{where} was {_short(old)}, is {_short(new)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:24] + "..."
