"""Packed weights in a file: packed once for a checkpoint, mapped by every later start.

    <checkpoint>/.lmkit/packed-<checkpoint>-<packing>.safetensors      or, if that folder cannot be written,
    <cache directory>/packed/<folder>/packed-...

`<checkpoint>` stands for its weights and the sources that pack them, `<packing>` for how they were packed. When a new
file is written, files of other checkpoints are removed; files of other packings stay. The file holds the tensors of the
kernels' layouts, 64-byte aligned, and nothing else. A load finds out the layout of each linear by itself
(layers/outline.py) and takes tensors of exactly those shapes and dtypes. Nothing else in the file is trusted.

Header and data have checksums. That of the data takes time, so an engine computes it while it serves.

One process packs while others wait for it (a lock on the folder). The file gets its name once it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from torch import Tensor

from lmkit.environment import environment
from lmkit.errors import JSON_ERRORS, CheckpointError
from lmkit.formats.atomic import sync_directory
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.safetensors_file import DTYPES, SafetensorsFile, TensorInfo
from lmkit.formats.safetensors_stream import ALIGNMENT, SafetensorsStream
from lmkit.layers.linear import Weights
from lmkit.layers.outline import WeightKind, kind_of
from lmkit.log import get_logger
from lmkit.models.identity import checkpoint_identity, packing_identity
from lmkit.models.resolved import ResolvedModel
from lmkit.private_folder import OTHERS_WRITE, make_private
from lmkit.qtensor import QTensor

log = get_logger(__name__)

FOLDER = ".lmkit"
HEADER_BYTES = 16 << 10  # for one layer
TENSOR_HEADER_BYTES = 512  # for a tensor of the checkpoint, if layers have many
SPARE_BYTES = 256 << 20  # a new file leaves at least that much free on its disk


Kinds = dict[str, WeightKind]  # by role


def kinds_of(weights: Weights) -> Kinds:
    """The kinds of a layer's linears. Linears are its matrices."""
    matrices = {role: w for role, w in weights.items() if isinstance(w, QTensor) or w.ndim == 2}
    return {role: kind_of(weight) for role, weight in matrices.items()}


