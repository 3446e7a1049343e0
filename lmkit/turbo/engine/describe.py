"""The facts that `lmkit inspect` shows. They are read from headers and configuration, without loading the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lmkit import conflicts
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.generation_config import RANGES, SamplingDefaults, read_defaults
from lmkit.formats.kv_config import load_kv_config
from lmkit.models.mtp import mtp_bytes
from lmkit.models.packed_cache import cache_folders
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.models.spec import ModelSpec
from lmkit.models.streamed import forecast
from lmkit.models.tower import tower_bytes
from lmkit.models.weight_bits import bits_of_linears
from lmkit.turbo.engine import copies
from lmkit.turbo.engine.classes import read_classes, sentences_of
from lmkit.turbo.engine.loading import load_options, traits_of
from lmkit.turbo.engine.memory import MemoryPlan, for_listeners, loaded_bytes, plan_memory
from lmkit.turbo.engine.sentences import read_layers
from lmkit.turbo.engine.streaming import streaming_of, with_batch
from lmkit.turbo.engine.which import engine_facts
from lmkit.turbo.runners.devices import resolve_device

T = TypeVar("T")


def describe_model(path: str, config: EngineConfig) -> dict[str, Any]:
    """Architecture, weights, KV cache and serving memory of a checkpoint. Raises the errors of opening it, and
    UnsupportedError if the processes of `config` cannot share it.

    Every report has the same keys, and null where there is nothing. Sizes are bytes.
    """
    device = resolve_device(config)
    config = config.on(device.name, device.free_memory())
    conflicts.check(config, *device.traits)
    with resolved(path, **load_options(config)) as model:
        model.check_cut()
        spec, reader = model.source.spec, model.reader
        if spec.foreign:
            conflicts.check(config, *traits_of(spec, config), architecture=spec.architecture)
        writes = not spec.sees_all
        heads = (1 if spec.tie_embeddings else 2) * math.prod(spec.head_shape)
        shares = config.num_shares
        return {
            "path": str(reader.path),
            "engine": engine_facts(model, config),
            "architecture": {
                "name": spec.architecture,
                "layers": spec.num_layers,
                "hidden_size": spec.hidden_size,
                "attention": _distinct(
                    {
                        "query_heads": layer.num_heads,
                        "kv_heads": layer.num_kv_heads,
                        "head_dim": layer.head_dim,
                        "window": layer.attention.window or None,
                    }
                    for layer in spec.kinds
                    if layer.kv is not None
                ),
                "rope": _distinct(layer.rope.kind for layer in spec.kinds if layer.kv is not None),
                "mlp_size": max(layer.widest_mlp for layer in spec.kinds),
                "experts": _experts(spec),
                "vocabulary": spec.vocab_size,
                "context": spec.max_position,
            },
            "weights": {
                "format": model.source.format.name,
                "dtype": spec.dtype,
                "parameters": spec.num_weights + heads,
                "linear_parameters": spec.num_weights,
                "bits_per_linear_weight": round(bits_of_linears(spec, reader), 3),
                "file_bytes": reader.nbytes(),
                "vision_tower_bytes": tower_bytes(model) or None,
                "mtp_bytes": mtp_bytes(model) or None,
            },
            "kv_cache": _kv_cache(model) if writes and spec.has_kv else None,
            "embeddings": None if writes else _embeddings(model, config),
            "sampling_defaults": _sampling(read_defaults(reader.path, config.generation_config)) if writes else None,
            "serving": {"device": device.name} | _serving(model, config, device.free_memory() // shares),
            "packed_weights": _packed_files(reader.path, config.weights_path),
        }


def describe_ways(path: str, config: EngineConfig, count: int) -> list[dict[str, Any]]:
    """For each way to share the model out to `count` processes: what each of these holds, or why it cannot be."""
    ways: tuple[dict[str, int], ...] = ({"tp": count}, {"tp": count, "ep": count}, {"ep": count}, {"pp": count})
    return [_way(path, config, way) for way in ways]


def _way(path: str, config: EngineConfig, way: dict[str, int]) -> dict[str, Any]:
    flags = " ".join(f"--{name} {number}" for name, number in way.items())
    try:
        report = describe_model(path, msgspec.structs.replace(config, **way))
    except (ConfigError, UnsupportedError) as error:
        return {"flags": flags, "weight_bytes": None, "kv_token_bytes": None, "kv_tokens": None, "problem": str(error)}
    serving = report["serving"]
    return {
        "flags": flags,
        "weight_bytes": serving["weight_bytes"],
        "kv_token_bytes": serving["kv_bytes"] // serving["kv_tokens"] if serving["kv_tokens"] else None,
        "kv_tokens": serving["kv_tokens"],
        "problem": serving["problem"],
    }


def _distinct(facts: Iterable[T]) -> list[T]:
    """The different facts of the layers, each once."""
    found: list[T] = []
    for fact in facts:
        if fact not in found:
            found.append(fact)
    return found


def _experts(spec: ModelSpec) -> dict[str, Any] | None:
    """The experts of a model with sparse layers."""
    sparse = [layer.mixture for layer in spec.layers if layer.mixture is not None]
    if not sparse:
        return None
    moe = sparse[0]
    return {
        "experts": moe.num_experts,
        "experts_per_token": moe.experts_per_token,
        "expert_size": moe.expert.intermediate_size,
        "shared_size": moe.shared.intermediate_size if moe.shared else None,
        "layers": len(sparse),
    }


def _sampling(defaults: SamplingDefaults) -> dict[str, Any]:
    return {
        **{name: getattr(defaults, name) for name in (*RANGES, "max_new_tokens")},
        "not_applied": list(defaults.not_applied),
    }


def _kv_cache(model: ResolvedModel) -> dict[str, Any]:
    storages = model.storages
    token_bytes = [layer.kv_token_bytes(*s.dtypes) for layer, s in zip(model.spec.layers, storages, strict=True)]
    return {
        "kv_config": load_kv_config(model.reader.path) is not None,
        "storage": _distinct({"k": str(s.k), "v": str(s.v)} for s in storages),
        "key_mean_layers": sum(s.transform.has_mean for s in storages),
        "hadamard_layers": sum(s.transform.hadamard for s in storages),
        "balanced_layers": sum(s.transform.balance is not None for s in storages),
        "first_position_layers": sum(s.transform.first_key is not None for s in storages),
        "bytes_per_token": sum(token_bytes),
    }


def _embeddings(model: ResolvedModel, config: EngineConfig) -> dict[str, Any]:
    """What an encoder, which keeps no KV, makes of texts."""
    path, spec, classes = model.reader.path, model.spec, read_classes(model.source)
    sentences = sentences_of(path, config.pooling, spec, classes)
    return {
        "pooling": sentences.pooling,
        "size": read_layers(path, sentences, spec.hidden_size)[1],
        "unit_length": sentences.is_unit,
        "cut_to_tokens": sentences.max_tokens or None,
        "prompts": list(sentences.prompts),
        "classes": list(classes.labels) if classes else [],
    }


def _packed_files(checkpoint: Path, parent: str | None) -> dict[str, Any]:
    """The folder of the packed weights, and the number and size of its files."""
    folders = cache_folders(checkpoint, Path(parent) if parent else None)
    files = [file for folder in folders for file in folder.glob("packed-*.safetensors")]
    return {
        "folder": str(files[0].parent if files else folders[0]),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _serving(model: ResolvedModel, config: EngineConfig, available: int) -> dict[str, Any]:
    """The memory plan, with the same keys whether it fits or not."""
    dtypes = [storage.dtypes for storage in model.storages]
    weights, config = loaded_bytes(model, config), for_listeners(model.spec, config)
    plan, problem, streamed = None, None, None

    def planned(config: EngineConfig) -> MemoryPlan:
        return plan_memory(model.spec, config, dtypes, weights, available, copies.planned_bytes(model, config))

    try:
        if streaming := streaming_of(config):
            streamed = forecast(model, streaming)
            config = with_batch(config, streamed, planned)
        plan = planned(config)
    except ConfigError as error:
        problem = str(error)
    cache, texts = (None, plan) if model.spec.sees_all else (plan, None)
    return {
        "fits": plan is not None,
        "problem": problem or (plan.shortage() if plan else "") or None,
        "weight_bytes": weights,
        "copies_bytes": (plan and plan.copies) or None,
        "possible_copies_bytes": copies.possible_bytes(model, config) or None,
        "workspace_bytes": plan and plan.workspace,
        "runtime_bytes": config.target.runtime_bytes,
        "state_bytes": (plan and plan.states) or None,
        "audio_bytes": (plan and plan.audio) or None,
        "snapshot_bytes": (plan and plan.snapshots) or None,
        "kv_bytes": cache and cache.kv,
        "text_bytes": texts and texts.kv,
        "available_bytes": available,
        "kv_blocks": cache and cache.num_blocks,
        "kv_tokens": cache and cache.num_tokens,
        "context": cache and cache.max_model_len,
        "longest_text": texts and texts.max_model_len,
        "streaming": streamed.expected(config.sequences_per_step) if streamed else None,
    }
