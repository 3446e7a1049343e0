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

# Of an HTTP body: its fields.
HTTP: Mapping[str, str] = {
    "bad_words": "use logit_bias: -100 for each banned token id",
    "do_preprocess": "/v1/chat/completions applies the chat template, /v1/completions does not",
    "do_sample": NO_SAMPLING,
    "end_id": "use stop_token_ids",
    "eos_token_id": "use stop_token_ids",
    "extra_body": "write its fields into the body itself",
    "input_ids": "send token ids as the prompt of /v1/completions",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "messages": "send it to /v1/chat/completions",
    "min_length": "use min_tokens",
    "min_new_tokens": "use min_tokens",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "num_ctx": "the server's --max-model-len sets it",
    "num_predict": "use max_tokens",
    "prompt": "send it to /v1/completions",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "prompt_token_ids": "send token ids as the prompt of /v1/completions",
    "random_seed": "use seed",
    "repeat_penalty": "use repetition_penalty",
    "request_id": "send the header x-request-id",
    "rid": "send the header x-request-id",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "top_n_tokens": "use top_logprobs",
}


def hint(name: str, others: Mapping[str, str], ours: Iterable[str] = ()) -> str:
    """`: use seed` or `; did you mean seed?` to end an error that refuses `name`, or an empty text."""
    if name in others:
        return f": {others[name]}"
    close = get_close_matches(name, list(ours), n=1)
    return f"; did you mean {close[0]}?" if close else ""