class PackedFile:
    """An open cache file. `kinds` has each layer's linears and, last, the head's; `take` gives tensors.

    Raises CheckpointError if anything in the header differs from how it was written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        metadata = self._file.metadata
        if metadata.get("key") != key:
            raise CheckpointError(f"{path}: made for another checkpoint or packing")
        if metadata.get("checksum") != _checksum(self._file, metadata):
            raise CheckpointError(f"{path}: its header is damaged")
        try:
            self.kinds = msgspec.json.decode(metadata.get("kinds", ""), type=list[Kinds])
        except JSON_ERRORS as error:
            raise CheckpointError(f"{path}: {error}") from None

    def read_ahead(self) -> None:
        """Fetch the file from the disk in the background."""
        self._file.read_ahead()

    def check(self) -> None:
        """Raise CheckpointError if the data differs from how it was written."""
        found = self._file.data_crc32()
        if found is not None:
            self.check_crc32(found)

    def check_crc32(self, found: int) -> None:
        """Raise CheckpointError unless this is the checksum of the data as it was written."""
        if self._file.metadata.get("data_crc32") != f"{found:08x}":
            raise CheckpointError(f"{self.path}: its data is damaged")

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """The entries of all tensors, by name."""
        return self._file.infos

    def has(self, name: str) -> bool:
        return name in self._file.infos

    def info(self, name: str, outline: Tensor) -> TensorInfo:
        """The place of the tensor `name`. It must have the shape and dtype of `outline`."""
        if not self.has(name) or self._file.infos[name].start % ALIGNMENT:
            raise CheckpointError(f"{self.path}: tensor {name} is missing or not aligned")
        info = self._file.infos[name]
        if (DTYPES[info.dtype], info.shape) != (outline.dtype, outline.shape):
            raise CheckpointError(f"{self.path}: tensor {name} is not {outline.dtype} {list(outline.shape)}")
        return info

    def take(self, name: str, outline: Tensor) -> Tensor:
        """The tensor `name`, mapped. It must have the shape and dtype of `outline`."""
        self.info(name, outline)
        return self._file.tensor(name)


class PackedWriter:
    """Takes packed tensors in any order, and the kinds of the weights they were packed from, in order."""

    def __init__(self, stream: SafetensorsStream) -> None:
        self._stream = stream
        self.kinds: list[Kinds] = []

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        with _writing():
            self._stream.add(name, tensor.cpu())
        return tensor


class _UnwritableError(Exception):
    """The cache cannot be written. This is no error of the checkpoint that is being read meanwhile."""


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise _UnwritableError(str(error)) from None


class PackedCache:
    """The cache file of one checkpoint and packing, below `parent` if it is given."""

    def __init__(self, model: ResolvedModel, parent: Path | None = None) -> None:
        reader, self._checkpoint = model.reader, model.reader.path
        checkpoint, how = checkpoint_identity(reader), packing_identity(model.packing)
        self.key = checkpoint + how
        self.stem = f"packed-{checkpoint[:16]}-"
        self.name = f"{self.stem}{how[:16]}.safetensors"
        self.folders = [folder for folder in cache_folders(reader.path, parent) if _is_trusted(folder, reader.path)]
        layers, tensors = model.spec.num_layers, len(reader.names())
        self._header_bytes = max(HEADER_BYTES * (layers + 2), TENSOR_HEADER_BYTES * tensors)
        self._rejected: set[tuple[Path, int]] = set()  # path and inode of files that do not fit

    def open(self) -> PackedFile | None:
        """The file, if it exists and is complete."""
        for folder in self.folders:
            path = folder / self.name
            if path.exists():
                try:
                    return PackedFile(path, self.key)
                except CheckpointError as error:
                    self.reject(path, error)
        return None

    def reject(self, path: Path, reason: Exception) -> None:
        """Mark a file that does not fit, so that it is written again."""
        log.warning("the weights are packed anew: %s", reason)
        with suppress(OSError):
            self._rejected.add((path, path.stat().st_ino))

    def create(self, write: Callable[[PackedWriter], None], num_bytes: int) -> str:
        """Write the file, of about `num_bytes`, unless another process has just written it. Returns the reason if that
        is not possible, or an empty text."""
        reason: Exception | str = "no folder for them is this user's own"
        for folder in self.folders:
            try:
                with _locked(folder, self._checkpoint):
                    if not self._is_written(folder / self.name):
                        self._write(folder, write, num_bytes)
                    return ""
            except _UnwritableError as error:
                reason = error
        return str(reason)

    def _is_written(self, path: Path) -> bool:
        return path.exists() and (path, path.stat().st_ino) not in self._rejected

    def _write(self, folder: Path, write: Callable[[PackedWriter], None], num_bytes: int) -> None:
        with _writing():
            if (free := shutil.disk_usage(folder).free) < (needed := num_bytes + SPARE_BYTES):
                raise CheckpointError(f"{folder}: {free >> 20} MiB are free, {needed >> 20} MiB needed")
            for other in folder.glob("packed-*.partial"):  # left by a process that was killed
                other.unlink()
        partial = folder / f"{self.name}.{os.getpid()}.partial"
        log.info("packing the weights once, for this and later starts")
        log.debug("packing into %s", folder / self.name)
        try:
            with _writing():
                stream = SafetensorsStream(partial, self._header_bytes)
            with stream:
                writer = PackedWriter(stream)
                write(writer)
                with _writing():
                    stream.finish(self._metadata(stream, writer))
            with _writing():
                partial.replace(folder / self.name)
                sync_directory(folder)
        finally:
            partial.unlink(missing_ok=True)
        for other in folder.glob("packed-*.safetensors"):
            if not other.name.startswith(self.stem):
                with suppress(OSError):
                    other.unlink()

    def _metadata(self, stream: SafetensorsStream, writer: PackedWriter) -> dict[str, str]:
        metadata = {"format": "pt", "key": self.key, "kinds": msgspec.json.encode(writer.kinds).decode()}
        metadata["data_crc32"] = f"{stream.data_crc32:08x}"
        return metadata | {"checksum": _checksum(stream, metadata)}


def check_in_background(file: PackedFile, damaged: Callable[[str], None]) -> None:
    """Check a file that is being served. If it is damaged, remove it and call `damaged` with one line.

    The thread runs when the machine has nothing else to do.
    """

    def check() -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        start = time.perf_counter()
        try:
            file.check()
        except CheckpointError as error:
            damaged(f"{error}; {_removed(file.path)}")
        else:
            log.debug("packed weights checked in %.1f s", time.perf_counter() - start)

    # The exit waits for the thread, which then stops: one that the exit froze would end the process with an error.
    threading.Thread(target=check, name="check-weights").start()


def _removed(path: Path) -> str:
    """Remove a damaged file, and say what comes next."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"it cannot be removed ({error.strerror}): remove it, or turn packed_cache off"
    return "it is removed, and the next start packs the weights anew"


