"""From a checkpoint to the draft head of an engine. All refusals come before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.kv_dtype import kv_dtype
from lmkit.log import get_logger
from lmkit.models import kv_storage
from lmkit.models.draft_head import HeadParts, HeadSource
from lmkit.models.kv_storage import KVStorage
from lmkit.models.packed_cache import PackedFile
from lmkit.turbo.engine.memory import MemoryPlan, plan_memory
from lmkit.turbo.host_memory import gib
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.head_drafter import HeadDrafter
from lmkit.turbo.runners.runner import Runner, RunnerParts
from lmkit.turbo.runners.streams import Streams

log = get_logger(__name__)
STORAGE = KVStorage(kv_dtype("bfloat16"), kv_dtype("bfloat16"))


@dataclass(frozen=True)
class LoadedHead:
    """A head and the decisions for it."""

    config: EngineConfig
    parts: HeadParts
    memory: MemoryPlan

    def start(self, runner: Runner, vocab_size: int) -> HeadDrafter:
        """Make the drafter beside `runner`, whose model has `vocab_size` tokens."""
        assert isinstance(runner, CpuRunner)
        config, memory, spec = self.config, self.memory, self.parts.spec
        batch = runner.batch
        streams = Streams(self.parts.streams, spec.hidden_size, len(batch.num_tokens), batch.max_step_tokens)
        runner.keep_streams(streams)
        sizes = memory.num_blocks, config.tokens_per_block, memory.max_model_len
        kv = kv_storage.allocate(spec.layers, [STORAGE], *sizes, "cpu", memory.layout)
        guides = Guides(None, spec.vocab_size)
        head = self.parts.join(runner.decoder)
        parts = RunnerParts(config, head, kv, KVBlocks(kv), None, guides, memory.max_model_len, memory.workspace)
        drafter = HeadDrafter(parts, self.parts, memory.num_blocks, vocab_size, runner.call, streams)
        drafter.warm_up()
        return drafter


@dataclass(frozen=True)
class ResolvedHead:
    """A head that is not loaded yet, and its memory."""

    config: EngineConfig
    source: HeadSource
    memory: MemoryPlan

    def load(self, check: Callable[[PackedFile], Any]) -> LoadedHead:
        """See ResolvedDraft. There is no packed file."""
        parts = self.source.read()
        log.info("draft head: %s for %s tokens", gib(self.memory.total), f"{self.memory.num_tokens:,}")
        return LoadedHead(self.config, parts, self.memory)


@contextmanager
def resolved_head(config: EngineConfig, own: EngineConfig, source: HeadSource, free: int) -> Iterator[ResolvedHead]:
    """The head in `source`, which this closes. `own` is its own configuration, and `free` its share of the memory.

    Raises ConfigError.
    """
    try:
        if own.max_model_len is not None:
            own = structs.replace(own, max_model_len=min(own.max_model_len, source.spec.max_position))
        slots, tokens = config.sequences_per_step, config.tokens_per_step
        streams = Streams.num_bytes(len(source.streams), source.spec.hidden_size, slots, tokens)
        try:
            memory = plan_memory(source.spec, own, [STORAGE.dtypes], source.weight_bytes + streams, free)
        except ConfigError as error:
            raise ConfigError(f"draft head, which gets a third of the free memory: {error}") from None
        yield ResolvedHead(own, source, memory)
    finally:
        source.close()
