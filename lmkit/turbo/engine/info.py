"""What an engine tells its front end when it is ready."""

from __future__ import annotations

from typing import Any

import numba
import torch

from lmkit import __version__
from lmkit.kernels.cpu import isa
from lmkit.models.identity import SOURCES, sources_digest
from lmkit.models.kv_storage import storage_text
from lmkit.text.audio import AudioSettings
from lmkit.turbo.engine.loading import LoadedModel
from lmkit.turbo.host_memory import resident_memory
from lmkit.turbo.request import EngineInfo
from lmkit.turbo.scheduling.limits import SchedulerLimits


def engine_info(model: LoadedModel, limits: SchedulerLimits, captured: str) -> EngineInfo:
    """The facts of an engine that has computed its first steps. `captured`: what the runner says of captured steps."""
    memory = model.memory
    return EngineInfo(
        model_path=model.path,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_batch_size=limits.max_batch_size,
        num_blocks=memory.num_tokens // limits.kv.block_size,
        block_size=limits.kv.block_size,
        kv_dtype=storage_text(model.storages),
        memory=memory.as_dict(),
        reserved=model.config.num_local * (resident_memory() + memory.to_come(model.config)),
        has_head=model.has_head,
        hidden_size=model.vector_size,
        pooling=model.sentences.pooling,
        sentences=model.sentences,
        vector_layers=model.layers,
        dimensions=model.dimensions,
        classes=model.classes,
        sampling=model.sampling,
        **_senses(model),
        captured=captured,
        selftest=model.selftest,
        computed=computed(model),
    )


def _senses(model: LoadedModel) -> dict[str, Any]:
    """How the engine wants images, videos and audio, or why it takes none."""
    if isinstance(model.tower, str):
        return {"images": model.tower, "videos": model.tower}
    settings = model.tower.settings
    if isinstance(settings, AudioSettings):
        return {"audio": settings}
    return {"images": settings, "videos": model.tower.videos}


# Options that change bits. The number of threads is none of them.
BITS = (
    "device", "dtype", "kv_dtype", "activations", "lm_head", "quantize", "model_impl", "attention_sinks", "block_size",
    "tp", "ep", "pp", "deterministic", "image_pixels",
)  # fmt: skip


def computed(model: LoadedModel) -> dict[str, Any]:
    """What a receipt says of the computation. Under equal values equal requests have equal answers."""
    config = model.config
    return {
        "kernels": sources_digest(SOURCES),
        "isa": isa.host().name,
        "versions": {"lmkit": __version__, "torch": str(torch.__version__), "numba": numba.__version__},
        "kv": storage_text(model.storages),
        "batch_invariant": config.is_invariant and not model.decoder.spec.foreign,
        "options": {name: getattr(config, name) for name in BITS},
    }
