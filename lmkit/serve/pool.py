"""`ModelPool`: the models of one server. An engine is loaded when a request needs it, within a budget of memory.

A model is awake (its engine starts, runs or is started again) or asleep: without weights and KV, with or without a
process. If the budget has no room for a model, the model that was used least recently goes to sleep. A model that has
requests never does. If all have some, the one that has been awake for longest gives way: its new requests wait, and it
sleeps when those under way have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from lmkit.errors import LMKitError, RequestError, unknown_model
from lmkit.log import get_logger
from lmkit.text import Tokenizer
from lmkit.turbo.engine.sizes import sizes
from lmkit.turbo.host_memory import gib, resident_memory
from lmkit.turbo.transport.async_engine import AsyncEngine

if TYPE_CHECKING:
    from lmkit.serve.serving import Serving

ASLEEP_BYTES = 320 << 20  # of a process that sleeps: its libraries and compiled kernels
TURN_SECONDS = 1.0  # a busy model gives way to another after at least so long,
TURN_PER_LOAD = 2.0  # and so many times what it took to load: at worst a third of the time goes into loading
RETRY_SECONDS = 1.0, 60.0  # after a load that failed: the first delay, which doubles, and the longest
TAKES_REQUESTS = ("ready", "asleep", "starting")  # states of an engine, the best first
LOOK_SECONDS = 0.5  # between looks at what no event tells

logger = get_logger(__name__)


def load_tokenizer(engine: AsyncEngine) -> Tokenizer:
    """A model's tokenizer, whose chat template has been checked. Raises LMKitError."""
    tokenizer = Tokenizer.from_pretrained(engine.model_path, engine.config.chat_template)
    tokenizer.check_template()
    _ = tokenizer.template_tokens  # which every list of models tells
    return tokenizer


