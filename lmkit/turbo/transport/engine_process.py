"""The engine process: commands in, engine steps, events out.

    python -m lmkit.turbo.transport.engine_process --model DIR --config JSON --commands ipc://... --events ipc://...

AsyncEngine starts the process. It imports torch only through the engine that it is told to run. Its messages
(transport.messages) come and go over two one-way ZeroMQ sockets. It ends with its parent, because its stdin is a pipe
that only the parent holds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from lmkit import log
from lmkit.config import EngineConfig
from lmkit.environment import calm_openmp
from lmkit.errors import EngineLostError, LMKitError, RequestError
from lmkit.turbo.request import EngineInfo, EngineStats, Request, StepOutput
from lmkit.turbo.transport.deferred import quick_start
from lmkit.turbo.transport.heartbeat import Heartbeat
from lmkit.turbo.transport.messages import (
    ENGINE,
    QUEUED_MESSAGES,
    Abort,
    AdapterSet,
    Add,
    Asleep,
    Command,
    Event,
    Failed,
    Outputs,
    Prepare,
    Ready,
    Refused,
    SetAdapter,
    Shutdown,
    Sleep,
    Stats,
    Wake,
)

STATS_SECONDS = 0.25  # between messages while requests are open; otherwise stats are sent when they change
IDLE_SECONDS = 1.0  # between checks of things that change without requests: leases end, saves are done
# The loop may keep an engine's thread waiting so long. Python's default of 5 ms is as long as many steps.
SWITCH_SECONDS = 1e-4
MAX_FAILED_STEPS = 3  # in a row: the engine is then beyond repair and the process ends

logger = log.get_logger(__name__)


class EngineLike(Protocol):
    """The part of lmkit.turbo.engine.engine.Engine that the loop uses."""

    info: EngineInfo

    @property
    def step_limit(self) -> float: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def set_adapter(self, name: str, folder: str | None) -> Future[str | None]: ...
    def step(self) -> list[StepOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class EngineLoop:
    """Owns an engine. It takes commands between steps, steps while there is work, and waits for commands otherwise."""

    def __init__(
        self,
        engine: EngineLike,
        commands: zmq.Socket,
        events: zmq.Socket,
        heartbeat: Heartbeat,
        step_timeout: float | None = None,
    ) -> None:
        self._engine = engine
        self._heartbeat, self._step_timeout = heartbeat, step_timeout
        self._commands, self._events = commands, events
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._adapters: deque[tuple[str, Future[str | None]]] = deque()  # calls of set_adapter to be answered
        self._open: set[str] = set()  # requests that the engine has and the front end waits for
        self._failures = 0
        self._failures_in_a_row = 0
        self._is_checked = True  # since the last step
        self._sent = Stats(EngineStats(), 0)
        self._sent_at = 0.0

    def run(self) -> bool:
        """Run until a command ends it, and close the engine. True if that was Sleep.

        Raises the exception that the engine cannot survive.
        """
        self.send(Ready(self._engine.info))
        while (last := self._take_commands()) is None:
            if self._engine.has_work():
                self._step()
            self._answer_adapters()
            self._send_stats()
        self._engine.close()
        self._answer_adapters()
        return isinstance(last, Sleep)

    def send(self, event: Event) -> None:
        """Send an event. Waits while the front end has not caught up."""
        self._events.send(self._encoder.encode(event))

    def _take_commands(self) -> Sleep | Shutdown | None:
        """Carry out the commands that have arrived. Returns the one that ends the loop.

        It waits for commands only if there is nothing else to do.
        """
        is_idle = not self._engine.has_work()
        if is_idle and not self._commands.poll(round(1e3 * IDLE_SECONDS)):
            self._check()
            self._engine.rest()
        while self._commands.poll(0):
            match self._decoder.decode(self._commands.recv()):
                case Add(siblings):
                    for request in siblings.requests():
                        self._open.add(request.request_id)
                        self._guarded(partial(self._engine.add, request), [request.request_id])
                case Prepare(request):
                    self._guarded(partial(self._engine.add, request), [])
                case Abort(request_id):
                    self._open.discard(request_id)
                    self._engine.abort(request_id)
                case SetAdapter(name, folder):
                    self._adapters.append((name, self._set_adapter(name, folder)))
                case Sleep() | Shutdown() as last:
                    return last
        return None

    def _set_adapter(self, name: str, folder: str | None) -> Future[str | None]:
        try:
            return self._engine.set_adapter(name, folder)
        except Exception as error:  # noqa: BLE001 - it is this call's
            failed: Future[str | None] = Future()
            failed.set_exception(error)
            return failed

    def _answer_adapters(self) -> None:
        """Answer the calls that are done."""
        while self._adapters and self._adapters[0][1].done():
            self.send(self._adapter_set(*self._adapters.popleft()))

    def _adapter_set(self, name: str, done: Future[str | None]) -> AdapterSet:
        try:
            return AdapterSet(name, done.result())
        except RequestError as error:
            return AdapterSet(name, code=error.code, error=error.message)
        except LMKitError as error:
            return AdapterSet(name, code="invalid_request", error=str(error))
        except Exception:
            logger.exception("an adapter could not be set")
            return AdapterSet(name, code="engine_error", error="the adapter could not be set; the server's log has why")

    def _check(self) -> None:
        """Check the engine's integrity once in each pause. A defect is logged and counted, like a failed step."""
        if not self._is_checked:
            self._is_checked = True
            self._guarded(self._engine.check_integrity, [])

    def _step(self) -> None:
        self._is_checked = False
        outputs = self._guarded(self._engine.step, self._open)
        if outputs is None:
            return
        self._failures_in_a_row = 0
        self._open.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        if outputs:
            self._send_stats()  # first, so that a client that has its answer finds it in /metrics
            self.send(Outputs(outputs))

    def _guarded(self, call: Callable[[], Any], request_ids: Iterable[str]) -> Any:
        """Run one engine call. If it raises, the requests `request_ids` fail and the others go on."""
        victims = list(request_ids)
        try:
            with self._heartbeat.watching(lambda: self._step_timeout or self._engine.step_limit):
                return call()
        except RequestError as error:
            self._open.difference_update(victims)
            for request_id in victims:
                self.send(Refused(request_id, error.code, error.message, error.param))
        except EngineLostError:
            raise  # nothing will ever be computed again; the front end ends the requests when this process is gone
        except Exception:
            self._failures += 1
            self._failures_in_a_row += 1
            logger.exception("engine failure %d; %d requests end with an error", self._failures, len(victims))
            if self._failures_in_a_row >= MAX_FAILED_STEPS:
                raise
            for request_id in victims:
                self._engine.abort(request_id)
            self._open.difference_update(victims)
            failed = [
                StepOutput(request_id=request_id, token_ids=[], finish_reason="error", error="the engine step failed")
                for request_id in victims
            ]
            self.send(Outputs(failed))

    def _send_stats(self) -> None:
        now = time.monotonic()
        if self._open and now - self._sent_at < STATS_SECONDS:
            return
        stats = Stats(self._engine.stats(), self._failures)
        if stats != self._sent:
            self._sent, self._sent_at = stats, now
            self.send(stats)


