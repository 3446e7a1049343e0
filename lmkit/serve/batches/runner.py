"""Batches on their way: each request goes once through the server's own routes, and its result to the disk.

The file of results is the record: a result stands in it, and is on the disk, before the next request takes its place.
A server that was killed reads it and goes on with the requests that have no result. A request that was under way runs
again, and nobody has seen its first answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from contextvars import Context
from functools import cached_property
from typing import Any, TypeVar, cast
from uuid import uuid4

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp

from lmkit.errors import JSON_ERRORS, RequestError
from lmkit.log import get_logger
from lmkit.serve.auth import Owner
from lmkit.serve.batches import batch as records
from lmkit.serve.batches.batch import ENDED, Batch, Line
from lmkit.serve.batches.figures import BatchFigures
from lmkit.serve.batches.files import Files, write_file
from lmkit.serve.batches.sender import Sender
from lmkit.web.budget import Budget
from lmkit.web.data_folder import DataFolder

MAX_OPEN = 100  # batches of one client that have not ended
MAX_KEPT = 10_000  # batches of all clients; the oldest of those that have ended are forgotten first
TICK = 0.25  # seconds between looks at the clock
SWEEP_SECONDS = 600.0  # between looks for files whose time is over

T = TypeVar("T")
logger = get_logger(__name__)


class Batches:
    """The batches and files of all clients."""

    def __init__(
        self,
        app: ASGIApp,
        data: DataFolder,
        *,
        answers: Budget,
        space: int,
        quota: float,
        max_line_bytes: int,
        max_running: Callable[[], int],
        is_ending: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`answers` bounds the memory of answers on their way to the disk. `space` is in bytes on it, for all files,
        and `quota` the part of it for one client. `max_running` gives the number of requests that run at once; it is
        called when the first one does. `is_ending` says that the server ends: what is under way is left for the next
        one.
        """
        self._data, self._is_ending, self._clock = data, is_ending, clock
        self._sender, self._max_line_bytes = Sender(app, answers, clock), max_line_bytes
        self._batches: dict[str, Batch] = {}
        self.registry = CollectorRegistry()
        self.registry.register(BatchFigures(self._batches.values))
        if data.lasts:
            for path in sorted(data.folder("batches").glob("batch_*.json")):
                try:
                    batch = msgspec.json.decode(path.read_bytes(), type=Batch)
                except JSON_ERRORS as error:
                    logger.error("%s is not read: %s", path, error)
                else:
                    self._batches[batch.id] = batch
        under_way = [name for b in self._open() for name in (b.results_id, b.failures_id)]
        self.files = Files(data, space, quota, clock, keep=under_way, is_used=lambda name: bool(self.user_of(name)))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._max_running = max_running
        self._disk = ThreadPoolExecutor(1, "lmkit-batches")  # in turn, so a reader finds what was written before
        self._waiting: dict[str, deque[bytes]] = {}  # results by file, on their way to the disk

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        """Of all batches, which take turns."""
        return asyncio.Semaphore(self._max_running())

    def start(self) -> None:
        """Go on with the batches of a server before this one. It needs the event loop."""
        for batch in self._open():
            logger.info("%s goes on: %d of %d requests are done", batch.id, batch.completed + batch.failed, batch.total)
            self._run(batch)
        self._sweep()

    def _sweep(self) -> None:
        self.files.expire()
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _open(self) -> Iterator[Batch]:
        return (batch for batch in self._batches.values() if batch.status not in ENDED)

    # ---- what routes ask for

    def of(self, owner: Owner) -> list[Batch]:
        """The client's batches, the oldest first."""
        mine = [batch for batch in self._batches.values() if batch.owner[:2] == owner[:2]]
        return sorted(mine, key=lambda batch: batch.created_at)

    def get(self, owner: Owner, batch_id: str) -> Batch:
        """Raises RequestError if the client has no such batch."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner[:2] != owner[:2]:
            raise RequestError("not_found", "there is no such batch", "batch_id")
        return batch

    def user_of(self, file_id: str) -> str:
        """A batch that reads the file, or an empty text."""
        return next((batch.id for batch in self._open() if batch.input_file_id == file_id), "")

    async def create(self, owner: Owner, seconds: int, kept_seconds: int, **fields: Any) -> Batch:
        """A new batch, which ends after `seconds` at the latest. Raises RequestError if the client has too many."""
        if sum(batch.status not in ENDED for batch in self.of(owner)) >= MAX_OPEN:
            raise RequestError("rate_limit_exceeded", f"{MAX_OPEN} batches have not ended; wait for one, or cancel one")
        now = int(self._clock())
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            owner=owner,
            created_at=now,
            expires_at=now + seconds,
            results_id=self.files.new_id(),
            failures_id=self.files.new_id(),
            kept_seconds=kept_seconds,
            **fields,
        )
        await self._save(batch)
        self._batches[batch.id] = batch
        await self._forget()
        self._run(batch)
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Ask a batch to end. Requests under way are aborted."""
        if batch.status in (*ENDED, "finalizing"):
            raise RequestError("invalid_request", f"the batch is {batch.status}", "batch_id")
        if not batch.is_to_end:
            batch.is_to_end = True
            batch.enter("cancelling", self._clock())
            await self._save(batch)

    async def _forget(self) -> None:
        ended = (batch for batch in self._batches.values() if batch.status in ENDED)
        for batch in sorted(ended, key=lambda batch: batch.created_at)[: max(0, len(self._batches) - MAX_KEPT)]:
            del self._batches[batch.id]
            await self._on_disk(lambda path: path.unlink(missing_ok=True), self._path(batch))

    # ---- one batch

    def _run(self, batch: Batch) -> None:
        task = asyncio.create_task(self._lead(batch), context=Context())  # not that of the request which made it
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _lead(self, batch: Batch) -> None:
        """Take a batch to its end. If the server ends first, the batch stays as it is."""
        try:
            if not batch.total and not await self._validate(batch):
                return
            work = asyncio.create_task(self._work(batch))
            reason = await self._until_over(batch, work)
            if reason == "shutting_down":
                return
            await self._finish(batch, reason)
        except Exception as error:
            logger.error("%s fails", batch.id, exc_info=error)
            why = f"the server's disk: {error.strerror}" if isinstance(error, OSError) else "internal server error"
            batch.errors = [{"code": "server_error", "message": why, "line": None, "param": None}]
            batch.enter("failed", self._clock())
            with suppress(OSError):
                await self._show_files(batch)
                await self._save(batch)
        logger.info("%s: %s, %d done, %d failed", batch.id, batch.status, batch.completed, batch.failed)

    async def _validate(self, batch: Batch) -> bool:
        path = self.files.path(batch.input_file_id)
        check = records.check_file
        batch.total, batch.errors = await asyncio.to_thread(check, path, batch.endpoint, self._max_line_bytes)
        if batch.is_to_end:
            return True
        batch.enter("failed" if batch.errors else "in_progress", self._clock())
        await self._save(batch)
        return not batch.errors

    async def _until_over(self, batch: Batch, work: asyncio.Task[None]) -> str:
        """Why it is over: completed, cancelled, expired or shutting_down."""
        try:
            while True:
                done, _ = await asyncio.wait({work}, timeout=TICK)
                if done:
                    work.result()
                    return "completed"
                if batch.is_to_end:
                    return "cancelled"
                if self._clock() >= batch.expires_at:
                    return "expired"
                if self._is_ending():
                    return "shutting_down"
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def _work(self, batch: Batch) -> None:
        done = await self._recorded(batch)
        pending: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self._requests(batch, done)) as requests:
                async for number, line in requests:
                    await self._slots.acquire()
                    task = asyncio.create_task(self._serve(batch, number, line))
                    task.add_done_callback(lambda _: self._slots.release())
                    pending.add(task)
                    for ended in [task for task in pending if task.done()]:
                        ended.result()  # a disk that is full ends the batch
                        pending.remove(ended)
            await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _requests(self, batch: Batch, done: set[str]) -> AsyncGenerator[tuple[int, Line]]:
        """The requests that have no result."""
        found = records.lines(self.files.path(batch.input_file_id), self._max_line_bytes)

        def advance() -> tuple[int, Line] | None:
            for number, raw in found:
                line = records.parse(raw, batch.endpoint, self._max_line_bytes)
                if line.custom_id not in done:
                    return number, line
            return None

        while (item := await asyncio.to_thread(advance)) is not None:
            yield item

    async def _recorded(self, batch: Batch) -> set[str]:
        """The requests that have a result. It counts them anew: a kill may have come between a result and its count."""
        results, failures = [
            await self._on_disk(records.recorded, self.files.path(name))
            for name in (batch.results_id, batch.failures_id)
        ]
        batch.completed, batch.failed = len(results), len(failures)
        return results | failures

    async def _serve(self, batch: Batch, number: int, line: Line) -> None:
        name = f"{batch.id}-{number}"
        answer = await self._sender.send(batch, name, line)
        response = {"status_code": answer.status, "request_id": name, "body": msgspec.Raw(answer.body)}
        is_good = answer.status == 200
        result = records.result(batch.id, number, line.custom_id, response)
        await self._record(batch.results_id if is_good else batch.failures_id, result)
        batch.completed += is_good
        batch.failed += not is_good

    async def _finish(self, batch: Batch, reason: str) -> None:
        """Give each request without a result an error, and show the files."""
        batch.enter("finalizing", self._clock())
        rest = await self._recorded(batch)
        if reason != "completed":
            said = {"cancelled": "the batch was cancelled", "expired": "the batch's time ended"}[reason]
            error = {"code": f"batch_{reason}", "message": f"{said} before this request was done"}
            left = [(number, line.custom_id) async for number, line in self._requests(batch, rest)]
            lines = [records.result(batch.id, number, custom_id, None, error) for number, custom_id in left]
            await self._record(batch.failures_id, b"".join(lines))
            batch.failed += len(lines)
        await self._show_files(batch)
        batch.enter(cast(records.Status, reason), self._clock())
        await self._save(batch)

    async def _show_files(self, batch: Batch) -> None:
        """Make files of the results and the failures, if there are any."""
        for file_id, name in ((batch.results_id, "output"), (batch.failures_id, "error")):
            self._waiting.pop(file_id, None)  # results of requests that were cut off
            path = self.files.path(file_id)
            if not path.exists() or not path.stat().st_size:
                path.unlink(missing_ok=True)
                continue
            owner = batch.owner.own(batch.owner.tenant)
            title = f"{batch.id}_{name}.jsonl"
            file = self.files.make(file_id, owner, "batch_output", title, batch.kept_seconds)
            await self._on_disk(self.files.add, file)
            if name == "output":
                batch.output_file_id = file_id
            else:
                batch.error_file_id = file_id

    # ---- the disk

    def _path(self, batch: Batch) -> Any:
        return self._data.folder("batches") / f"{batch.id}.json"

    async def _save(self, batch: Batch) -> None:
        await self._on_disk(write_file, self._path(batch), msgspec.json.encode(batch))

    async def _record(self, file_id: str, result: bytes) -> None:
        """Append results to a file, and wait until the disk has them. Those that come meanwhile go together."""
        waiting = self._waiting.setdefault(file_id, deque())
        waiting.append(result)
        await self._on_disk(self._write, file_id, waiting)

    def _write(self, file_id: str, waiting: deque[bytes]) -> None:
        results = [waiting.popleft() for _ in range(len(waiting))]
        if not results:
            return  # one that came before has taken them along
        descriptor = os.open(self.files.path(file_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            rest = memoryview(b"".join(results))
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    async def _on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)


def batches(request: Request) -> Batches:
    """The Batches that `create_app` put into the app."""
    return cast(Batches, request.app.state.batches)
