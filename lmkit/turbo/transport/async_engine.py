"""The front end's side of the engine process: it starts, feeds and restarts the process. No torch here.

One AsyncEngine belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from lmkit import log
from lmkit.config import EngineConfig, LogFormat
from lmkit.errors import CheckpointError, ConfigError, LMKitError, NotReadyError, RequestError, UnsupportedError
from lmkit.turbo.request import EngineInfo, EngineStats, Request, Siblings, StepOutput
from lmkit.turbo.transport import messages
from lmkit.turbo.transport.adapter_calls import AdapterCalls
from lmkit.turbo.transport.death import how_ended
from lmkit.turbo.transport.restart import RestartPolicy
from lmkit.turbo.transport.socket_folder import SocketFolder
from lmkit.turbo.transport.spawned import SILENT_SECONDS, EngineProcess
from lmkit.turbo.transport.steps import Rest, Steps

State = Literal["starting", "ready", "restarting", "asleep", "draining", "dead"]
AT_REST = ("asleep", "draining")  # in these states a process that ends is not started again
STOP_SECONDS = 5.0  # how long a process may take to finish its step before it is killed
LATE_SECONDS = 1.0  # after a request's deadline it is ended here, if the engine has not ended it
STOPPED = "the engine stopped while it was working on this request"

_START_ERRORS = {kind.__name__: kind for kind in (ConfigError, CheckpointError, UnsupportedError)}

logger = log.get_logger(__name__)


class AsyncEngine:
    """An engine in another process, for asyncio.

    `generate` yields a request's steps. Closing the iterator early aborts the request. `info` is None until the engine
    is ready for the first time. `sleep` frees the model's memory, and `wake` loads the model again.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig,
        *,
        engine: str = messages.ENGINE,
        log_level: str = "INFO",
        log_format: LogFormat = "text",
        restart: RestartPolicy | None = None,
        step_timeout: float | None = None,
    ) -> None:
        """engine: the dotted name, module:Class, of the engine class that the process runs.

        step_timeout: the seconds after which a step hangs; None = the engine says it, by what a step costs at worst.
        """
        self.model_path = Path(model_path).absolute()
        self._arguments = {
            "engine": engine,
            "model": str(self.model_path),
            "cwd": os.getcwd(),
            "log-level": log_level,
            "log-format": log_format,
        }
        self._arguments |= {} if step_timeout is None else {"step-timeout": str(step_timeout)}
        self.configure(config)
        self._silent_seconds = min(SILENT_SECONDS, step_timeout or SILENT_SECONDS)
        self._restart = restart or RestartPolicy()
        self._streams: dict[str, Steps] = {}
        self._process: EngineProcess | None = None
        self._context: zmq.Context | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None  # of the process that loads the model
        self._asleep: asyncio.Future[None] | None = None
        self._adapter_calls = AdapterCalls()
        self._supervisor: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._folder = SocketFolder()
        self._stats = EngineStats()
        self.state: State = "asleep"
        self.info: EngineInfo | None = None
        self.num_starts = 0
        self.num_failures = 0  # engine calls that raised, in the current process

    @property
    def max_batch_size(self) -> int:
        """Sequences in one step. Before the engine is ready these are the configured ones."""
        return (self.info and self.info.max_batch_size) or self.config.sequences_per_step

    def configure(self, config: EngineConfig) -> None:
        """The configuration of processes that are started from now on."""
        self.config = config
        self._arguments["config"] = msgspec.json.encode(config).decode()

    async def start(self) -> None:
        """Start the process and wait until its model is loaded. Raises the LMKitError that prevented the start."""
        self.state = "starting"
        try:
            await self._launch()
        except BaseException:
            await self._close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def has_process(self) -> bool:
        return self._process is not None

    async def sleep(self, *, keep_process: bool = True) -> None:
        """End all requests, and free the memory of weights and KV. Only tiers on disk keep KV.

        A process that stays has its libraries and compiled kernels, so `wake` has only the weights to read. Without it,
        `wake` starts a new one.
        """
        self.state = "asleep"
        self._fail_all("engine_unavailable", "the model was put to sleep")
        self._stats = EngineStats()
        if self._process is None or not keep_process:
            await self._close()
            self.state = "asleep"
        else:
            self._asleep = asyncio.get_running_loop().create_future()
            self._process.send_surely(messages.Sleep())
            either: set[asyncio.Future[Any]] = {self._asleep, self._process.listening}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def wake(self) -> None:
        """Load the model, in the process that sleeps or in a new one. Raises the LMKitError that prevents it.

        The engine then sleeps on, without a process.
        """
        if self.state == "asleep" and self._process is None and self._supervisor is not None:
            await asyncio.wait({self._supervisor})  # it sees that the engine slept, and replaces no process
        self.state = "starting"
        try:
            if self._process is None:
                await self.start()
            else:
                self._process.send_surely(messages.Wake())
                await self._until_ready(self._process)
        except BaseException:
            await self._close()
            self.state = "asleep"
            raise

    async def set_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter from a folder inside the adapter_root, or with None unload it. A new process loads the same.

        Raises RequestError.
        """
        if self.state != "ready" or self._process is None:
            raise RequestError("engine_unavailable", f"the engine is {self.state}")
        path = await self._adapter_calls.set(self._process, name, folder)
        kept = tuple(f"{n}={at}" for n, at in self.config.adapter_folders.items() if n != name)
        adapters = kept if path is None else (*kept, f"{name}={path}")
        self.configure(msgspec.structs.replace(self.config, adapters=adapters))

    async def until_dead(self) -> None:
        """Wait until the engine has ended and is not started again. Call it after `start`."""
        await self._dead.wait()

    @property
    def health(self) -> State | Literal["stalled"]:
        """The state. An engine that is ready and seems to hang is stalled: it goes on, or is soon started again.

        So "ready" means that the process lives, and that its step under way is not much slower than expected.
        """
        is_stalled = self.state == "ready" and self._process is not None and self._process.is_stalled
        return "stalled" if is_stalled else self.state

    def stats(self) -> EngineStats:
        """The last figures that the process sent."""
        return self._stats

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def resident(self) -> int:
        """Bytes of memory that the engine process had at its last sign of life."""
        return self._process.resident if self._process else 0

    def submit(self, siblings: Siblings) -> None:
        """Send requests to the engine. `generate` yields the steps of each. Raises RequestError if they are refused."""
        if self.state == "draining":
            raise RequestError("shutting_down", "the server is shutting down")
        if self.state != "ready" or self._process is None:
            raise NotReadyError(f"the engine is {self.state}")
        names = [siblings.first.request_id, *(name for name, _ in siblings.others)]
        assert self._streams.keys().isdisjoint(names), f"request ids {names} are in use"
        too_many = len(self._streams) + len(names) > self.config.max_queue + self.max_batch_size
        if too_many or not self._process.send(messages.Add(siblings)):
            raise RequestError("queue_full", "too many requests are waiting; try again later")
        self._streams |= {name: Steps() for name in names}

    def prepare(self, request: Request) -> None:
        """Let the engine compute a prompt that `is_ahead`, if it can. It says nothing of it."""
        if self.state == "ready" and self._process is not None:
            self._process.send(messages.Prepare(request))

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        """Yield the steps of one request. The last step has a finish_reason. `rest`: see `Steps.get`.

        The request is sent now unless `submit` has sent it. Ending the iteration early aborts it in the engine. Raises
        RequestError if the request is refused or the engine stops.
        """
        if request.request_id not in self._streams:
            self.submit(Siblings(request))
        stream = self._streams[request.request_id]
        timer = self._deadline(request)
        try:
            while True:
                step = await stream.get(rest)
                yield step
                if step.finish_reason is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            if self._streams.get(request.request_id) is stream:
                self.drop(request.request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request whose steps are no longer wanted, and abort it in the engine. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None and self._process is not None:
            self._process.send_surely(messages.Abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request. Its iterator gets finish_reason "abort". Unknown ids are ignored."""
        self._cut(request_id, StepOutput(request_id=request_id, token_ids=[], finish_reason="abort"))

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.state != "dead":
            self.state = "draining"

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let open ones finish for `drain_seconds`, then end the rest and the process."""
        self.drain()
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._streams and self._process is not None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all("shutting_down", "the server is shutting down")
        await self._close()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
        self._folder.remove()

    # ---- requests

    def _deadline(self, request: Request) -> asyncio.TimerHandle | None:
        """Hold a request's deadline here too: an engine that hangs, or is in a long step, holds none."""
        seconds = request.timeout or self.config.request_timeout
        if seconds is None:
            return None
        error = RequestError("deadline_exceeded", f"not done after {seconds:g} s")
        return asyncio.get_running_loop().call_later(seconds + LATE_SECONDS, self._cut, request.request_id, error)

    def _cut(self, request_id: str, item: StepOutput | RequestError) -> None:
        """End a request on this side and in the engine. Unknown ids are ignored."""
        if request_id in self._streams:
            self._end(request_id, item)
            if self._process is not None:
                self._process.send_surely(messages.Abort(request_id))

    def _end(self, request_id: str, item: StepOutput | RequestError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put(item)

    def _fail_all(self, code: str, message: str) -> None:
        for request_id in list(self._streams):
            self._end(request_id, RequestError(code, message))

    def _handle(self, event: messages.Event) -> None:
        match event:
            case messages.Outputs(outputs):
                for output in outputs:
                    if output.finish_reason is not None:
                        self._end(output.request_id, output)
                    elif stream := self._streams.get(output.request_id):
                        stream.put(output)
            case messages.Refused(request_id, code, message, param):
                self._end(request_id, RequestError(code, message, param))
            case messages.Ready(info) if self._ready is not None:
                self._ready.set_result(info)
            case messages.Failed(kind, message) if self._ready is not None:
                self._ready.set_exception(_START_ERRORS.get(kind, LMKitError)(message))
            case messages.Asleep() if self._asleep is not None and not self._asleep.done():
                self._asleep.set_result(None)
            case messages.AdapterSet():
                self._adapter_calls.take(event)
            case messages.Stats(engine, failures):
                self._stats, self.num_failures = engine, failures

    # ---- the process

    async def _launch(self) -> None:
        """Start a process and wait for its Ready.

        Raises the LMKitError of its Failed message, or an LMKitError that gives the status with which it ended.
        """
        self.num_starts += 1
        self._context = self._context or zmq.Context()
        new = await EngineProcess.spawn(
            self._context,
            self._folder.prefix(self.num_starts),
            self._arguments,
            self._handle,
            silent_seconds=self._silent_seconds,
        )
        try:
            await self._until_ready(new)
        except BaseException:
            await new.stop(0)
            raise
        self._process = new

    async def _until_ready(self, process: EngineProcess) -> None:
        """Wait until the process has loaded the model. Raises the LMKitError that prevents it."""
        self._ready = ready = asyncio.get_running_loop().create_future()
        await asyncio.wait({ready, process.listening}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if not ready.done():
            process.listening.result()
            raise LMKitError(f"while starting, {how_ended(process, None, self._stats)}")
        self.info = ready.result()
        if self.state != "draining":
            self.state = "ready"

    async def _supervise(self) -> None:
        """Start the process again whenever it ends. At the end no process runs, and no request waits."""
        try:
            await self._keep_running()
        except Exception:
            logger.exception("the supervisor of the engine failed")
            if self._process is not None:
                self._process.kill()
        if self.state not in AT_REST:
            self.state = "dead"
            self._fail_all("engine_unavailable", "the engine has ended")
            self._dead.set()

    async def _keep_running(self) -> None:
        """Wait for the end of the process and start another one, as long as the policy allows."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            if self._process is not None:
                ready_at = loop.time()
                await asyncio.wait({self._process.listening})
                await self._lose_process(self._process)
                failures = 0 if loop.time() - ready_at > self._restart.stable_seconds else failures
            if self.state in AT_REST:
                return
            failures += 1
            if failures > self._restart.max_failures:
                logger.error("the engine is not started again: it failed %d times in a row", failures)
                return
            await asyncio.sleep(self._restart.delay(failures))
            try:
                await self._launch()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next start may go well
                logger.error("the engine does not start: %s", error)

    async def _lose_process(self, lost: EngineProcess) -> None:
        self._process = None
        if self.state not in AT_REST:
            self.state = "restarting"
        await lost.stop(0)
        how = how_ended(lost, self.info, self._stats)
        self._stats = EngineStats()
        self._fail_all("engine_unavailable", f"{STOPPED}: {how}" if lost.was_killed_for_memory else STOPPED)
        reason = f": {error}" if (error := lost.listening.exception()) else ""
        logger.error("%s%s", how, reason)

    async def _close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._process is not None:
            await self._process.stop(STOP_SECONDS)
            self._process = None
        self.state = "dead"
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._folder.remove()