@dataclass(eq=False)
class PooledModel:
    """One model and its state in the pool. Its `serving` is there once the front end has loaded its tokenizer."""

    name: str
    engine: AsyncEngine
    aliases: tuple[str, ...] = ()  # its other names in requests
    nbytes: int = 0  # while it is awake
    keep_alive: float | None = None  # seconds without a request after which it sleeps; None = as long as there is room
    serving: Serving = field(init=False)
    users: int = 0  # requests that run
    waiting: int = 0  # requests that wait until it is awake
    gives_way: bool = False  # new requests wait until it has slept
    is_done: bool = False  # it sleeps once it is idle: the request that used it last said so
    used_at: float = 0.0
    turn_end: float = 0.0
    failures: int = 0  # loads in a row
    retry_at: float = 0.0
    loading: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may give, with those of its adapters."""
        return self.name, *self.aliases, *self.engine.config.adapter_folders

    @property
    def is_asleep(self) -> bool:
        return self.engine.state == "asleep"

    @property
    def must_wait(self) -> bool:
        """Whether a new request has to wait until the model is loaded."""
        return self.gives_way or self.engine.state in ("asleep", "starting")

    @property
    def is_idle(self) -> bool:
        """Whether it may be put to sleep. Requests that waited for it come before that."""
        return not self.users and (self.gives_way or not self.waiting)

    @property
    def resident(self) -> int:
        """Bytes that it takes now."""
        if self.is_asleep:
            return ASLEEP_BYTES if self.engine.has_process else 0
        return self.nbytes

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count a request that waits for this model."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


class ModelPool:
    """The models, by the names that requests give. One model without a budget is always awake.

    `budget` is the number of bytes that all engines together may take; None = there is no limit.
    """

    def __init__(self, models: Sequence[PooledModel], budget: int | None = None) -> None:
        self.models = list(models)
        self.budget = budget
        self._changing = asyncio.Lock()  # one model is loaded or put to sleep at a time, in the order of asking
        self._idle = asyncio.Event()  # a model has become idle
        self.loads_adapter = asyncio.Lock()  # one name is looked up and loaded at a time

    @property
    def only(self) -> PooledModel | None:
        return self.models[0] if len(self.models) == 1 else None

    @property
    def reserved(self) -> int:
        """Bytes of memory that this process and the engines take at most, once they have started."""
        engines = [model.engine.info.reserved for model in self.models if model.engine.info is not None]
        return resident_memory() + (sum(engines) if self.budget is None else self.budget)

    @property
    def health(self) -> str:
        """The state of the only engine, or the best state of several."""
        states = [model.engine.health for model in self.models]
        return next((state for state in TAKES_REQUESTS if state in states), states[0])

    def find(self, name: str | None) -> PooledModel:
        """The model of that name. Without a name, the only one. Raises RequestError."""
        for model in self.models:
            if name in model.names or (name is None and model is self.only):
                return model
        if name is None:
            raise RequestError("invalid_request", "this server has several models; name one, see /v1/models", "model")
        raise unknown_model(name)

    async def let_go(self, model: PooledModel) -> None:
        """Put the model to sleep once no request uses it, unless another request uses it later."""
        model.is_done = True
        await self._tend(model)

    def release(self, model: PooledModel) -> None:
        """A request of the model has ended."""
        model.users -= 1
        model.used_at = time.monotonic()
        if not model.users:
            self._idle.set()

    async def until_awake(self, model: PooledModel, seconds: float | None = None) -> None:
        """Load the model, together with all others who wait for it. Raises RequestError, after `seconds` too."""
        if (left := model.retry_at - time.monotonic()) > 0 and model.is_asleep:
            raise RequestError("engine_unavailable", f"the model did not load; it is tried again in {left:.0f} s")
        if model.waiting > model.engine.config.max_queue + model.engine.max_batch_size:
            raise RequestError("queue_full", "too many requests are waiting; try again later")
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(model.loading)
        except TimeoutError:
            raise RequestError("deadline_exceeded", f"not done after {seconds:g} s") from None

    async def reload(self, model: PooledModel, renew: Callable[[], Awaitable[None]]) -> None:
        """Load the model's files again once its requests have ended. `renew` comes first: what it raises stops all."""
        async with self._emptied(model):
            await renew()
            await model.engine.sleep()
            with model.waits():
                await self._make_room(model)
                await self._wake(model)

    async def sleep(self, model: PooledModel, *, keep_process: bool = True) -> None:
        """Put the model to sleep once its requests have ended. The next request wakes it."""
        async with self._emptied(model):
            await model.engine.sleep(keep_process=keep_process)

    async def start(self) -> None:
        """Start the engine of the only model, or find what each of several takes. Raises LMKitError."""
        if self.only is not None and self.budget is None:
            await self.only.engine.start()
            self._welcome(self.only, 0.0)
        else:
            await self.measure(self.models)

    async def measure(self, models: Sequence[PooledModel]) -> None:
        """Find what models take, and fix the size of their KV caches. Raises LMKitError if one does not fit.

        One model without a budget may take what is free.
        """
        if self.only is not None and self.budget is None:
            return
        asked = [(model.name, str(model.engine.model_path), model.engine.config) for model in models]
        found = await sizes(asked, self.budget)
        self.budget = found.budget
        for model, (nbytes, kv) in zip(models, found.engines, strict=True):
            model.nbytes = nbytes
            model.engine.configure(msgspec.structs.replace(model.engine.config, kv_memory=kv))
            logger.info("%s takes %s of the %s for all models", model.name, gib(nbytes), gib(found.budget))

    @property
    def is_ending(self) -> bool:
        return all(model.engine.state in ("draining", "dead") for model in self.models)

    @property
    def is_dead(self) -> bool:
        """Whether the engine of the only model has ended for good. One of several is loaded again when it is needed."""
        return self.only is not None and self.only.engine.state == "dead"

    async def until_dead(self) -> None:
        if self.only is None:
            await asyncio.Event().wait()
        else:
            await self.only.engine.until_dead()

    async def tend(self) -> None:
        """Every now and then: put models to sleep whose time is over, and forget engines that have ended for good."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for model in self.models:
                await self._tend(model)

    @property
    def num_open(self) -> int:
        return sum(model.engine.num_open + model.waiting for model in self.models)

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let open ones finish for `drain_seconds`, then end all engines."""
        for model in self.models:
            model.engine.drain()
        for model in self.models:
            if model.loading is not None:
                model.loading.cancel()
                await asyncio.wait({model.loading})
        await asyncio.gather(*(model.engine.shutdown(drain_seconds) for model in self.models))

    def kill(self) -> None:
        for model in self.models:
            model.engine.kill()

    # ---- one change at a time

    async def _load(self, model: PooledModel) -> None:
        try:
            async with self._changing:
                if model.must_wait:
                    await self._make_room(model)
                    await self._wake(model)
        except asyncio.CancelledError:
            raise RequestError("shutting_down", "the server is shutting down") from None
        finally:
            model.loading = None

    async def _wake(self, model: PooledModel) -> None:
        start = time.monotonic()
        try:
            await model.engine.wake()
        except LMKitError as error:
            self._fail(model)
            logger.error("%s does not load: %s", model.name, error)
            raise RequestError("engine_unavailable", "the model does not load; the server's log says why") from None
        seconds = time.monotonic() - start
        logger.info("%s is awake after %.2f s", model.name, seconds)
        self._welcome(model, seconds)

    def _welcome(self, model: PooledModel, seconds: float) -> None:
        """Begin a model's turn. Loading it took `seconds`."""
        model.failures = 0
        model.used_at = time.monotonic()
        model.turn_end = model.used_at + max(TURN_SECONDS, TURN_PER_LOAD * seconds)
        if model.engine.info is not None:
            model.engine.info.sampling.announce(logger)

    def _fail(self, model: PooledModel) -> None:
        first, longest = RETRY_SECONDS
        model.retry_at = time.monotonic() + min(first * 2.0**model.failures, longest)
        model.failures += 1

    async def _make_room(self, model: PooledModel) -> None:
        """Put other models to sleep until the budget has room for this one."""
        others = [other for other in self.models if other is not model]
        try:
            while self.budget is not None and sum(o.resident for o in others) + model.nbytes > self.budget:
                awake = [other for other in others if not other.is_asleep]
                idle = [other for other in awake if other.is_idle]
                if not model.waiting:
                    raise RequestError("client_disconnected", "no request waits for this model any more")
                if idle:
                    await self._put_to_sleep(min(idle, key=lambda other: other.used_at))
                elif processes := [other for other in others if other.is_asleep and other.engine.has_process]:
                    await min(processes, key=lambda other: other.used_at).engine.sleep(keep_process=False)
                else:
                    first = min(awake, key=lambda other: other.turn_end)
                    first.gives_way = time.monotonic() >= first.turn_end
                    await self._until_idle()
        finally:
            for other in others:
                other.gives_way = False

    async def _put_to_sleep(self, model: PooledModel) -> None:
        await model.engine.sleep()
        model.gives_way = model.is_done = False
        logger.info("%s sleeps", model.name)

    async def _until_idle(self) -> None:
        """Wait until a model has become idle, or a moment."""
        self._idle.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LOOK_SECONDS)

    @asynccontextmanager
    async def _emptied(self, model: PooledModel) -> AsyncGenerator[None]:
        """Let no other change happen, and hold new requests of the model, once those under way have ended."""
        async with self._changing:
            model.gives_way = True
            try:
                while not model.is_idle:
                    await self._until_idle()
                yield
            finally:
                model.gives_way = False

    async def _tend(self, model: PooledModel) -> None:
        idle_for = time.monotonic() - model.used_at
        is_over = model.is_done or (model.keep_alive is not None and idle_for >= model.keep_alive)
        if self._changing.locked():
            return
        async with self._changing:
            if self.only is None and model.engine.state == "dead":
                await model.engine.sleep(keep_process=False)
                self._fail(model)
            elif is_over and model.is_idle and model.engine.state == "ready":
                await self._put_to_sleep(model)
