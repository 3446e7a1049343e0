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
}


def hint(name: str, others: Mapping[str, str], ours: Iterable[str] = ()) -> str:
    """`: use seed` or `; did you mean seed?` to end an error that refuses `name`, or an empty text."""
    if name in others:
        return f": {others[name]}"
    close = get_close_matches(name, list(ours), n=1)
    return f"; did you mean {close[0]}?" if close else ""
