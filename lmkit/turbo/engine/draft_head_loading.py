"""From a checkpoint to the draft head of an engine. All refusals come before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.models import kv_storage
from lmkit.models.decoder import Decoder
from lmkit.models.draft_head import HeadParts, HeadSource
from lmkit.models.kv_storage import KVStorage
from lmkit.models.packed_cache import PackedFile
from lmkit.turbo.engine.memory import MemoryPlan, plan_memory
from lmkit.turbo.host_memory import gib
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.runners.device import EngineDevice
from lmkit.turbo.runners.draft_head_runner import DraftHeadRunner
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.runner import Runner, RunnerParts
from lmkit.turbo.runners.streams import Streams

log = get_logger(__name__)


def parts_of(config: EngineConfig, decoder: Decoder, storages: list[KVStorage], memory: MemoryPlan) -> RunnerParts:
    """The parts of the runner of a model or head that drafts."""
    spec, layout = decoder.spec, memory.layout
    kv = kv_storage.allocate(
        spec.layers, storages, memory.num_blocks, config.tokens_per_block, memory.max_model_len, config.device, layout
    )
    return RunnerParts(
        config,
        decoder,
        kv,
        KVBlocks(kv),
        None,
        Guides(None, spec.vocab_size),
        memory.max_model_len,
        memory.workspace,
        len(layout.groups),
    )


@dataclass(frozen=True)
class LoadedHead:
    """A head and the decisions for it."""

    config: EngineConfig
    parts: HeadParts
    storage: KVStorage
    memory: MemoryPlan

    def start(self, runner: Runner, device: EngineDevice, vocab_size: int) -> DraftHeadRunner:
        """Make the drafter beside `runner`, whose model has `vocab_size` tokens."""
        batch, at = runner.batch, runner.decoder.at
        streams = Streams(
            self.parts.streams, self.parts.spec.hidden_size, len(batch.num_tokens), batch.max_step_tokens, at
        )
        runner.keep_streams(streams)
        parts = parts_of(self.config, self.parts.join(runner.decoder), [self.storage], self.memory)
        own = device.head_runner(parts, self.parts.token_ids)
        drafter = DraftHeadRunner(own, self.memory.num_blocks, vocab_size, runner.call, streams)
        drafter.warm_up()
        return drafter


@dataclass(frozen=True)
class ResolvedHead:
    """A head that is not loaded yet, and its memory."""

    config: EngineConfig
    source: HeadSource
    storage: KVStorage
    memory: MemoryPlan

    def load(self, check: Callable[[PackedFile], Any]) -> LoadedHead:
        """See ResolvedDraft. There is no packed file."""
        parts = self.source.read()
        log.info("draft head: %s for %s tokens", gib(self.memory.total), f"{self.memory.num_tokens:,}")
        return LoadedHead(self.config, parts, self.storage, self.memory)


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
        storage = KVStorage(source.place.kv_dtype, source.place.kv_dtype)
        try:
            memory = plan_memory(source.spec, own, [storage.dtypes], source.weight_bytes + streams, free)
        except ConfigError as error:
            raise ConfigError(f"draft head, which gets a third of the free memory: {error}") from None
        yield ResolvedHead(own, source, storage, memory)
    finally:
        source.close()
