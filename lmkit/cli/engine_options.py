"""Every field of EngineConfig as an option of the command line. A new field needs a line of help here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from lmkit.cli.settings import origin
from lmkit.config import EngineConfig, StrictStruct, parse, parse_size
from lmkit.errors import ConfigError

HELP = {
    "Model": {
        "device": "auto takes a GPU if there is one.",
        "dtype": "Type of dense weights, and on a GPU of activations.",
        "kv_dtype": "Type of the KV cache.",
        "activations": "Rounding of inputs of quantized linears.",
        "lm_head": "auto (as in the checkpoint), or int8 (smaller).",
        "quantize": "Round the weights of a 16-bit checkpoint while it loads.",
        "max_model_len": "Context in tokens. Default: the model's.",
        "generation_config": "Sampling defaults: auto (the checkpoint's generation_config.json), none, or a path.",
        "chat_template": "A chat template's file, its text, or its name in the checkpoint. Default: the checkpoint's.",
        "adapters": "A LoRA adapter, NAME=FOLDER, served as a model of that name. Repeat the option for more.",
        "adapter_root": "A folder whose adapters may be loaded while the server runs. Default: none may.",
        "max_adapters": "Adapters in one batch; others wait in host memory.",
        "pooling": "Embeddings: auto (the checkpoint's), the state of the last or first (cls) token, or the mean.",
        "attention_sinks": "First tokens that sliding windows still see.",
        "packed_cache": "Keep packed weights in a file, <checkpoint>/.lmkit, for the next start.",
        "tp": "Processes that share the model: each computes a part of every layer.",
        "ep": "Processes that share the experts of a mixture; with --tp the same processes, so the same number.",
        "pp": "Processes that share the model: each computes some of the layers.",
        "devices": "GPUs of the processes of --tp or --ep: 0,1 for example, 0,0 to try it on one. Default: 0,1 and on.",
        "cluster": "Place the processes of --tp on other machines: ray, or torchrun. Default: all here.",
        "deterministic": "A request's tokens depend on it alone: on a CPU always; on a GPU slowly, if at all.",
        "num_threads": "Default: the physical cores this process may use.",
    },
    "Memory and cache": {
        "weights_memory": "Memory for weights, e.g. 8G; layers beyond are read in every step. Default: for all.",
        "weights_path": "A folder on a fast disk to read these layers from. Default: beside the checkpoint.",
        "kv_memory": "KV cache, as 2G or 30%. Default: for the batch; on a CPU at most a quarter of the free memory.",
        "kv_host_memory": "Host memory for KV that does not fit, e.g. 2G. Default: none.",
        "kv_disk_path": "A folder for KV on disk, which survives a restart. Default: none.",
        "kv_disk_memory": "Bytes on disk that the folder may take.",
        "kv_listen": "Give KV in host memory or on disk to other engines, at HOST:PORT. Default: no.",
        "kv_peer": "HOST:PORT of an engine with --kv-listen, to fetch the KV of prompts from. Default: none.",
        "kv_key_file": "A file with the key that both engines need.",
        "image_memory": "Memory for encoded images that later requests may show again.",
        "image_pixels": "The most pixels that a model sees of an image; larger ones are made smaller.",
        "block_size": "Tokens in a KV block. Default: 32 on a CPU, 64 on a GPU.",
        "prefix_cache": "Keep the KV of prompts and answers for later requests.",
        "cache_quota": "Share of the KV cache that one API key may keep. Default with several keys: 0.5.",
        "kv_events": "Publish what the cache gets and loses, over ZeroMQ at tcp://HOST:PORT. Default: nowhere.",
        "kv_events_topic": "Topic of these messages.",
        "session_lease": "Seconds for which a session's KV stays after its last answer.",
    },
    "Scheduling": {
        "max_batch_size": "Sequences in one step. Default: 64, or with --weights-memory as many as hide the disk.",
        "max_step_tokens": "Tokens in one step. Default: 512 on a CPU, 4096 on a GPU, at least twice a chosen batch.",
        "max_queue": "Waiting requests; one more is refused.",
        "queue_quota": "Share of the queue that one API key may fill. Default with several keys: 0.5.",
        "max_queued_tokens": "Prompt tokens of all open requests; more are refused.",
        "request_timeout": "Seconds that a request may take if it names no timeout. Default: no limit.",
        "priority_seconds": "Seconds of waiting that one level of a request's priority is worth.",
        "max_overtakes": "How often later requests with a longer cached prefix may overtake a request.",
        "decode_slowdown": "Largest slowdown of decoding during a prefill: 2 = twice as slow.",
        "overlap": "Prepare the next step while one runs.",
        "speculate": "Guess tokens if that is faster: auto, ngram, mtp, draft=FOLDER (a model), eagle=FOLDER (a head).",
        "max_draft_tokens": "The most guesses for one sequence in one step.",
        "draft_history": "Tokens of one API key's earlier answers that guesses look up, too, e.g. 65536.",
    },
}
# Options written as 2G, with defaults.
SIZES = {
    "weights_memory": None,
    "kv_memory": None,
    "kv_host_memory": None,
    "kv_disk_memory": "16G",
    "image_memory": "256M",
}


def engine_options(**given: Any) -> EngineConfig:
    """The EngineConfig that these options describe. Raises ConfigError."""
    return parse(given, EngineConfig, "engine options")


def size(context: typer.Context, option: typer.CallbackParam, text: str | None) -> int | str | None:
    """The callback of an option that takes bytes as 2G. Raises ConfigError."""
    return None if text is None else parse_size(str(option.name), text, origin(context, option))


@functools.cache  # resolving them takes milliseconds, which every command would wait for at each option
def kinds(config: type[StrictStruct], *, limits: bool = False) -> dict[str, Any]:
    """The types of a struct's fields, on request with their limits."""
    return get_type_hints(config, include_extras=limits)


def checked(config: type[StrictStruct], name: str) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """The callback of an option that is a field of `config`. It raises ConfigError for a value out of range."""
    kind = kinds(config, limits=True)[name]

    def check(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
        try:
            return parse(value, kind, f"{origin(context, option)} {value}")
        except ConfigError as error:
            reason = str(error).replace("Expected", "expected").replace("`float`", "a number")
            raise ConfigError(reason.replace("`int`", "an integer")) from None

    return check


def _parameter(name: str, group: str) -> inspect.Parameter:
    kind, default = kinds(EngineConfig)[name], getattr(EngineConfig(), name)
    option = typer.Option(help=HELP[group][name], rich_help_panel=group, callback=checked(EngineConfig, name))
    if name in SIZES:
        kind, default = str | None, SIZES[name]
        option = typer.Option(help=HELP[group][name], rich_help_panel=group, callback=size, metavar="<size>")
    if kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


engine_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, group) for group, names in HELP.items() for name in names]
)
