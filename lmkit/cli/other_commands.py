"""Commands of other tools and their options, for errors that tell ours. Tables as in `lmkit.other_names`."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.other_names import (
    ENGINE,
    NO_ADAPTERS,
    NO_SPECULATION,
    NOT_NEEDED,
    NOT_OUTPUT,
    ONE_DEVICE,
    OWN_TEMPLATE,
    TEXT_ONLY,
    each,
)

_PARSER = "lmkit does not parse tool calls and reasoning"

# Options of other tools' servers, for `lmkit serve` and its file. Those of ENGINE count as well.
SERVE: Mapping[str, str] = {
    **each("use --cors-origin, once for each site", "allow_origins allowed_origins"),
    **each(
        "with --cors-origin pages may send GET and POST with any header, and no cookies",
        "allow_credentials allow_headers allow_methods",
    ),
    **each("use --tls-cert and --tls-key", "ssl"),
    **each("use --tls-cert", "ssl_cert_file ssl_certfile"),
    **each("use --tls-key", "ssl_key_file ssl_keyfile"),
    **each("SIGHUP reads the certificate anew", "enable_ssl_refresh"),
    **each("lmkit asks clients for keys, not for certificates", "ssl_ca_certs ssl_cert_reqs"),
    **each(_PARSER, "enable_auto_tool_choice reasoning_parser tool_call_parser"),
    **each(NO_ADAPTERS, "lora lora_modules max_loras"),
    **each(
        NO_SPECULATION,
        "model_draft speculative_algorithm speculative_draft_model speculative_model speculative_num_draft_tokens",
    ),
    **each(TEXT_ONLY, "allowed_media_domains mmproj vision_max_batch_size"),
    **each(
        ONE_DEVICE,
        "dist_init_addr dp_rank enable_eplb enable_expert_parallel enable_microbatch migration_backend mlp_tp_size "
        "moe_tp_size node_rank sm split_mode ts",
    ),
    "backend": "there is one engine; --device chooses cpu or cuda",
    **each(OWN_TEMPLATE, "chat_template_file jinja"),
    **each(
        NOT_NEEDED,
        "cb cont_batching disable_fastapi_docs disable_metrics enable_abort_handling fa logprobs_mode metrics mlock "
        "no_mmap num_scheduler_steps async empty_init",
    ),
    **each(
        "lmkit runs no diffusion models",
        "dllm_block_length dllm_confidence_threshold dllm_denoising_steps dllm_unmasking_strategy",
    ),
    "enable_return_routed_experts": NOT_OUTPUT,
    "alias": "use --served-model-name",
    "allow_terminate_by_client": "use `lmkit stop`",
    "api_keys": "use --api-key, once for each key",
    "calculate_kv_scales": "use kv_dtype; each token has scales of its own",
    **each("use max_model_len", "c ctx_size"),
    **each("use max_step_tokens", "b ub ubatch_size"),
    "batch_size": "use --max-batch-size for sequences and --max-step-tokens for tokens",
    **each("use kv_dtype, for keys and values alike", "cache_type_k cache_type_v ctk ctv"),
    "disable_log_requests": "lmkit never logs prompts; --log-level says how much it logs",
    "disable_uvicorn_access_log": "--log-level WARNING leaves out the line of each request",
    **each("use device: cuda runs all layers on the GPU, cpu none", "gpu_layers ngl"),
    "guided_decoding_backend": NOT_NEEDED,
    **each("name the repository in place of MODEL: ORG/NAME", "hf hf_repo"),
    "m": "name the checkpoint without an option: lmkit serve MODEL",
    "max_concurrent_requests": "use --max-queue for waiting requests and --max-batch-size for running ones",
    "max_log_len": "lmkit never logs prompts",
    "model_name": "use --served-model-name",
    "model_path": "name the checkpoint without an option: lmkit serve MODEL",
    "no_enable_prefix_caching": "use --no-prefix-cache",
    **each("use max_batch_size; sequences share one cache", "np parallel"),
    "proxy_url": "start `lmkit proxy` and add this server with `lmkit proxy add URL`",
    "root_path": "a reverse proxy can add a path (docs/deploy.md)",
    "scheduling_policy": "requests have a priority field of their own",
    "seed": "requests have a seed field of their own",
    "server_name": "use host",
    "server_port": "use port",
    "slot_save_path": "use kv_disk_path",
    **each("use num_threads", "t threads"),
    "timeout": "use request_timeout",
    "watchdog_timeout": "use step_timeout",
    **each("use --no-chat-page", "no_ui no_webui"),
    "uvicorn_log_level": "use log_level",
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
    "ssl": "use --tls-cert and --tls-key",
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
    "revision": "use `lmkit pull ORG/NAME --revision REVISION`, and its folder as the model",
    "kv_dtype": "use kv_bits",
    "quant_policy": "use kv_bits",
    "quiet": "set LMKIT_LOG_LEVEL=ERROR",
    "threads": "set LMKIT_NUM_THREADS",
    "verbose": "set LMKIT_LOG_LEVEL=DEBUG",
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
    "ls": "use `lmkit list`",
    "rm": "delete the folder that `lmkit list --json` shows",
    "download": "use `lmkit pull ORG/NAME`",
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

# Options of `lmkit bench online`: those of vLLM's, SGLang's and LMDeploy's load generators.
ONLINE: Mapping[str, str] = {
    **each("give http://HOST:PORT as the argument", "base_url host port"),
    "backend": "any OpenAI-compatible server is measured; --endpoint names its API",
    "dataset_name": "use dataset, a file; the default is random text",
    "dataset_path": "use dataset",
    "disable_ignore_eos": "use --no-ignore-eos",
    "extra_request_body": "use extra_body",
    "max_concurrency": "use concurrency",
    "num_prompt": "use num_prompts",
    **each("use json, a file", "output_file result_dir result_filename save_result"),
    "percentile_metrics": "the results always have p50, p90 and p99",
    "random_input_len": "use input_len",
    "random_output_len": "use output_len",
    "random_range_ratio": "use range_ratio",
    "request_rate": "use rate",
    "served_model_name": "use model",
    "sharegpt_output_len": "use output_len",
    "num_warmups": "use warmup",
}

# Options of `lmkit bench throughput` and `latency`, which have a seed.
OFFLINE: Mapping[str, str] = {
    **{name: advice for name, advice in ENGINE.items() if name != "seed"},
    "model": "give the model as the argument",
}

# The tables of options by command: `lmkit COMMAND --NAME`.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "quantize": QUANTIZE,
    "serve": {**ENGINE, **SERVE},
    "proxy": PROXY,
    "eval": {**each("use text or dataset", "file tasks"), "ctx_size": "use seq_len", "kv_cache_dtype": "use kv_dtype"},
    "chat": {
        **each("give http://HOST:PORT as the argument", "url base_url host port"),
        "max_new_tokens": "use max_tokens",
        "n_predict": "use max_tokens",
        "system_prompt": "use system",
        "model_name": "use model",
    },
    "bench throughput": {**OFFLINE, "random_input_len": "use input_len", "random_output_len": "use output_len"},
    "bench latency": {**OFFLINE, "num_iters": "use repeats", "num_iters_warmup": "use warmup"},
    "bench online": ONLINE,
}
