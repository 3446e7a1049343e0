"""Names that other tools have for what lmkit has. An error that refuses such a name tells ours.

A table maps a name of LMDeploy, vLLM, llama.cpp or transformers to advice. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

NO_SAMPLING = "temperature=0 is greedy, any other temperature samples"
ONE_DEVICE = "an engine runs on one device; start one for each and route between them with `lmkit proxy`"

# Of a generation: fields of GenerationConfig and of HTTP bodies.
GENERATION: Mapping[str, str] = {
    "do_sample": NO_SAMPLING,
    "random_seed": "use seed",
    "stop_words": "use stop",
    "n_predict": "use max_new_tokens here and max_tokens over HTTP",
}

# Of an engine: fields of EngineConfig and options of `lmkit serve`.
ENGINE: Mapping[str, str] = {
    "session_len": "use max_model_len",
    "tp": ONE_DEVICE,
    "tensor_parallel_size": ONE_DEVICE,
    "quant_policy": "use kv_dtype: int8 for 8, int4 for 4",
    "cache_max_entry_count": "use kv_memory, in bytes",
    "gpu_memory_utilization": "use kv_memory, in bytes",
    "cache_block_seq_len": "use block_size",
    "max_prefill_token_num": "use max_step_tokens",
    "enable_prefix_caching": "use prefix_cache; it is on by default",
}

_TLS = "lmkit speaks HTTP; put a reverse proxy in front of it for TLS (docs/deploy.md)"
_CORS = "lmkit sends no CORS headers; a reverse proxy can add them (docs/deploy.md)"
_TEMPLATE = "the checkpoint's own chat template is used"
_PARSER = "tool calls and reasoning are not parsed"
_NO_ADAPTERS = "adapters (LoRA) are not supported"
_NO_DRAFTS = "speculative decoding is not supported"
_NO_CODE = "code that comes with a checkpoint is never run; the model families are built in"
_NO_VISION = "only text models are supported"
_DOWNLOADS = "`lmkit pull` fetches a model, and HF_HOME says where it is kept"
_METRICS = "/metrics is always served"

# Options of other tools' servers, without dashes, for `lmkit serve` and its configuration file. ENGINE's count as well.
SERVE: Mapping[str, str] = {
    # LMDeploy
    "adapters": _NO_ADAPTERS,
    "allow_credentials": _CORS,
    "allow_headers": _CORS,
    "allow_methods": _CORS,
    "allow_origins": _CORS,
    "allow_terminate_by_client": "`lmkit stop` ends a server",
    "allowed_media_domains": _NO_VISION,
    "api_keys": "use --api-key, once for each key",
    "backend": "there is one engine; --device chooses cpu or cuda",
    "chat_template": _TEMPLATE,
    "communicator": ONE_DEVICE,
    "cp": ONE_DEVICE,
    "disable_fastapi_docs": "there are no documentation routes",
    "disable_metrics": _METRICS,
    "dist_init_addr": ONE_DEVICE,
    "dp": ONE_DEVICE,
    "download_dir": _DOWNLOADS,
    "eager_mode": "captured steps need no switch: a step that cannot be captured runs op by op",
    "enable_abort_handling": "a request ends when its client closes the connection",
    "ep": ONE_DEVICE,
    "logprobs_mode": "log-probabilities need no option",
    "max_concurrent_requests": "use --max-queue for waiting requests and --max-batch-size for running ones",
    "max_log_len": "prompts are never logged",
    "migration_backend": ONE_DEVICE,
    "model_format": "the format is read from the checkpoint's config.json",
    "model_name": "use --served-model-name",
    "nnodes": ONE_DEVICE,
    "node_rank": ONE_DEVICE,
    "proxy_url": "start `lmkit proxy` and add this server with `lmkit proxy add URL`",
    "reasoning_parser": _PARSER,
    "role": ONE_DEVICE,
    "server_name": "use --host",
    "server_port": "use --port",
    "speculative_algorithm": _NO_DRAFTS,
    "speculative_draft_model": _NO_DRAFTS,
    "speculative_num_draft_tokens": _NO_DRAFTS,
    "ssl": _TLS,
    "tool_call_parser": _PARSER,
    "vision_max_batch_size": _NO_VISION,
    # vLLM
    "allowed_origins": _CORS,
    "calculate_kv_scales": "use --kv-dtype; scales are computed for each token",
    "cpu_offload_gb": "weights are not offloaded; --kv-host-memory keeps KV in host memory",
    "data_parallel_size": ONE_DEVICE,
    "disable_log_requests": "prompts are never logged; --log-level says how much is",
    "disable_log_stats": "--log-level says how much is logged",
    "disable_uvicorn_access_log": "--log-level WARNING leaves out the line of each request",
    "distributed_executor_backend": ONE_DEVICE,
    "enable_auto_tool_choice": _PARSER,
    "enable_chunked_prefill": "prefill is always chunked; use --max-step-tokens for the size of a step",
    "enable_expert_parallel": ONE_DEVICE,
    "enable_lora": _NO_ADAPTERS,
    "enforce_eager": "captured steps need no switch: a step that cannot be captured runs op by op",
    "guided_decoding_backend": "guided decoding is not supported",
    "kv_cache_dtype": "use --kv-dtype",
    "kv_cache_memory_bytes": "use --kv-memory",
    "limit_mm_per_prompt": _NO_VISION,
    "load_format": "weights are read from safetensors files",
    "lora_modules": _NO_ADAPTERS,
    "max_lora_rank": _NO_ADAPTERS,
    "max_loras": _NO_ADAPTERS,
    "max_num_batched_tokens": "use --max-step-tokens",
    "max_num_seqs": "use --max-batch-size",
    "no_enable_prefix_caching": "use --no-prefix-cache",
    "num_gpu_blocks_override": "use --kv-memory, in bytes",
    "num_scheduler_steps": "use --overlap; it is on by default",
    "pipeline_parallel_size": ONE_DEVICE,
    "quantization": "the format is read from the checkpoint's config.json; `lmkit quantize` writes one",
    "root_path": "a reverse proxy can add a path (docs/deploy.md)",
    "scheduling_policy": "requests have a priority field of their own",
    "seed": "requests have a seed field of their own",
    "speculative_config": _NO_DRAFTS,
    "speculative_model": _NO_DRAFTS,
    "ssl_certfile": _TLS,
    "ssl_keyfile": _TLS,
    "swap_space": "use --kv-host-memory, in bytes",
    "tokenizer": "the tokenizer is the checkpoint's",
    "tokenizer_mode": "the tokenizer is the checkpoint's",
    "trust_remote_code": _NO_CODE,
    "uvicorn_log_level": "use --log-level",
    # llama.cpp
    "alias": "use --served-model-name",
    "b": "use --max-step-tokens",
    "batch_size": "use --max-batch-size for sequences in a step and --max-step-tokens for tokens",
    "c": "use --max-model-len",
    "cache_prompt": "use --prefix-cache; it is on by default",
    "cache_type_k": "use --kv-dtype, for keys and values alike",
    "cache_type_v": "use --kv-dtype, for keys and values alike",
    "cont_batching": "batching is always continuous",
    "cb": "batching is always continuous",
    "ctk": "use --kv-dtype, for keys and values alike",
    "ctv": "use --kv-dtype, for keys and values alike",
    "ctx_size": "use --max-model-len",
    "fa": "attention needs no switch",
    "flash_attn": "attention needs no switch",
    "gpu_layers": "a model runs on one device as a whole; use --device",
    "hf": "name the repository in place of MODEL: ORG/NAME",
    "hf_repo": "name the repository in place of MODEL: ORG/NAME",
    "jinja": _TEMPLATE,
    "m": "give the checkpoint without an option: lmkit serve MODEL",
    "metrics": _METRICS,
    "mlock": "weights are mapped from a file",
    "n_gpu_layers": "a model runs on one device as a whole; use --device",
    "ngl": "a model runs on one device as a whole; use --device",
    "no_mmap": "weights are mapped from a file",
    "np": "use --max-batch-size; sequences share one cache",
    "parallel": "use --max-batch-size; sequences share one cache",
    "rope_freq_base": "rotary embedding is the checkpoint's",
    "rope_scaling": "rotary embedding is the checkpoint's",
    "slot_save_path": "use --kv-disk-path",
    "split_mode": ONE_DEVICE,
    "ssl_cert_file": _TLS,
    "ssl_key_file": _TLS,
    "t": "use --num-threads",
    "tensor_split": ONE_DEVICE,
    "threads": "use --num-threads",
    "timeout": "use --request-timeout",
    "ub": "use --max-step-tokens",
    "ubatch_size": "use --max-step-tokens",
}
# Values of an option.
VALUES: Mapping[str, str] = {
    "bf16": "use bfloat16",
    "f16": "use float16",
    "f32": "use float32",
    "float": "use float32",
    "fp16": "use float16",
    "fp32": "use float32",
    "fp8_e4m3": "use fp8",
    "gpu": "use cuda",
    "half": "use float16",
    "q4_0": "use int4",
    "q8_0": "use int8",
    "4": "use int4",
    "8": "use int8",
}
# Options of other tools' routers, for `lmkit proxy`.
PROXY: Mapping[str, str] = {
    "api_keys": "list api_keys in the file of --config",
    "backends": "use --node, once for each URL",
    "disable_cache_status": "without --state-file nothing is saved",
    "disable_gdr": ONE_DEVICE,
    "dummy_prefill": ONE_DEVICE,
    "link_type": ONE_DEVICE,
    "migration_protocol": ONE_DEVICE,
    "routing_logic": "use --policy: least_in_flight, round_robin or random",
    "routing_strategy": "use --policy: least_in_flight for min_expected_latency, or random",
    "server_name": "use --host",
    "server_port": "use --port",
    "serving_strategy": ONE_DEVICE,
    "ssl": _TLS,
    "static_backends": "use --node, once for each URL",
    "worker_urls": "use --node, once for each URL",
}

# Options of `lmkit quantize`: LMDeploy's of `lite`, then those of llm-compressor, AutoRound and llama-quantize.
QUANTIZE: Mapping[str, str] = {
    "w_bits": "use bits",
    "w_group_size": "use group_size; channel is one group for a whole row",
    "w_sym": "a recipe says so, scheme: {symmetric: true}; --recipe w4a16_g128_sym_gptq is one",
    "work_dir": "use output",
    "calib_dataset": "use calibration",
    "calib_samples": "use num_samples",
    "calib_seqlen": "use seq_len",
    "calib_image": "only text is calibrated; give it with --calibration",
    "search_scale": "the default recipe searches scales; --recipe rtn_w4a16_g128 rounds to nearest without a search",
    "batch_size": "batches follow from --max-memory",
    "quant_dtype": "--recipe smoothquant_w8a8 is int8, --recipe smoothquant_w8a8_fp8 is fp8",
    "dtype": "weights are read as the checkpoint has them",
    "trust_remote_code": "lmkit never runs code of a checkpoint; its families are built in",
    "download_dir": "set HF_HOME",
    "scheme": "use recipe",
    "method": "use recipe",
    "algorithm": "use recipe",
    "quantization": "use recipe",
    "ignore": "a recipe says so, ignore: [PATTERN]",
    "nsamples": "use num_samples",
    "num_calibration_samples": "use num_samples",
    "max_seq_length": "use seq_len",
    "seqlen": "use seq_len",
    "iters": "a recipe says so, steps: [{step: signround, iters: 200}]; --recipe signround_w4a16_g128 is one",
    "dataset": "use calibration",
    "out_dir": "use output",
    "output_dir": "use output",
    "save_dir": "use output",
    "imatrix": "use calibration; statistics are taken from text",
    "kv_dtype": "use kv_bits",
    "quant_policy": "use kv_bits",
    "threads": "set LMKIT_NUM_THREADS",
    "num_threads": "set LMKIT_NUM_THREADS",
}

# Commands: LMDeploy's, vLLM's, ollama's and llama.cpp's. Several words are a command and its first argument.
COMMANDS: Mapping[str, str] = {
    "lite": "use `lmkit quantize MODEL -o OUT`",
    "lite auto_awq": "use `lmkit quantize MODEL -o OUT`",
    "lite auto_gptq": "use `lmkit quantize MODEL -o OUT --recipe w4a16_g128_sym_gptq`",
    "lite smooth_quant": "use `lmkit quantize MODEL -o OUT --recipe smoothquant_w8a8`",
    "lite calibrate": "`lmkit quantize MODEL -o OUT` calibrates",
    "auto_awq": "use `lmkit quantize MODEL -o OUT`",
    "auto_gptq": "use `lmkit quantize MODEL -o OUT --recipe w4a16_g128_sym_gptq`",
    "smooth_quant": "use `lmkit quantize MODEL -o OUT --recipe smoothquant_w8a8`",
    "calibrate": "`lmkit quantize MODEL -o OUT` calibrates",
    "serve api_server": "use `lmkit serve MODEL`",
    "api_server": "use `lmkit serve MODEL`",
    "serve proxy": "use `lmkit proxy`",
    "serve api_client": "use `lmkit chat http://HOST:PORT`",
    "check_env": "use `lmkit doctor`",
    "env": "use `lmkit doctor`",
    "collect-env": "use `lmkit doctor`",
    "complete": "use `lmkit chat URL --prompt TEXT`",
    "generate": "use `lmkit chat MODEL --prompt TEXT`",
    "run": "use `lmkit chat MODEL`",
    "run-batch": "use `lmkit.pipeline(MODEL)` in Python, or `lmkit serve` and any client",
    "bench serve": "use `lmkit bench online URL`",
    "benchmark": "use `lmkit bench`",
    "show": "use `lmkit inspect MODEL`",
    "info": "use `lmkit inspect MODEL`",
    "server": "use `lmkit serve MODEL`",
    "start": "use `lmkit serve MODEL`",
    "perplexity": "use `lmkit eval MODEL`",
    "ppl": "use `lmkit eval MODEL`",
    "evaluate": "use `lmkit eval MODEL`",
    "version": "use `lmkit --version`",
}

# The tables of options by command: `lmkit COMMAND --NAME`.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "quantize": QUANTIZE,
    "serve": {**ENGINE, **SERVE},
    "proxy": PROXY,
}


def hint(name: str, others: Mapping[str, str], ours: Iterable[str] = ()) -> str:
    """`: use seed` or `; did you mean seed?` to end an error that refuses `name`, or an empty text."""
    if name in others:
        return f": {others[name]}"
    close = get_close_matches(name, list(ours), n=1)
    return f"; did you mean {close[0]}?" if close else ""