def load_engine(name: str) -> Callable[[str, EngineConfig], EngineLike]:
    """`package.module:Class` -> the class."""
    module, _, attribute = name.partition(":")
    factory: Callable[[str, EngineConfig], EngineLike] = getattr(importlib.import_module(module), attribute)
    return factory


def _end_with_parent(socket_dir: Path) -> None:
    """Watch stdin from a thread. Its end of file means that the parent has ended, for whatever reason."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(socket_dir, ignore_errors=True)  # the parent would have removed it
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lmkit.turbo.transport.engine_process")
    parser.add_argument("--engine", default=ENGINE)
    for name in ("model", "config", "commands", "events", "cwd", "log-level", "log-format"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--step-timeout", type=float)
    args = parser.parse_args(argv)
    calm_openmp()
    for number in (signal.SIGINT, signal.SIGTERM):  # these go to the whole group or unit; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(Path(args.commands.removeprefix("ipc://")).parent)
    os.chdir(args.cwd)
    log.setup(args.log_level, process="engine", log_format=args.log_format)

    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.rcvhwm = events.sndhwm = QUEUED_MESSAGES
    commands.connect(args.commands)
    events.connect(args.events)
    heartbeat = Heartbeat(context, args.events)

    def load() -> EngineLoop:
        try:
            engine = load_engine(args.engine)(args.model, msgspec.json.decode(args.config, type=EngineConfig))
        except EngineLostError as error:
            raise LMKitError(str(error)) from None
        return EngineLoop(engine, commands, events, heartbeat, args.step_timeout)

    try:
        with quick_start():
            loop: EngineLoop | None = load()
        sys.setswitchinterval(SWITCH_SECONDS)
        while loop is not None:
            is_to_sleep = loop.run()
            loop = None  # with the engine and its memory
            if is_to_sleep and _sleep(commands, events):
                loop = load()
    except EngineLostError as error:
        logger.critical("%s", error)
        return 1
    except LMKitError as error:
        events.send(msgspec.msgpack.encode(Failed(type(error).__name__, str(error))))
        return 2
    finally:
        heartbeat.stop()
        context.destroy(linger=5000)
    return 0


def _sleep(commands: zmq.Socket, events: zmq.Socket) -> bool:
    """Give the memory of an engine that has ended back to the system, and wait. False if the process is to end."""
    gc.unfreeze()  # the first engine is among the objects that quick_start froze
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    decoder = msgspec.msgpack.Decoder(Command)
    command: Command = Sleep()
    while not isinstance(command, Wake | Shutdown):
        if isinstance(command, Sleep):  # others are late: they name requests that have ended
            events.send(msgspec.msgpack.encode(Asleep()))
        elif isinstance(command, SetAdapter):
            late = AdapterSet(command.name, code="engine_unavailable", error="the engine is asleep")
            events.send(msgspec.msgpack.encode(late))
        command = decoder.decode(commands.recv())
    return isinstance(command, Wake)


if __name__ == "__main__":
    sys.exit(main())
