"""From a checkpoint to the draft model of an engine. All refusals come before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.log import get_logger
from lmkit.models import kv_storage
from lmkit.models.decoder import Decoder
from lmkit.models.draft_head import EagleSource
from lmkit.models.kv_storage import KVStorage
from lmkit.models.loader import load as load_decoder
from lmkit.models.mtp import MTPSource, has_mtp
from lmkit.models.packed_cache import PackedFile
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.text import Tokenizer
from lmkit.turbo.engine.draft_head import ResolvedHead, resolved_head
from lmkit.turbo.engine.memory import MemoryPlan, loaded_bytes, plan_memory
from lmkit.turbo.host_memory import gib
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.device import Device
from lmkit.turbo.runners.drafter import Drafter
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.runner import Runner, RunnerParts

log = get_logger(__name__)
SHARE = 3  # the draft model takes at most this part of the free memory: one third


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model and the decisions for it."""

    config: EngineConfig
    decoder: Decoder
    storages: list[KVStorage]
    memory: MemoryPlan

    def start(self, runner: Runner, vocab_size: int) -> Drafter:
        """Make the drafter beside `runner`, whose model has `vocab_size` tokens."""
        assert isinstance(runner, CpuRunner)
        config, memory, spec = self.config, self.memory, self.decoder.spec
        sizes = memory.num_blocks, config.tokens_per_block, memory.max_model_len
        kv = kv_storage.allocate(spec.layers, self.storages, *sizes, "cpu", memory.layout)
        guides = Guides(None, spec.vocab_size)
        parts = RunnerParts(
            config, self.decoder, kv, KVBlocks(kv), None, guides, memory.max_model_len, memory.workspace
        )
        drafter = Drafter(parts, memory.num_blocks, vocab_size, runner.call)
        drafter.warm_up()
        return drafter


@dataclass(frozen=True)
class ResolvedDraft:
    """A draft model that is not loaded yet, and its memory."""

    config: EngineConfig
    model: ResolvedModel
    memory: MemoryPlan

    def load(self, check: Callable[[PackedFile], Any]) -> LoadedDraft:
        decoder = load_decoder(self.model, packed_cache=self.config.packed_cache, check=check)
        log.info("draft model: %s for %s tokens", gib(self.memory.total), f"{self.memory.num_tokens:,}")
        return LoadedDraft(self.config, decoder, self.model.storages, self.memory)


@contextmanager
def resolved_draft(
    config: EngineConfig, device: Device, target: ResolvedModel
) -> Iterator[ResolvedDraft | ResolvedHead | None]:
    """The draft model or head of `config` for the model `target`, if there is one.

    Raises CheckpointError, ConfigError or UnsupportedError.
    """
    kind, _, folder = config.speculate.partition("=")
    if kind == "auto":
        kind = _automatic(config, device, target)
    if kind in ("off", "ngram"):
        yield None
        return
    if device.name != "cpu":
        raise UnsupportedError("draft models and heads run on a CPU alone so far; use speculate ngram on a GPU")
    free = device.free_memory() // SHARE
    if kind != "draft":
        source = MTPSource(target) if kind == "mtp" else EagleSource(folder, target.spec)
        with resolved_head(config, _own(config, config.max_model_len), source, free) as head:
            yield head
        return
    with resolved(folder, device="cpu") as model:
        if not model.source.has_head:
            raise ConfigError(f"draft model {model.reader.path}: this checkpoint has no head to generate with")
        if model.spec.is_recurrent:
            raise ConfigError(f"draft model {model.reader.path}: it has recurrent states; use one of full attention")
        _check_tokens(model.reader.path, target.reader.path)
        context = model.spec.max_position
        if config.max_model_len is not None:
            context = min(context, config.max_model_len)
        own = _own(config, context if config.max_model_len is not None else None)
        dtypes = [storage.dtypes for storage in model.storages]
        try:
            memory = plan_memory(model.spec, own, dtypes, loaded_bytes(model, own), free)
        except ConfigError as error:
            raise ConfigError(f"draft model, which gets a third of the free memory: {error}") from None
        yield ResolvedDraft(own, model, memory)


def _automatic(config: EngineConfig, device: Device, target: ResolvedModel) -> str:
    """What `speculate` auto means: the checkpoint's own layer for multi-token prediction, if it has one, or ngram."""
    alone = device.name == "cpu" and config.num_processes == 1
    kind = "mtp" if alone and has_mtp(target) else "ngram"
    log.info("speculate: %s", kind)
    return kind


def _own(config: EngineConfig, max_model_len: int | None) -> EngineConfig:
    """The configuration of the draft model's runner."""
    return EngineConfig(
        device="cpu",
        max_batch_size=config.max_batch_size,
        max_step_tokens=config.max_step_tokens,
        block_size=config.block_size,
        max_model_len=max_model_len,
        overlap=False,
        packed_cache=config.packed_cache,
    )


def _check_tokens(draft: Path, target: Path) -> None:
    """Raises ConfigError if the models have different tokens."""
    if _tokens(draft) != _tokens(target):
        raise ConfigError(
            f"draft model {draft}: its tokenizer has other tokens than that of {target}; "
            f"use a smaller model of the same family"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """The ids of a checkpoint's tokens, without those that only its chat template needs."""
    return Tokenizer.from_pretrained(folder).backend.get_vocab(with_added_tokens=False)
