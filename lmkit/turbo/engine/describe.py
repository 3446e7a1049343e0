"""What `lmkit inspect` tells: read from headers and configuration alone, without loading a weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.kv_config import load_kv_config
from lmkit.kv_dtype import KVDtype
from lmkit.models import roles
from lmkit.models.kv_storage import resolve_storage
from lmkit.models.loader import ModelSource, resolve_dtype
from lmkit.models.packed_cache import cache_folders
from lmkit.models.spec import ModelSpec
from lmkit.turbo.engine.memory import kv_token_bytes, plan_memory
from lmkit.turbo.runners.device import resolve_device


def describe_model(path: str, config: EngineConfig) -> dict[str, Any]:
    """Architecture, weights, KV cache and serving memory of a checkpoint. Raises what opening it raises."""
    device = resolve_device(config)
    config = config.on(device.name)
    source = ModelSource(path)
    try:
        spec, reader = source.spec, source.reader
        kv_config = load_kv_config(reader.path)
        dtype = resolve_dtype(config.dtype, spec.dtype, device.name)
        storages = resolve_storage(reader, spec, config.kv_dtype, dtype)
        dtypes = [storage.dtypes for storage in storages]
        weight_bytes = source.weight_bytes(dtype, config.lm_head)
        linear_params = sum(
            math.prod(spec.linear_shape(role))
            for layer in range(spec.num_layers)
            for role in roles.linears(spec, layer)
        )
        heads = (1 if spec.tie_embeddings else 2) * spec.vocab_size * spec.hidden_size
        return {
            "path": str(reader.path),
            "architecture": {
                "name": spec.architecture,
                "layers": spec.num_layers,
                "hidden size": spec.hidden_size,
                "heads": f"{spec.num_heads} query, {spec.num_kv_heads} key-value, of {spec.head_dim}",
                "MLP size": spec.intermediate_size,
                **_experts(spec),
                "vocabulary": spec.vocab_size,
                "context": spec.max_position,
                "rope": spec.rope.kind,
                "sliding window": sorted(set(spec.windows)) or "none",
            },
            "weights": {
                "format": source.format.name,
                "parameters": linear_params + heads,
                "linear parameters": linear_params,
                "bits per linear weight": round(8 * _layer_bytes(source) / linear_params, 3),
                "file bytes": reader.nbytes(),
            },
            "KV cache": {
                "kv_config.json": "yes" if kv_config else "no",
                "storage (K, V)": " ".join(sorted({f"{k}/{v}" for k, v in dtypes})),
                "key mean left out": f"in {sum(s.has_mean for s in storages)} layers",
                "Hadamard on keys": f"in {sum(s.hadamard for s in storages)} layers",
                "bytes per token": sum(kv_token_bytes(spec, pair) for pair in dtypes),
            },
            "serving": {"device": device.name, **_serving(source, config, dtypes, weight_bytes, device.free_memory())},
            "packed weights": _packed_files(reader.path),
        }
    finally:
        source.close()


def _experts(spec: ModelSpec) -> dict[str, Any]:
    """Of a model with sparse layers."""
    if spec.moe is None:
        return {}
    moe, sparse = spec.moe, sum(spec.moe.layers)
    shared = f", 1 shared of {moe.shared_intermediate_size}" if moe.shared_intermediate_size else ""
    each = f"{moe.num_experts} of {moe.intermediate_size}, {moe.experts_per_token} a token"
    return {"experts": each + shared + (f", in {sparse} layers" if sparse < spec.num_layers else "")}


def _packed_files(checkpoint: Path) -> dict[str, Any]:
    """Where they are kept, and what is there."""
    folders = cache_folders(checkpoint)
    files = [file for folder in folders for file in folder.glob("packed-*.safetensors")]
    return {
        "folder": str(files[0].parent if files else folders[0]),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _layer_bytes(source: ModelSource) -> int:
    """Bytes of the decoder layers' linears with their scales and zeros, as stored."""
    spec, reader = source.spec, source.reader
    modules = {roles.module_name(spec, i, role) for i in range(spec.num_layers) for role in roles.linears(spec, i)}
    return sum(reader.info(name).nbytes for name in reader.names() if name.rpartition(".")[0] in modules)


def _serving(
    source: ModelSource, config: EngineConfig, dtypes: list[tuple[KVDtype, KVDtype]], weight_bytes: int, available: int
) -> dict[str, Any]:
    try:
        plan = plan_memory(source.spec, config, dtypes, weight_bytes, available)
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
