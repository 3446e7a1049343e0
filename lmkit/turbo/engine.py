"""The engine: a scheduler and a runner. One loop owns it; it is not thread-safe.

With `overlap` a thread carries out the plans, and the loop prepares the next one meanwhile:

    loop     schedule 1 | schedule 2 | wait | update 1, schedule 3 | wait | update 2 ...
    thread              | step 1 ...........| step 2 ..............| step 3 ...
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace

import msgspec

from lmkit.config import EngineConfig, default_num_threads
from lmkit.errors import ConfigError, LMKitError, UnsupportedError
from lmkit.kernels.cpu import threads
from lmkit.log import get_logger
from lmkit.models import kv_storage
from lmkit.models.loader import ModelSource, load_model, resolve_dtype
from lmkit.models.spec import ModelSpec
from lmkit.text import Tokenizer
from lmkit.turbo.batch import PersistentBatch
from lmkit.turbo.kv_blocks import KVBlocks, kv_fingerprint
from lmkit.turbo.limits import SchedulerLimits
from lmkit.turbo.memory import MemoryPlan, kv_limits, plan_memory
from lmkit.turbo.plan import Sampled, StepPlan
from lmkit.turbo.request import EngineInfo, EngineStats, GenerationConfig, Request, StepOutput
from lmkit.turbo.runner import Runner
from lmkit.turbo.sampler import Sampler
from lmkit.turbo.scheduler import Scheduler
from lmkit.turbo.tiers.disk import DiskTier
from lmkit.turbo.tiers.store import TierStore

log = get_logger(__name__)


IDLE_SECONDS = 0.02  # between looks at loads, when there is nothing else to do


@dataclass
class Profile:
    """Where the time of steps went, in seconds since the engine was made."""

    steps: int = 0  # whose results were taken in; the next three are theirs
    kernels: float = 0.0  # in the model
    execute: float = 0.0  # carrying out plans: the kernels, and around them inputs and sampling
    schedule: float = 0.0  # writing plans
    update: float = 0.0  # taking in results

    def since(self, before: Profile) -> Profile:
        return Profile(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


_Result = tuple[list[Sampled], float, float]  # of a step: its samples, seconds, and those of them in kernels


class Engine:
    """Runs one checkpoint. Raises CheckpointError, ConfigError or UnsupportedError before it loads any weight."""

    def __init__(self, model_path: str, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        device = resolve_device(config)
        num_threads = config.num_threads or default_num_threads()
        threads.configure(num_threads)
        source = ModelSource(model_path)
        try:
            spec, path = source.spec, source.reader.path
            dtype = resolve_dtype(config.dtype, spec.dtype, device)
            storages = kv_storage.resolve_storage(source.reader, spec, config.kv_dtype, dtype)
            dtypes = [storage.dtypes for storage in storages]
            weight_bytes = source.weight_bytes(dtype, config.lm_head)
            weight_bytes += kv_storage.table_bytes(spec, storages, config.max_model_len or spec.max_position)
            memory = plan_memory(spec, config, dtypes, weight_bytes)
            has_tiers = _has_tiers(config)
            fingerprint = kv_fingerprint(source.reader, storages, config, device, dtype) if has_tiers else b""
        finally:
            source.close()
        disk = _open_disk(config, fingerprint, memory.block_bytes)
        for line in memory.lines():
            log.info(line)
        start = time.perf_counter()
        decoder = load_model(
            path,
            device=device,
            dtype=config.dtype,
            activations=config.activations,
            lm_head=config.lm_head,
            packed_cache=config.packed_cache,
            attention_sinks=config.attention_sinks,
        )
        log.info("loaded %s in %.1f s", path, time.perf_counter() - start)
        kv = kv_storage.allocate(spec, storages, memory.num_blocks, config.block_size, memory.max_model_len)
        batch = PersistentBatch(config.max_batch_size, memory.max_model_len, config.block_size, config.max_step_tokens)
        sampler = Sampler(config.max_batch_size, spec.vocab_size)
        blocks = KVBlocks(kv)
        self._tiers = TierStore(blocks, host_bytes=config.kv_host_memory or 0, disk=disk) if has_tiers else None
        self.runner = Runner(decoder, kv, batch, sampler, memory.workspace, blocks=blocks, tiers=self._tiers)
        limits = _limits(config, memory, spec)
        self._profile = Profile()
        self._overlap = config.overlap
        self._thread = ThreadPoolExecutor(1, "engine-steps", lambda: threads.configure(num_threads))
        self._under_way: deque[tuple[StepPlan, Future[_Result]]] = deque()
        self._failed_steps = 0
        self._warm_up(limits)
        eos = Tokenizer.from_pretrained(path).eos_token_ids
        self.scheduler = Scheduler(limits, eos, tiers=self._tiers, fingerprint=fingerprint)
        self.info = _info(str(path), limits, dtypes, memory)

    def _warm_up(self, limits: SchedulerLimits) -> None:
        """Compute a few tokens with a scheduler of their own: what is compiled or read on first use is, before any
        request comes. Raises LMKitError if a step fails; its log says why.
        """
        self.scheduler = Scheduler(limits, ())
        length = min(4, limits.max_model_len, limits.kv.num_blocks * limits.kv.block_size)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = GenerationConfig(max_new_tokens=length // 2, temperature=temperature, top_p=0.9, seed=0)
            if length > 1:
                self.add(Request(request_id=name, prompt_ids=[0] * (length - length // 2), params=params))
        start = time.perf_counter()
        while self.has_work():
            if any(output.error for output in self.step()):
                raise LMKitError("the engine cannot compute a token")
        log.info("first steps took %.1f s", time.perf_counter() - start)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run or the queue is full."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request early; its last output says "abort". An unknown id is ignored: it may just have finished."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[StepOutput]:
        """Schedule, compute, sample: the outputs of the oldest step under way, or those that need none.

        A step that raises ends its own requests with an error and no others.
        """
        while True:
            start = time.perf_counter()
            plan = self.scheduler.schedule()
            self._profile.schedule += time.perf_counter() - start
            if plan is not None:
                self._under_way.append((plan, self._begin(plan)))
            if not self._under_way:
                outputs = self.scheduler.take_outputs()
                if not outputs:
                    self.scheduler.wait(IDLE_SECONDS)
                return outputs
            if plan is None or not self._overlap or len(self._under_way) > 1:
                return self._land(*self._under_way.popleft())

    def profile(self) -> Profile:
        """A copy, up to the last result that was taken in."""
        return replace(self._profile)

    def _begin(self, plan: StepPlan) -> Future[_Result]:
        if self._overlap:
            return self._thread.submit(self._execute, plan)
        future: Future[_Result] = Future()
        try:
            future.set_result(self._execute(plan))
        except Exception as error:  # noqa: BLE001 - logged where the result is taken
            future.set_exception(error)
        return future

    def _execute(self, plan: StepPlan) -> _Result:
        start, before = time.perf_counter(), self.runner.kernel_seconds
        sampled = self.runner.execute(plan)
        return sampled, time.perf_counter() - start, self.runner.kernel_seconds - before

    def _land(self, plan: StepPlan, future: Future[_Result]) -> list[StepOutput]:
        try:
            sampled, seconds, kernels = future.result()
        except Exception:  # one request must never end the engine
            self._failed_steps += 1
            log.exception("a step failed; its %d requests end with an error", len(plan.chunks))
            return self.scheduler.fail(plan, "the engine failed while computing this request")
        landed = time.perf_counter()
        outputs = self.scheduler.update(plan, sampled, seconds)
        profile = self._profile
        profile.steps += 1
        profile.kernels += kernels
        profile.execute += seconds
        profile.update += time.perf_counter() - landed
        return outputs

    def close(self) -> None:
        """Wait for steps under way, end the threads, let go of the disk. The engine cannot be used afterwards."""
        self._thread.shutdown()
        if self._tiers is not None:
            self._tiers.close()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self.scheduler.stats(), failed_steps=self._failed_steps)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()


def _has_tiers(config: EngineConfig) -> bool:
    has_tiers = config.kv_host_memory is not None or config.kv_disk_path is not None
    if has_tiers and not config.prefix_cache:
        raise ConfigError("kv_host_memory and kv_disk_path keep what the prefix cache finds; do not turn it off")
    if config.kv_disk_path is None and config.kv_disk_memory != EngineConfig().kv_disk_memory:
        raise ConfigError("kv_disk_memory bounds what lies in kv_disk_path; name that folder too")
    return has_tiers


def _open_disk(config: EngineConfig, fingerprint: bytes, block_bytes: int) -> DiskTier | None:
    """Raises ConfigError for a folder or a size that cannot be used."""
    if config.kv_disk_path is None:
        return None
    return DiskTier(config.kv_disk_path, fingerprint, block_bytes=block_bytes, max_bytes=config.kv_disk_memory)


def _limits(config: EngineConfig, memory: MemoryPlan, spec: ModelSpec) -> SchedulerLimits:
    return SchedulerLimits(
        kv=kv_limits(spec, config, memory.num_blocks),
        max_batch_size=config.max_batch_size,
        max_step_tokens=config.max_step_tokens,
        max_model_len=memory.max_model_len,
        max_queue=config.max_queue,
        vocab_size=spec.vocab_size,
        priority_seconds=config.priority_seconds,
        max_overtakes=config.max_overtakes,
        decode_slowdown=config.decode_slowdown,
        request_timeout=config.request_timeout,
    )


def resolve_device(config: EngineConfig) -> str:
    if config.device == "cuda":
        raise UnsupportedError("device cuda: this build has no CUDA kernels; use --device cpu")
    return "cpu"


def _info(path: str, limits: SchedulerLimits, dtypes: list[tuple[str, str]], memory: MemoryPlan) -> EngineInfo:
    kinds = sorted({f"{k}/{v}" if k != v else k for k, v in dtypes})
    return EngineInfo(
        model_path=path,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        num_blocks=limits.kv.num_blocks,
        block_size=limits.kv.block_size,
        kv_dtype=" ".join(kinds),
        memory=memory.as_dict(),
    )
