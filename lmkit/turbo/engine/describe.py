"""The facts that `lmkit inspect` shows. They are read from headers and configuration, without loading a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.kv_config import load_kv_config
from lmkit.layers.mlp_spec import MoESpec
from lmkit.models.packed_cache import cache_folders
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.models.spec import ModelSpec
from lmkit.turbo.engine.loading import load_options
from lmkit.turbo.engine.memory import plan_memory
from lmkit.turbo.runners.device import resolve_device


def describe_model(path: str, config: EngineConfig) -> dict[str, Any]:
    """Architecture, weights, KV cache and serving memory of a checkpoint. Raises the errors of opening it."""
    device = resolve_device(config)
    config = config.on(device.name)
    with resolved(path, **load_options(config)) as model:
        spec, reader, storages = model.spec, model.reader, model.storages
        heads = (1 if spec.tie_embeddings else 2) * math.prod(spec.head_shape)
        token_bytes = [layer.kv_token_bytes(*s.dtypes) for layer, s in zip(spec.layers, storages, strict=True)]
        return {
            "path": str(reader.path),
            "architecture": {
                "name": spec.architecture,
                "layers": spec.num_layers,
                "hidden size": spec.hidden_size,
                "heads": _differing(
                    f"{layer.num_heads} query, {layer.num_kv_heads} key-value, of {layer.head_dim}"
                    for layer in spec.kinds
                ),
                "MLP size": max(layer.widest_mlp for layer in spec.kinds),
                **_experts(spec),
                "vocabulary": spec.vocab_size,
                "context": spec.max_position,
                "rope": _differing(layer.rope.kind for layer in spec.kinds),
                "sliding window": sorted(set(spec.windows)) if any(spec.windows) else "none",
            },
            "weights": {
                "format": model.source.format.name,
                "parameters": spec.num_weights + heads,
                "linear parameters": spec.num_weights,
                "bits per linear weight": round(8 * _layer_bytes(model) / spec.num_weights, 3),
                "file bytes": reader.nbytes(),
            },
            "KV cache": {
                "kv_config.json": "yes" if load_kv_config(reader.path) else "no",
                "storage (K, V)": " ".join(sorted({f"{s.k}/{s.v}" for s in storages})),
                "key mean left out": f"in {sum(s.has_mean for s in storages)} layers",
                "Hadamard on keys": f"in {sum(s.hadamard for s in storages)} layers",
                "bytes per token": sum(token_bytes),
            },
            "serving": {"device": device.name, **_serving(model, config, device.free_memory())},
            "packed weights": _packed_files(reader.path),
        }


def _differing(facts: Iterable[str]) -> str:
    """The different facts of the layers, each once."""
    return "; ".join(dict.fromkeys(facts))


def _experts(spec: ModelSpec) -> dict[str, Any]:
    """The experts of a model with sparse layers."""
    sparse = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    if not sparse:
        return {}
    moe = sparse[0]
    shared = f", 1 shared of {moe.shared.intermediate_size}" if moe.shared else ""
    each = f"{moe.num_experts} of {moe.expert.intermediate_size}, {moe.experts_per_token} a token"
    return {"experts": each + shared + (f", in {len(sparse)} layers" if len(sparse) < spec.num_layers else "")}


def _packed_files(checkpoint: Path) -> dict[str, Any]:
    """The folder of the packed weights, and the number and size of its files."""
    folders = cache_folders(checkpoint)
    files = [file for folder in folders for file in folder.glob("packed-*.safetensors")]
    return {
        "folder": str(files[0].parent if files else folders[0]),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _layer_bytes(model: ResolvedModel) -> int:
    """Bytes of the decoder layers' linears with their scales and zeros, as stored."""
    reader = model.reader
    modules = {layer.module_name(i, role) for i, layer in enumerate(model.spec.layers) for role in layer.linears}
    return sum(reader.info(name).nbytes for name in reader.names() if name.rpartition(".")[0] in modules)


def _serving(model: ResolvedModel, config: EngineConfig, available: int) -> dict[str, Any]:
    try:
        plan = plan_memory(model.spec, config, [s.dtypes for s in model.storages], model.weight_bytes(), available)
    except ConfigError as error:
        return {"fits": f"no: {error}"}
    return {
        "fits": "yes",
        "weight bytes": plan.weights,
        "workspace bytes": plan.workspace,
        "KV bytes": plan.kv,
        "available bytes": plan.available,
        "KV blocks": plan.num_blocks,
        "KV tokens": plan.num_tokens,
        "context": plan.max_model_len,
    }