def cache_folders(checkpoint: Path, parent: Path | None = None) -> list[Path]:
    """The folders that may hold the packed weights of a checkpoint, the preferred one first. Below `parent`, if it is
    given."""
    own = hashlib.sha256(os.fsencode(checkpoint.resolve())).hexdigest()[:16]
    if parent is not None:
        return [parent / own]
    private, beside = environment().cache_dir / "packed" / own, checkpoint / FOLDER
    is_ours = checkpoint.resolve() == DEMO_FOLDER  # a part of the installation
    return [private] if is_ours or checkpoint.is_file() or beside.is_symlink() else [beside, private]


def _is_trusted(folder: Path, checkpoint: Path) -> bool:
    """Whether nobody can write to a cache folder who cannot write to the checkpoint, or to files of this user."""
    if not folder.is_dir():
        return True  # it is made so
    try:
        if folder.parent != checkpoint:
            os.close(make_private(folder))
            return True
        here, there = folder.stat(), checkpoint.stat()
    except OSError as error:
        log.warning("%s: %s; its packed weights are not used", folder, error.strerror)
        return False
    owners = (os.geteuid(), 0, there.st_uid)
    if here.st_uid in owners and not here.st_mode & ~there.st_mode & OTHERS_WRITE:
        return True
    log.warning("%s: others may write to it and not to the checkpoint, so it is not used; remove it", folder)
    return False


def _make(folder: Path, checkpoint: Path) -> None:
    if folder.parent != checkpoint:
        os.close(make_private(folder))
    elif not folder.is_dir():
        folder.mkdir(exist_ok=True)  # another start may make it at the same moment
        folder.chmod(folder.stat().st_mode & (checkpoint.stat().st_mode | ~OTHERS_WRITE))


@contextmanager
def _locked(folder: Path, checkpoint: Path) -> Iterator[None]:
    """Make a folder and lock it, once no other process holds the lock."""
    with _writing():
        _make(folder, checkpoint)
        if not os.access(folder, os.W_OK):
            raise CheckpointError(f"{folder}: is not writable")
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _writing():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process, which packs weights into %s", folder)
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _checksum(file: SafetensorsFile | SafetensorsStream, metadata: dict[str, str]) -> str:
    """Hex digest of the whole header without the checksum itself."""
    entries = sorted((name, info.dtype, info.shape, info.start) for name, info in file.infos.items())
    others = sorted((name, value) for name, value in metadata.items() if name != "checksum")
    return hashlib.sha256(repr((entries, others)).encode()).hexdigest()
