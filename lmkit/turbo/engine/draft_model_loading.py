"""From a checkpoint to the draft model of an engine. All refusals come before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.models.draft_head import EagleSource
from lmkit.models.kv_storage import KVStorage
from lmkit.models.loader import load as load_decoder
from lmkit.models.mtp import MTPSource, has_mtp
from lmkit.models.packed_cache import PackedFile
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.text import Tokenizer
from lmkit.turbo.engine.draft_head_loading import ResolvedHead, parts_of, resolved_head
from lmkit.turbo.engine.memory import MemoryPlan, loaded_bytes, plan_memory
from lmkit.turbo.host_memory import gib
from lmkit.turbo.runners.device import EngineDevice
from lmkit.turbo.runners.draft_model_runner import DraftModelRunner
from lmkit.turbo.runners.runner import Runner

log = get_logger(__name__)
SHARE = 3  # the draft model takes at most this part of the free memory: one third


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model and the decisions for it."""

    config: EngineConfig
    decoder: Decoder
    storages: list[KVStorage]
    memory: MemoryPlan

    def start(self, runner: Runner, device: EngineDevice, vocab_size: int) -> DraftModelRunner:
        """Make the drafter beside `runner`, whose model has `vocab_size` tokens."""
        parts = parts_of(self.config, self.decoder, self.storages, self.memory)
        drafter = DraftModelRunner(device.runner(parts), self.memory.num_blocks, vocab_size, runner.call)
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
    config: EngineConfig, device: EngineDevice, target: ResolvedModel, rank: int = 0
) -> Iterator[ResolvedDraft | ResolvedHead | None]:
    """The draft model or head of `config` for the model `target`, if there is one. Rank 0 alone has it.

    Raises CheckpointError, ConfigError or UnsupportedError.
    """
    kind, folder = kind_of(config, target), config.speculate.partition("=")[2]
    if kind in ("off", "ngram") or rank:
        yield None
        return
    free = device.free_memory() // config.num_sharing // SHARE
    if kind != "draft":
        source = MTPSource(target) if kind == "mtp" else EagleSource(folder, target)
        with resolved_head(config, _own(config, config.max_model_len), source, free) as head:
            yield head
        return
    with resolved(folder, device=device.name) as model:
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


def kind_of(config: EngineConfig, target: ResolvedModel) -> str:
    """How tokens are drafted. `speculate` auto means the checkpoint's own layer for multi-token prediction, if it has
    one and its ranks, if there are several, are on a CPU; else ngram."""
    kind = config.speculate.partition("=")[0]
    if kind != "auto":
        return kind
    can = config.target.drafts_with_ranks or config.num_processes == 1
    kind = "mtp" if can and has_mtp(target) else "ngram"
    log.info("speculate: %s", kind)
    return kind


def follow(decoder: Decoder, config: EngineConfig, target: ResolvedModel) -> None:
    """Let another rank's part of the model compute what rank 0's head reads. Its layer for multi-token prediction reads
    what the last layer gives for all tokens of a prompt."""
    if kind_of(config, target) == "mtp":
        rows = max(config.tokens_per_step, config.sequences_per_step)
        decoder.kept = {decoder.spec.num_layers: torch.empty(rows, decoder.spec.hidden_size)}


def _own(config: EngineConfig, max_model_len: int | None) -> EngineConfig:
    """The configuration of the draft model's runner."""
    return EngineConfig(
        device=config.device,
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
