"""`lmkit serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmkit.config import EngineConfig, ServerConfig, parse, parse_bytes
from lmkit.errors import ConfigError

_ENGINE, _SERVER = EngineConfig(), ServerConfig()


# Longer than usual: the parameters are the command's options.
def serve(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, or "demo".')],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = _SERVER.host,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = _SERVER.port,
    served_model_name: Annotated[
        str | None, typer.Option(help="Default: the folder's name, or the name given.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Accept this key; repeatable. Others on this machine can see it: see next.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key a line.")] = None,
    max_body: Annotated[str, typer.Option(help="Largest request body, e.g. 4M.")] = str(_SERVER.max_body_bytes),
    drain_seconds: Annotated[
        float, typer.Option(help="After SIGTERM, how long running requests may finish.")
    ] = _SERVER.drain_seconds,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = _ENGINE.device,
    dtype: Annotated[str, typer.Option(help="Of dense weights: auto, float32, bfloat16 or float16.")] = _ENGINE.dtype,
    kv_dtype: Annotated[
        str, typer.Option(help="KV cache: auto, float32, bfloat16, int8, fp8 or int4.")
    ] = _ENGINE.kv_dtype,
    activations: Annotated[str, typer.Option(help="In quantized linears: int8 or exact.")] = _ENGINE.activations,
    lm_head: Annotated[str, typer.Option(help="auto as the checkpoint has it, int8 smaller.")] = _ENGINE.lm_head,
    packed_cache: Annotated[
        bool, typer.Option(help="Keep packed weights in a file, <checkpoint>/.lmkit, for the next start.")
    ] = _ENGINE.packed_cache,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = _ENGINE.block_size,
    max_batch_size: Annotated[int, typer.Option(help="Sequences in one step.")] = _ENGINE.max_batch_size,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens in one step.")] = _ENGINE.max_step_tokens,
    max_model_len: Annotated[int | None, typer.Option(help="Context in tokens. Default: the model's.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, e.g. 2G. Default: what the batch needs.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Waiting requests; one more is refused.")] = _ENGINE.max_queue,
    num_threads: Annotated[int | None, typer.Option(help="Default: all cores this process may use.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = _SERVER.log_level,
    engine: Annotated[str | None, typer.Option(hidden=True, help="module:Class of another engine.")] = None,
) -> None:
    """Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models."""
    from lmkit import log
    from lmkit.formats.hub import resolve_model_path
    from lmkit.serve.server import serve as run
    from lmkit.turbo.async_engine import AsyncEngine
    from lmkit.turbo.worker import ENGINE

    engine_config = parse(
        {
            "device": device,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "activations": activations,
            "lm_head": lm_head,
            "packed_cache": packed_cache,
            "block_size": block_size,
            "max_batch_size": max_batch_size,
            "max_step_tokens": max_step_tokens,
            "max_model_len": max_model_len,
            "kv_memory": parse_bytes(kv_memory, "--kv-memory") if kv_memory else None,
            "max_queue": max_queue,
            "num_threads": num_threads,
        },
        EngineConfig,
        "serve",
    )
    server_config = parse(
        {
            "host": host,
            "port": port,
            "served_model_name": served_model_name or (Path(model).resolve().name if Path(model).is_dir() else model),
            "api_keys": _keys(api_key or [], api_key_file),
            "max_body_bytes": parse_bytes(max_body, "--max-body"),
            "drain_seconds": drain_seconds,
            "log_level": log_level,
        },
        ServerConfig,
        "serve",
    )
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {log_level!r}: expected DEBUG, INFO, WARNING or ERROR")
    log.setup(log_level)
    path = resolve_model_path(model)
    front_end = AsyncEngine(path, engine_config, engine=engine or ENGINE, log_level=log_level)
    raise typer.Exit(run(front_end, server_config, lambda line: print(line, flush=True)))


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """All keys, without blank lines; a key that no header can carry is an error."""
    keys = list(given)
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot read API keys: {error}") from None
        if not keys:
            raise ConfigError(f"{file}: no API key in it")
    for i, key in enumerate(keys, 1):
        if not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"API key {i}: expected printable ASCII without spaces")
    return tuple(keys)
