"""The engine: a scheduler and a runner in step. One loop owns it; it is not thread-safe."""

from __future__ import annotations

import time

import msgspec

from lmkit.config import EngineConfig, default_num_threads
from lmkit.errors import LMKitError, UnsupportedError
from lmkit.kernels.cpu import threads
from lmkit.log import get_logger
from lmkit.models import kv_storage
from lmkit.models.loader import ModelSource, load_model, resolve_dtype
from lmkit.text import Tokenizer
from lmkit.turbo.batch import PersistentBatch
from lmkit.turbo.memory import MemoryPlan, plan_memory
from lmkit.turbo.request import EngineInfo, EngineStats, GenerationConfig, Request, StepOutput
from lmkit.turbo.runner import Runner
from lmkit.turbo.sampler import Sampler
from lmkit.turbo.scheduler import Scheduler, SchedulerLimits

log = get_logger(__name__)


class Engine:
    """Runs one checkpoint. Raises CheckpointError, ConfigError or UnsupportedError before it loads any weight."""

    def __init__(self, model_path: str, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        device = resolve_device(config)
        threads.configure(config.num_threads or default_num_threads())
        source = ModelSource(model_path)
        try:
            spec, path = source.spec, source.reader.path
            dtype = resolve_dtype(config.dtype, spec.dtype, device)
            storages = kv_storage.resolve_storage(source.reader, spec, config.kv_dtype, dtype)
            dtypes = [storage.dtypes for storage in storages]
            weight_bytes = source.weight_bytes(dtype, config.lm_head)
            weight_bytes += kv_storage.table_bytes(spec, storages, config.max_model_len or spec.max_position)
            memory = plan_memory(spec, config, dtypes, weight_bytes)
        finally:
            source.close()
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
        self.runner = Runner(decoder, kv, batch, sampler, memory.workspace)
        limits = SchedulerLimits(
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_model_len=memory.max_model_len,
            max_queue=config.max_queue,
            vocab_size=spec.vocab_size,
        )
        self._failed_steps = 0
        self._warm_up(limits)
        self.scheduler = Scheduler(limits, Tokenizer.from_pretrained(path).eos_token_ids)
        self.info = _info(str(path), limits, dtypes, memory)

    def _warm_up(self, limits: SchedulerLimits) -> None:
        """Compute a few tokens with a scheduler of their own: what is compiled or read on first use is, before any
        request comes. Raises LMKitError if a step fails; its log says why.
        """
        self.scheduler = Scheduler(limits, ())
        length = min(4, limits.max_model_len, limits.num_blocks * limits.block_size)
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
        """Schedule, compute, sample. A step that raises ends its own requests with an error and no others."""
        plan = self.scheduler.schedule()
        if plan is None:
            return self.scheduler.take_outputs()
        try:
            sampled = self.runner.execute(plan)
        except Exception:  # one request must never end the engine
            self._failed_steps += 1
            log.exception("a step failed; its %d requests end with an error", len(plan.chunks))
            return self.scheduler.fail(plan, "the engine failed while computing this request")
        return self.scheduler.update(plan, sampled)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self.scheduler.stats(), failed_steps=self._failed_steps)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()


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
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        kv_dtype=" ".join(kinds),
        memory=memory.as_dict(),
    )
