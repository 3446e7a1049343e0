"""Pipeline parallelism on one machine: stage 0 lies in the engine, every other stage is a process of its own.

    scheduler -> plan -> stage 0 -- pipe: plan --> stage 1, stage 2, ...
                         stage 0 -- socket: residual stream --> stage 1 --> stage 2 ... --> stage 0: head, sampling

Every stage carries out the same plans on its layers (models.stage) and their KV. Several plans are under way: while
stage 1 computes one, stage 0 computes the next. The scheduler writes plans of different sequences (limits.num_stages),
and the chunks of a prompt need no tokens of each other. A plan that needs a token of an earlier plan waits for it.

A stage that ends takes the engine with it: the other stages have some of the layers only.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

import numpy as np
import torch
from torch import Tensor

from lmkit.errors import EngineLostError
from lmkit.kernels.cpu import threads
from lmkit.turbo.changes import Change
from lmkit.turbo.plan import Chunk, Sampled, StepPlan
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.processes import ENDED, Processes, SharedModel, Start, plans, without_wishes
from lmkit.turbo.runners.runner import Flight, RunnerParts, StepResult, Ticket

HEADER = struct.Struct("<QQ")


class Neighbours:
    """The stages before and after this one, over sockets. See models.stage_link.StageLink.

    A thread takes in what arrives, so that no stage waits for another one to read. It holds as much as the plans under
    way bring. Before a plan's rows stand their size in bytes, and the nanoseconds that stages 1 and on have spent.
    """

    def __init__(self, index: int, before: socket.socket, behind: socket.socket, max_rows: int, width: int) -> None:
        self.is_first = index == 0
        self._before, self._behind = before, behind
        self._arrived, self._leaving = torch.zeros(max_rows, width), torch.zeros(max_rows, width)
        self._inbox: queue.SimpleQueue[tuple[int, bytearray] | None] = queue.SimpleQueue()  # None: no more comes
        self.spent, self._since = 0, 0  # nanoseconds: of the rows that arrived last; when they did
        threading.Thread(target=self._take_in, name="stage-inbox", daemon=True).start()

    def receive(self, num_rows: int) -> Tensor:
        """See StageLink. Raises EngineLostError, here or in a captured step, if a stage has ended."""
        threads.run_on_host(partial(self._receive, num_rows))
        return self._arrived[:num_rows]

    def place(self, num_rows: int) -> Tensor:
        """See StageLink."""
        return self._leaving[:num_rows]

    def send(self, num_rows: int) -> None:
        """See StageLink. Raises EngineLostError as `receive` does."""
        threads.run_on_host(partial(self._send, num_rows))

    def close(self) -> None:
        self._behind.close()
        self._before.shutdown(socket.SHUT_RDWR)  # the thread ends
        self._before.close()

    def _take_in(self) -> None:
        try:
            while (header := self._read(HEADER.size)) is not None:
                size, spent = HEADER.unpack(header)
                if (rows := self._read(size)) is None:
                    break
                self._inbox.put((spent, rows))
        except OSError:
            pass  # closed
        self._inbox.put(None)

    def _read(self, count: int) -> bytearray | None:
        """So many bytes; None at the end."""
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            if not (taken := self._before.recv_into(rest)):
                return None
            rest = rest[taken:]
        return data

    def _receive(self, num_rows: int) -> None:
        arrived = self._inbox.get()
        if arrived is None:
            self._inbox.put(None)  # for the next call
            raise EngineLostError(ENDED)
        self.spent, rows = arrived
        self._since = time.perf_counter_ns()
        place = self._arrived[:num_rows].numpy()
        place[...] = np.frombuffer(rows, np.float32).reshape(place.shape)

    def _send(self, num_rows: int) -> None:
        rows = self._leaving[:num_rows].numpy()
        spent = 0 if self.is_first else self.spent + time.perf_counter_ns() - self._since
        try:
            self._behind.sendall(HEADER.pack(rows.nbytes, spent))
            self._behind.sendall(rows.data)
        except OSError:
            raise EngineLostError(ENDED) from None


class Stages(Processes):
    """The processes of stages 1 and on."""

    link: Neighbours

    @contextmanager
    def _starts(self, model: SharedModel) -> Iterator[list[Start]]:
        config = model.config
        behind, before = zip(*(socket.socketpair() for _ in range(config.pp)), strict=True)
        before = (before[-1], *before[:-1])  # stage 0 gets what the last one sends
        files = [[before[stage].fileno(), behind[stage].fileno()] for stage in range(config.pp)]
        yield [Start(n, model.path, config, files[n], cpus=model.cpus[n]) for n in range(1, config.pp)]
        for given in (*before[1:], *behind[1:]):
            given.close()  # its stage alone holds it now, so that its end is seen
        most = config.tokens_per_step * model.spec.rows_sent
        self.link = Neighbours(0, before[0], behind[0], most, model.spec.hidden_size)

    def runner(self, parts: RunnerParts) -> FirstStage:
        """See Processes."""
        return FirstStage(parts, self)

    def close(self) -> None:
        super().close()
        self.link.close()


@dataclass
class _Flight(Flight):
    """Its first layers are computed, and its tokens are not sampled yet."""

    start: float = 0.0
    kernels: float = 0.0  # seconds in the first layers
    elsewhere: float = 0.0  # in the other stages
    result: StepResult | None = None
    error: Exception | None = None


class FirstStage(CpuRunner):
    """The runner of stage 0. After a failure the stages may disagree, so no step follows it."""

    def __init__(self, parts: RunnerParts, stages: Stages) -> None:
        parts.decoder.link = stages.link
        super().__init__(parts)
        self.stages = stages
        self._flights: deque[_Flight] = deque()
        self._is_lost = False

    def launch(self, plan: StepPlan) -> Ticket:
        """See CpuRunner. The first layers are computed at once, and the rest when the plan is collected, or when a
        later plan needs its tokens."""
        flight = _Flight(plan)
        if not self._overlaps:
            return partial(self._land, flight, begin=True)
        self._thread.submit(self._begin, flight)
        return lambda: self._thread.submit(self._land, flight)()

    def tell(self, change: Change) -> None:
        """See Runner. The thread that sends plans sends it."""
        self.later(partial(self.stages.send, change))

    def close(self) -> None:
        super().close()
        self.stages.close()

    def _land(self, flight: _Flight, *, begin: bool = False) -> StepResult:
        """The result of a plan. Raises its error."""
        if begin:
            self._begin(flight)
        while flight.result is None and flight.error is None:
            self._finish(self._flights.popleft())
        if flight.error is not None:
            raise flight.error
        assert flight.result is not None
        return flight.result

    @torch.inference_mode()
    def _begin(self, flight: _Flight) -> None:
        """Compute the first layers, and send them on."""
        flight.start = time.perf_counter()
        needed = {chunk.slot for chunk in flight.plan.chunks}
        try:
            while any(c.num_sampled and c.slot in needed for other in self._flights for c in other.chunks):
                self._finish(self._flights.popleft())
            if self._is_lost:
                raise EngineLostError(ENDED)
            self.stages.send(without_wishes(flight.plan))
            with self._begun(flight.plan) as flight.chunks:
                if flight.chunks:
                    self._send_on(flight)
            self._flights.append(flight)
        except Exception as error:  # noqa: BLE001 - the plan's ticket raises it
            flight.error, self._is_lost = error, True

    def _send_on(self, flight: _Flight) -> None:
        inputs, rows = self.batch.inputs(flight.chunks)
        flight.expect(inputs, rows)
        before = time.perf_counter()
        if flight.logit_rows is not None:
            with self._workspace.active():
                self.decoder.hidden(inputs, self.kv)
        else:
            self._logits(inputs)
        flight.kernels = time.perf_counter() - before
        self.kernel_seconds += flight.kernels

    @torch.inference_mode()
    def _finish(self, flight: _Flight) -> None:
        """Take in what the last stage has computed, and sample."""
        before = self.kernel_seconds
        try:
            sampled = self.for_all(flight.plan, flight.chunks, self._sampled(flight) if flight.chunks else [])
            now = time.perf_counter()
            kernels = flight.kernels + self.kernel_seconds - before
            flight.result = StepResult(sampled, now - flight.start, kernels, flight.elsewhere)
        except Exception as error:  # noqa: BLE001 - the plan's ticket raises it
            flight.error, self._is_lost = error, True

    def _sampled(self, flight: _Flight) -> list[Sampled]:
        stream = self.stages.link.receive(flight.num_rows)
        flight.elsewhere = self.stages.link.spent / 1e9
        start = time.perf_counter()
        with self._workspace.active():
            logits, shown = self._shown_of(flight, stream)
        self.kernel_seconds += time.perf_counter() - start
        tokens = self.next_tokens(logits, flight.chunks, flight.rows)
        self.append(flight.chunks, tokens)
        return [Sampled(new, *also) for new, also in zip(tokens, shown, strict=True)]


class FollowingStage(CpuRunner):
    """The runner of another stage. It takes plans from a pipe."""

    def __init__(self, parts: RunnerParts, start: Start, pipe: IO[bytes]) -> None:
        before, behind = (socket.socket(fileno=number) for number in start.files)
        spec = parts.decoder.spec
        most = parts.config.tokens_per_step * spec.rows_sent
        parts.decoder.link = Neighbours(start.rank, before, behind, most, spec.hidden_size)
        super().__init__(parts)
        self._pipe = pipe

    def run(self, change: Callable[[Change], None]) -> None:
        """Carry out plans, and changes between them, until the pipe ends, or another stage."""
        with suppress(EngineLostError):
            for plan in plans(self._pipe, change):
                self.execute(plan)

    def _compute(self, chunks: list[Chunk]) -> list[Sampled]:
        if chunks:
            inputs, rows = self.batch.inputs(chunks)
            if rows is not None and rows.wants_hidden:
                with self._workspace.active():
                    self.decoder.hidden(inputs, self.kv)
            else:
                self._logits(inputs)
        return [Sampled()] * len(chunks)
