"""The engine: a scheduler and a runner. One loop owns it; it is not thread-safe.

With `overlap` the runner carries out a plan while the loop prepares the next one.

    loop     schedule 1 | schedule 2 | wait | update 1, schedule 3 | wait | update 2 ...
    device              | step 1 ...........| step 2 ..............| step 3 ...
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import msgspec

from lmkit import cores
from lmkit.config import EngineConfig
from lmkit.environment import default_num_threads
from lmkit.errors import EngineLostError, LMKitError, RequestError
from lmkit.kernels.cpu import threads
from lmkit.log import get_logger
from lmkit.models import kv_storage, packed_cache
from lmkit.models.decoder import Decoder
from lmkit.models.kv_storage import KVStorage
from lmkit.text import Tokenizer
from lmkit.turbo.engine import loading
from lmkit.turbo.engine.adapters import EngineAdapters
from lmkit.turbo.engine.compiling import Compiling
from lmkit.turbo.engine.encoder import ALONE_SECONDS, Encoder
from lmkit.turbo.engine.info import engine_info
from lmkit.turbo.engine.loading import LoadedModel
from lmkit.turbo.engine.memory import scheduler_limits
from lmkit.turbo.engine.rest import Rest
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.no_memory import finds_memory, missing_memory
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import EngineStats, Pooling, Request, SamplingParams, StepOutput, check_head
from lmkit.turbo.runners.device import EngineDevice
from lmkit.turbo.runners.devices import resolve_device
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.images import EncodedImages
from lmkit.turbo.runners.processes import Processes
from lmkit.turbo.runners.runner import RunnerParts, Ticket
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.scheduler import Scheduler
from lmkit.turbo.step_sizes import StepSizes

if TYPE_CHECKING:
    from lmkit.turbo.kv.publisher import Publisher

log = get_logger(__name__)
Load = Callable[[EngineConfig, EngineDevice], LoadedModel]

IDLE_SECONDS = 0.02  # time between checks of the loads, if there is nothing else to do
STEP_SECONDS = 120.0  # that any step may take: kernels that no one foresaw are compiled in it
SLOW_DISK = 50e6  # bytes a second: the weights may have to be read again


@dataclass
class Profile:
    """The time that steps took, by part, in seconds since the engine was made."""

    steps: int = 0  # steps whose results were taken in; `kernels`, `execute` and `update` are the times of these steps
    kernels: float = 0.0  # in the model
    execute: float = 0.0  # carrying out plans: the kernels, and the inputs and sampling around them
    schedule: float = 0.0  # writing plans
    update: float = 0.0  # taking in results
    elsewhere: float = 0.0  # in the model's other stages, beside all else

    def since(self, before: Profile) -> Profile:
        return Profile(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class Engine:
    """Runs one checkpoint. Raises CheckpointError, ConfigError or UnsupportedError before it loads any weight."""

    def __init__(
        self, model_path: str, config: EngineConfig | None = None, *, device: EngineDevice | None = None
    ) -> None:
        self._start(config, device, lambda config, device: loading.load(model_path, config, device))

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        config: EngineConfig | None = None,
        *,
        storages: list[KVStorage] | None = None,
        device: EngineDevice | None = None,
    ) -> Self:
        """Make an engine of a packed decoder that is on its device. It needs no checkpoint. No token ends a sequence.

        `storages` gives the storage of each layer's KV; without it `config.kv_dtype` holds for all layers. Raises
        ConfigError if there is too little memory.
        """
        engine = cls.__new__(cls)
        engine._start(config, device, lambda config, device: loading.given(decoder, config, device, storages))
        return engine

    def _start(self, config: EngineConfig | None, device: EngineDevice | None, load: Load) -> None:
        config = config or EngineConfig()
        device = device or resolve_device(config)
        config = config.on(device.name, device.free_memory())
        num_threads = config.num_threads or default_num_threads() * config.num_processes // config.num_local
        config = msgspec.structs.replace(config, num_threads=max(1, num_threads // config.num_processes))
        cpus = cores.shares(config.num_local) if config.num_local > 1 else [[]]
        cores.bind(cpus[0])
        threads.prepare(config.num_threads or num_threads)
        self._settings = device.settings(config)
        with self._settings:
            self._make(load(config, device), device, cpus)

    def _make(self, model: LoadedModel, device: EngineDevice, cpus: list[list[int]]) -> None:
        config = model.config
        spec, memory = model.decoder.spec, model.memory
        self._has_head = True  # for the first steps
        self._encoder: Encoder | None = None
        self._step_seconds, self._slowdown = 0.0, config.decode_slowdown
        self._publisher: Publisher | None = None  # of what the prefix caches get and lose
        self._lost: str | None = None  # the reason why no step can run any more
        self._profile = Profile()
        self._overlap = config.overlap
        self._under_way: deque[tuple[StepPlan, Ticket]] = deque()
        self.num_stages = config.pp
        self._depth = max(2, config.pp)  # plans under way at most, with overlap
        self._failed_steps, self._step_sizes, self._token_seconds = 0, StepSizes(), 0.0
        self._base_seconds = STEP_SECONDS + (memory.weights + model.step_bytes) / SLOW_DISK
        limits, encoded = scheduler_limits(config, memory, spec), EncodedImages.of(config.image_memory, spec)
        with finds_memory("the KV cache or the first steps"):
            kv = kv_storage.allocate(
                spec.layers, model.storages, memory.num_blocks, config.tokens_per_block, memory.max_model_len,
                device.name, memory.layout,
                config.sequences_per_step + memory.num_snapshots, (config.sequences_per_step, config.num_draft_tokens),
            )  # fmt: skip
            kv = [kv[layer.index] for layer in model.decoder.layers]
            blocks = KVBlocks(kv)
            self._tiers, self._block_server = loading.open_tiers(config, model, blocks)
            self._tokenizer = model.tokenizer
            read = model.tokenizer.read if model.tokenizer is not None else None
            self._guides = Guides(read, spec.vocab_size)
            self._compiling = self._compiles(limits)
            parts = RunnerParts(
                config, model.decoder, kv, blocks, self._tiers, self._guides, memory.max_model_len, memory.workspace,
                num_groups=len(memory.layout.groups), encoded=encoded,
            )  # fmt: skip
            adapters = loading.load_adapters(model, config)
            others = loading.start_others(model, config, device, cpus, self._lose)
            self.runner = device.runner(parts) if others is None else others.runner(parts)
            self.adapters = EngineAdapters(adapters, config, self.runner.tell)
            if others is not None:
                others.hear_adapters(self.adapters.heard)
                encoded.tell = self.runner.tell
            draft = model.draft
            self._drafter = None if draft is None else draft.start(self.runner, device, spec.vocab_size)
            captured = self._warm_up(limits, others)
        self._has_head, self._step_sizes = model.has_head, StepSizes()  # the first steps do not count
        eos = model.tokenizer.eos_token_ids() if model.tokenizer is not None else ()
        self.scheduler = Scheduler(
            limits,
            eos,
            tiers=self._tiers,
            kv_identity=model.kv_identity,
            forced=self.runner.forced,
            adapters=self.adapters.placed,
            draft_model=self._drafter,
            stored=blocks,
        )
        self.adapters.is_used = self.scheduler.uses_adapter
        if config.kv_events is not None:
            from lmkit.turbo.kv.publisher import Publisher, recorded  # pyzmq, which no other engine needs

            events = recorded(self.scheduler.kv.caches, limits.kv, self.scheduler.kv.snapshots)
            self._publisher = Publisher(config.kv_events, config.kv_events_topic, events)
        kv_port = self._block_server.address[1] if self._block_server is not None else 0
        self.info = msgspec.structs.replace(engine_info(model, limits, captured), kv_port=kv_port)
        if not isinstance(model.tower, str):
            self._encoder = Encoder(model.tower, limits, encoded, self._compiling.add, self.runner.call)
        for file in model.mapped:
            packed_cache.check_in_background(file, self._lose)
        self._rest = Rest(config, self.scheduler.kv, blocks)

    def _lose(self, reason: str) -> None:
        """From any thread: nothing can be computed any more. The next `step` says so, with the first reason."""
        self._lost = self._lost or reason

    def _warm_up(self, limits: SchedulerLimits, others: Processes | None) -> str:
        """Compute a few tokens with a separate scheduler. Returns what the runner says of captured steps.

        Everything that is compiled or read on first use is ready before the first request. Raises LMKitError if a step
        fails; its log gives the reason.
        """
        captured = self.runner.warm_up()
        if others is not None:
            others.wait_until_ready()
        self.scheduler = Scheduler(limits, ())
        length = min(4, limits.max_model_len, limits.kv.longest)
        new = 0 if limits.whole_texts else length // 2
        pooling: Pooling | None = "mean" if limits.whole_texts else None
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = SamplingParams(max_tokens=new, temperature=temperature, top_p=0.9, seed=0)
            if length > 1:
                ids = [0] * (length - length // 2)
                self.add(Request(request_id=name, prompt_ids=ids, params=params, pooling=pooling))
        start = time.perf_counter()
        while self.has_work():
            if any(output.error for output in self.step()):
                raise LMKitError(self._lost or "the engine cannot compute a token")
        log.debug("first steps took %.1f s", time.perf_counter() - start)
        self._token_seconds = self._profile.execute
        return captured

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run or the queue is full."""
        if request.pooling is None:
            check_head(self._has_head)
        if self._encoder is not None and (request.images or self._encoder.hears):
            self._encoder.add(request)
        elif not request.images:
            self._compiling.add(request)
        else:
            raise RequestError("unsupported_parameter", f"images: {self.info.images}", "messages")

    def _compiles(self, limits: SchedulerLimits) -> Compiling:
        def admit(request: Request) -> None:
            """Give a request to the scheduler. Its adapter, if it has one, has a place from then on."""
            if request.adapter:
                self.adapters.bring(request.adapter)
            self.scheduler.add(request)

        return Compiling(self._guides, limits, admit)

    def set_adapter(self, name: str, folder: str | None) -> Future[str | None]:
        """Load the adapter in `folder`, which must lie inside the adapter_root, beside the steps. None: unload it.

        It takes the place of one with the same name. Calls are carried out one after the other, while `step` is called.
        The result is the adapter's path, set when requests can name it. Otherwise CheckpointError stands for files that
        cannot be used, on any rank, and RequestError for all else; nothing has changed then.
        """
        return self.adapters.set(name, folder)

    def abort(self, request_id: str) -> None:
        """End a request early. Its last output says "abort". An unknown id is ignored: it may just have finished."""
        self.scheduler.abort(request_id)
        self._compiling.abort(request_id)
        if self._encoder is not None:
            self._encoder.abort(request_id)

    def has_work(self) -> bool:
        """Whether to call `step`. A lost engine wants to say so."""
        waits = self._has_images() or self.adapters.has_work() or self._compiling.has_work()
        is_idle = not (self.scheduler.has_work() or waits)
        return self._lost is not None or not is_idle

    def _has_images(self) -> bool:
        return self._encoder is not None and self._encoder.has_work()

    def rest(self) -> None:
        """Another second has passed without work, see Rest."""
        self._rest.turn(self._profile.steps)

    def step(self) -> list[StepOutput]:
        """Schedule, compute and sample. Returns the outputs of the oldest step under way, or outputs that need no step.

        A step that raises ends its own requests with an error, and no others. EngineLostError means that no other step
        can run any more. So does a scheduler that raises: the state of its sequences is unknown, and some would wait
        for ever.
        """
        if self._lost is not None:
            raise EngineLostError(self._lost)
        try:
            with self._settings:
                self.adapters.advance()
                encoded = self._encode() if self._encoder is not None else []
                outputs = encoded + self._compiling.advance() + self._step()
            if self._publisher is not None:
                self._publisher.publish()
            if self._encoder is not None:
                self._encoder.ended(outputs)
            return outputs
        except Exception:
            log.exception("the scheduler failed")
            self._lose("the scheduler failed; start the engine again")
            raise EngineLostError(self._lost) from None

    def _encode(self) -> list[StepOutput]:
        assert self._encoder is not None
        share = self._step_seconds * (self._slowdown - 1)
        return self._encoder.advance(share if self.scheduler.has_work() else ALONE_SECONDS)

    def _step(self) -> list[StepOutput]:
        while True:
            start = time.perf_counter()
            plan = self.scheduler.schedule()
            self._profile.schedule += time.perf_counter() - start
            if plan is not None:
                self._under_way.append((plan, self._launch(plan)))
            if not self._under_way:
                outputs = self.scheduler.take_outputs()
                if not outputs and not self._has_images():
                    self._wait()
                return outputs
            if plan is None or not self._overlap or len(self._under_way) >= self._depth:
                try:
                    return self._collect(*self._under_way[0])
                finally:
                    self._under_way.popleft()

    def _wait(self) -> None:
        """There is nothing to compute: wait a little for what is loaded."""
        if self.adapters.has_work():
            self.adapters.advance(IDLE_SECONDS)
        elif self._compiling.has_work():
            self._compiling.wait(IDLE_SECONDS)
        else:
            self.scheduler.wait(IDLE_SECONDS)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, which is read when it is first needed."""
        assert self._tokenizer is not None
        return self._tokenizer.read()

    @property
    def step_limit(self) -> float:
        """Seconds after which a call of `step` hangs. Any thread may ask, also while a step runs.

        The first steps computed a token several times. A step takes no longer than that for each of its tokens, because
        tokens that are computed together share the work.
        """
        num_tokens = sum(chunk.num_tokens for plan, _ in tuple(self._under_way) for chunk in plan.chunks)
        return self._base_seconds + num_tokens * self._token_seconds

    def profile(self) -> Profile:
        """A copy of the profile, up to the last result that was taken in."""
        return replace(self._profile)

    def _launch(self, plan: StepPlan) -> Ticket:
        try:
            return self.runner.launch(plan)
        except Exception as error:  # noqa: BLE001 - logged when the result is collected
            return partial(_raise, error)

    def _collect(self, plan: StepPlan, ticket: Ticket) -> list[StepOutput]:
        try:
            sampled, seconds, kernels, elsewhere = self.runner.collect(ticket)
        except Exception as error:  # one request must never end the engine
            self._failed_steps += 1
            if is_lost := isinstance(error, EngineLostError):  # it says all in one line
                self._lose(str(error))
            if missing := missing_memory(error):
                log.error("a step found no memory; use a smaller --kv-memory or --max-batch-size: %s", missing)
            count, reason = len(plan.chunks), "found no memory" if missing else "failed"
            log.error("a step failed; its %d requests end with an error", count, exc_info=not (is_lost or missing))
            return self.scheduler.fail(plan, f"the engine {reason} while computing this request")
        collected = time.perf_counter()
        outputs = self.scheduler.update(plan, sampled, seconds)
        self._step_sizes.note(plan, outputs)
        self._step_seconds = seconds
        profile = self._profile
        profile.steps += 1
        profile.kernels += kernels
        profile.elsewhere += elsewhere
        profile.execute += seconds
        profile.update += time.perf_counter() - collected
        return outputs

    def close(self) -> None:
        """Wait for steps under way, end the threads and release the disk. The engine cannot be used afterwards."""
        self.runner.close()
        self.adapters.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._drafter is not None:
            self._drafter.close()
        self._guides.close()
        if self._block_server is not None:
            self._block_server.close()
        if self._tiers is not None:
            self._tiers.close()

    def stats(self) -> EngineStats:
        counted = self._step_sizes.figures() | self._rest.figures()
        stats = msgspec.structs.replace(self.scheduler.stats(), failed_steps=self._failed_steps, **counted)
        waiting = stats.num_waiting + len(self._compiling)
        if self._encoder is None:
            return msgspec.structs.replace(stats, num_waiting=waiting)
        waiting += len(self._encoder)
        return msgspec.structs.replace(stats, num_waiting=waiting, images=dict(self._encoder.counts))

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()


def _raise(error: Exception) -> NoReturn:
    raise error
