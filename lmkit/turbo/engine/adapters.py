"""The adapters of an engine: they are read beside its steps, on all ranks, and requests bring them to places.

set_adapter -> EngineAdapters -- ReadAdapter --> RankAdapters of each rank: a thread reads
                              <-- AdapterRead -- each rank
               all have read it: it has a name   -- PlaceAdapter --> each rank, between the same two plans
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, LMKitError, RequestError
from lmkit.log import get_logger
from lmkit.models.adapters import DecoderAdapters
from lmkit.turbo.adapters import AdapterChange, AdapterRead, DropAdapter, LoadedAdapter, PlaceAdapter, ReadAdapter

log = get_logger(__name__)


class RankAdapters:
    """Carries out the changes of adapters on a rank. A thread reads their files: `answer` is called there."""

    def __init__(self, adapters: DecoderAdapters | None, rank: int, answer: Callable[[AdapterRead], None]) -> None:
        self._adapters, self._rank, self._answer = adapters, rank, answer
        self._thread = ThreadPoolExecutor(1, "adapters")

    def change(self, change: AdapterChange) -> None:
        assert self._adapters is not None
        match change:
            case ReadAdapter(key, folder):
                reading = self._thread.submit(self._adapters.read, key, folder)
                reading.add_done_callback(partial(self._say, key))
            case PlaceAdapter(number, key):
                self._adapters.place(number, key)
            case DropAdapter(key):
                self._adapters.drop(key)

    def _say(self, key: int, reading: Future[str]) -> None:
        error = reading.exception()
        if error is None:
            self._answer(AdapterRead(self._rank, key, reading.result()))
            return
        if not isinstance(error, LMKitError):
            log.error("an adapter cannot be read", exc_info=error)
        self._answer(AdapterRead(self._rank, key, error=str(error) or type(error).__name__))

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()


@dataclass
class _Call:
    """A call of `set` that is not done."""

    name: str
    folder: str | None
    answer: Future[str | None] = field(default_factory=Future)
    key: int = -1
    path: str = ""
    reads: list[AdapterRead] = field(default_factory=list)  # of the ranks so far


class EngineAdapters:
    """The adapters of an engine by name. All stay in host memory. One that a request names is brought to a place: a
    free one, or that of the adapter that no request has named for longest.
    """

    def __init__(
        self, adapters: DecoderAdapters | None, config: EngineConfig, tell: Callable[[AdapterChange], None]
    ) -> None:
        """`adapters` has those of `config`; None = there are no places. `tell` says a change to the other ranks."""
        self._root, self._num_ranks, self._tell = config.adapter_root, config.num_processes, tell
        self.is_used: Callable[[int], bool] = lambda number: False  # whether sequences have the adapter of a number
        self.placed: dict[str, LoadedAdapter] = {}  # by name, the one named last at the end
        self._known: dict[str, tuple[int, str]] = {}  # key and digest, by name
        self._free: list[int] = []  # numbers
        self._calls: deque[_Call] = deque()  # the first one is under way
        self._reads: SimpleQueue[AdapterRead] = SimpleQueue()
        self.heard = self._reads.put  # takes a rank's answer, from any thread
        self._here = RankAdapters(adapters, 0, self.heard)
        if adapters is not None:
            self._known = dict(zip(config.adapter_folders, adapters.digests.items(), strict=True))
            self._free = list(range(adapters.count))[::-1]
            for name, (_, digest) in itertools.islice(self._known.items(), adapters.count):
                self.placed[name] = LoadedAdapter(self._free.pop(), digest)
        self._keys = itertools.count(len(self._known))

    def has_work(self) -> bool:
        """Whether to call `advance`."""
        return bool(self._calls)

    def set(self, name: str, folder: str | None) -> Future[str | None]:
        """See Engine.set_adapter."""
        call = _Call(name, folder)
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin(call)
        return call.answer

    def advance(self, seconds: float = 0.0) -> None:
        """Take in what ranks have read. If there is nothing, wait for it, so long at most."""
        with suppress(Empty):
            while self._calls:
                read = self._reads.get(timeout=seconds)
                seconds, call = 0.0, self._calls[0]
                assert read.key == call.key
                call.reads.append(read)
                if len(call.reads) == self._num_ranks:
                    self._finish(call)

    def bring(self, name: str) -> None:
        """Bring an adapter to a place, unless it has one or is unknown. Raises RequestError if all places are used."""
        if name in self.placed:
            self.placed[name] = self.placed.pop(name)
        elif name in self._known:
            if not self._free:
                unused = (other for other, known in self.placed.items() if not self.is_used(known.number))
                if (longest := next(unused, None)) is None:
                    message = "requests use all places for adapters; try again when some have ended"
                    raise RequestError("overloaded", message)
                self._take_out(longest)
            self._put(name)

    def close(self) -> None:
        """End calls that are not done with an error, and wait for the thread."""
        for call in self._calls:
            call.answer.set_exception(RequestError("engine_unavailable", "the engine has ended"))
        self._calls.clear()
        self._here.close()

    def _begin(self, call: _Call) -> None:
        try:
            path = inside(self._root, call.folder or ".")
            self._check_unused(call.name)
            if call.folder is None:
                if call.name not in self._known:
                    raise RequestError("not_found", f"no adapter {call.name[:64]!r} is loaded", "lora_name")
                self._forget(call.name)
        except Exception as error:  # noqa: BLE001 - it is this call's
            self._end(call, error)
            return
        if call.folder is None:
            self._end(call, None)
        else:
            call.key, call.path = next(self._keys), str(path)
            self._change(ReadAdapter(call.key, call.path))

    def _finish(self, call: _Call) -> None:
        """All ranks have answered."""
        try:
            digest = self._digest_of(call)
            self._check_unused(call.name)
        except Exception as error:  # noqa: BLE001 - it is this call's
            self._change(DropAdapter(call.key))
            self._end(call, error)
            return
        if call.name in self._known:
            self._forget(call.name)
        self._known[call.name] = call.key, digest
        if self._free:
            self._put(call.name)
        self._end(call, call.path)

    def _end(self, call: _Call, outcome: str | Exception | None) -> None:
        """Answer a call, and begin the next one."""
        self._calls.popleft()
        if isinstance(outcome, Exception):
            call.answer.set_exception(outcome)
        else:
            call.answer.set_result(outcome)
        if self._calls:
            self._begin(self._calls[0])

    def _digest_of(self, call: _Call) -> str:
        """Raises CheckpointError if a rank cannot use the adapter, or has another one. It names the folder as the
        caller does, who need not know where the adapter_root is."""
        assert call.folder is not None
        for read in sorted(call.reads, key=lambda read: read.rank):
            if read.error:
                error = read.error.replace(call.path, call.folder)
                raise CheckpointError(f"rank {read.rank}: {error}" if read.rank else error)
        digests = {read.digest for read in call.reads}
        if len(digests) > 1:
            raise CheckpointError(f"{call.folder}: the ranks found different files there; give all the same")
        return digests.pop()

    def _check_unused(self, name: str) -> None:
        if name in self.placed and self.is_used(self.placed[name].number):
            raise RequestError("overloaded", f"requests use the adapter {name[:64]!r}; try again when they have ended")

    def _forget(self, name: str) -> None:
        if name in self.placed:
            self._take_out(name)
        key, _ = self._known.pop(name)
        self._change(DropAdapter(key))

    def _put(self, name: str) -> None:
        key, digest = self._known[name]
        self.placed[name] = LoadedAdapter(self._free.pop(), digest)
        self._change(PlaceAdapter(self.placed[name].number, key))

    def _take_out(self, name: str) -> None:
        number = self.placed.pop(name).number
        self._change(PlaceAdapter(number, None))
        self._free.append(number)

    def _change(self, change: AdapterChange) -> None:
        """Carry out a change on all ranks. No step under way uses what it changes."""
        self._tell(change)
        self._here.change(change)


def inside(root: str | None, folder: str) -> Path:
    """A folder that a caller names, below the folder of all that may be loaded. Raises RequestError."""
    if root is None:
        raise RequestError("permission_denied", "no adapters may be loaded: start with --adapter-root FOLDER")
    base = Path(root).resolve()
    with suppress(OSError, ValueError):  # a name that is too long, or that no file can have
        path = Path(os.path.realpath(base / folder))  # no error for links in a circle
        if path.is_relative_to(base) and path.is_dir():
            return path
    raise RequestError("not_found", f"{folder[:256]!r} is no folder inside the --adapter-root", "lora_path")
