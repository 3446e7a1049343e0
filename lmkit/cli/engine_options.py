"""Every field of EngineConfig as an option of the command line. A new field needs a line of help here."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from lmkit.config import EngineConfig, parse, parse_bytes

HELP = {
    "device": "auto, cpu or cuda.",
    "dtype": "Type of dense weights, and on a GPU of activations: auto, float32, bfloat16 or float16.",
    "kv_dtype": "KV cache: auto, float32, bfloat16, float16, int8, fp8 or int4.",
    "activations": "Rounding of inputs of quantized linears: auto, int8, fp8 or exact.",
    "lm_head": "auto (as in the checkpoint), or int8 (smaller).",
    "packed_cache": "Keep packed weights in a file, <checkpoint>/.lmkit, for the next start.",
    "block_size": "Tokens in a KV block. Default: 32 on a CPU, 64 on a GPU.",
    "max_batch_size": "Sequences in one step.",
    "max_step_tokens": "Tokens in one step. Default: 512 on a CPU, 4096 on a GPU.",
    "max_model_len": "Context in tokens. Default: the model's.",
    "kv_memory": "Memory for the KV cache, e.g. 2G. Default: what the batch needs.",
    "max_queue": "Waiting requests; one more is refused.",
    "num_threads": "Default: all cores this process may use.",
    "prefix_cache": "Keep the KV of prompts and answers for later requests.",
    "cache_quota": "Share of the KV cache that one API key may keep. Default with several keys: 0.5.",
    "session_lease": "Seconds for which a session's KV stays after its last answer.",
    "kv_host_memory": "Host memory for KV that does not fit, e.g. 2G. Default: none.",
    "kv_disk_path": "A folder for KV on disk, which survives a restart. Default: none.",
    "kv_disk_memory": "Bytes on disk that the folder may take.",
    "attention_sinks": "First tokens that sliding windows still see.",
    "priority_seconds": "Seconds of waiting that one level of a request's priority is worth.",
    "max_overtakes": "How often later requests with a longer cached prefix may overtake a request.",
    "decode_slowdown": "Largest slowdown of decoding during a prefill: 2 = twice as slow.",
    "overlap": "Prepare the next step while one runs.",
    "request_timeout": "Seconds that a request may take if it names no timeout. Default: no limit.",
    "generation_config": "Sampling defaults: auto (the checkpoint's generation_config.json), none, or a path.",
}
_SIZES = {"kv_memory": None, "kv_host_memory": None, "kv_disk_memory": "16G"}  # options written as 2G, with defaults


def engine_options(**given: Any) -> EngineConfig:
    """The EngineConfig that these options describe. Raises ConfigError."""
    for name in _SIZES:
        if (text := given.get(name)) is not None:
            given[name] = parse_bytes(text, f"--{name.replace('_', '-')}")
    return parse(given, EngineConfig, "engine options")


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    kind, default = (str | None, _SIZES[name]) if name in _SIZES else (kind, getattr(EngineConfig(), name))
    if get_origin(kind) is Literal:
        kind = str  # EngineConfig checks the values
    annotation = Annotated[kind, typer.Option(help=HELP[name])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


engine_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, kind) for name, kind in get_type_hints(EngineConfig).items()]
)
