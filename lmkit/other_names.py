"""Names that other tools have for what lmkit has. An error that refuses such a name tells ours.

A table maps a name of LMDeploy, vLLM, llama.cpp or transformers to advice. Those of commands and their options are in
`lmkit.cli.other_commands`. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

BY_FORMAT = "lmkit reads the checkpoint's format from its files"
FROM_CHECKPOINT = "the checkpoint decides it; give a folder or a Hub name as the model"
OWN_TEMPLATE = "use chat_template: a file of Jinja, or its text"
NO_BANS = "use logit_bias: -100 for each banned token id"
NO_BEAMS = "lmkit has no beam search"
NO_REMOTE_CODE = "lmkit never runs code of a checkpoint"
NO_SAMPLING = "temperature=0 is greedy, any other temperature samples"
SPECULATION = "use speculate: ngram (from the text), mtp (the checkpoint's layer), draft=FOLDER (a model), eagle=FOLDER"
NOT_NEEDED = "lmkit needs no such setting; leave it out"
NOT_OUTPUT = "lmkit does not return it"
NOT_SAMPLED = "lmkit has no such sampling; use temperature, top_k, top_p or min_p"
OTHER_MACHINES = "use cluster, ray or torchrun, which has processes of tp on other machines"
EQUAL_PARTS = "use tp, which gives each process an equal part"
KV_BY_TCP = "KV moves over TCP; see kv_listen, kv_peer and role (docs/parallel.md)"
REPLICAS = "use dp of `lmkit serve`, which runs several engines behind one address"
SEVERAL = "give the prompt several times, each with a seed; over HTTP use n"
TEXT_ONLY = "lmkit runs text models only"


def each(advice: str, names: str) -> dict[str, str]:
    """A table in which each of these names has the same advice."""
    return dict.fromkeys(names.split(), advice)


# Of a generation: fields of GenerationConfig and of HTTP bodies.
GENERATION: Mapping[str, str] = {
    "allowed_token_ids": "use response_format, or logit_bias: -100 for each banned token id; over HTTP it works",
    **each("use response_format", "grammar guided_decoding guided_json guided_regex structured_outputs"),
    **each(NO_BANS, "bad_token_ids bad_words bad_words_ids"),
    **each(SEVERAL, "best_of n num_return_sequences"),
    "detokenize": "lmkit always returns text and token_ids",
    "do_sample": NO_SAMPLING,
    **each(NO_BEAMS, "early_stopping length_penalty num_beams use_beam_search"),
    "echo": "lmkit returns the answer alone",
    "eos_token_id": "use stop_token_ids; ignore_eos turns the model's own off",
    "logits_processor": "use logit_bias",
    "logits_processors": "use logit_bias",
    "max_gen_toks": "use max_new_tokens here and max_tokens over HTTP",
    "max_length": "use max_new_tokens here and max_tokens over HTTP; it counts new tokens only",
    "max_tokens": "use max_new_tokens",
    "migration_request": NOT_NEEDED,
    "min_length": "use min_new_tokens here and min_tokens over HTTP",
    "min_tokens": "use min_new_tokens",
    **each(NOT_SAMPLED, "mirostat_eta mirostat_mode mirostat_tau tfs_z typical_p"),
    "n_predict": "use max_new_tokens here and max_tokens over HTTP",
    **each(
        "use repetition_penalty, presence_penalty or frequency_penalty",
        "no_repeat_ngram_size repetition_ngram_size repetition_ngram_threshold",
    ),
    "output_kind": "pipe(...) returns whole answers, pipe.stream_infer(...) their parts",
    "output_last_hidden_state": NOT_OUTPUT,
    "output_logits": f"{NOT_OUTPUT}; use logprobs",
    "pad_token_id": NOT_NEEDED,
    "preserve_cache": "use a session: pipe.chat(prompt, session) here and session_id over HTTP",
    "prompt_logprobs": "use pipe.ppl(...) or pipe.get_ppl(...)",
    "random_seed": "use seed",
    "repeat_last_n": "repetition_penalty looks at the whole prompt and output",
    "repeat_penalty": "use repetition_penalty",
    "return_ppl": "use pipe.ppl(...) or pipe.get_ppl(...)",
    "return_routed_experts": NOT_OUTPUT,
    "spaces_between_special_tokens": "lmkit never adds such spaces",
    **each("use stop", "stop_sequences stop_strings stop_words"),
    "truncate_prompt_tokens": "lmkit never cuts a prompt; shorten it before the call",
    "with_cache": "use a session: pipe.chat(prompt, session) here and session_id over HTTP",
}

# Of an engine: fields of EngineConfig and options of `lmkit serve`.
ENGINE: Mapping[str, str] = {
    **each("use adapters, each NAME=FOLDER", "enable_lora lora_modules"),
    **each(NOT_NEEDED, "max_lora_rank"),
    "communicator": "processes exchange through shared memory, and GPUs by kernels of lmkit; leave it out",
    "cp": "the context of a sequence is not split over processes; use tp",
    "main_gpu": "use CUDA_VISIBLE_DEVICES, or devices beside tp",
    "tensor_split": EQUAL_PARTS,
    **each(OTHER_MACHINES, "distributed_executor_backend nnodes"),
    "role": "it is an option of `lmkit serve`, for pairs of nodes",
    **each(REPLICAS, "data_parallel_size dp"),
    **each("use tp", "attn_tp_size tensor_parallel_size"),
    **each("use ep", "ep_size expert_parallel_size"),
    **each("use pp", "pipeline_parallel_size pp_size"),
    "block_seq_len": "use block_size",
    "cache_block_seq_len": "use block_size",
    "cache_generation": "use prefix_cache",
    **each(
        "use kv_memory, in bytes",
        "cache_max_entry_count gpu_memory_utilization kv_cache_memory_bytes max_total_tokens "
        "mem_fraction_static num_gpu_blocks num_gpu_blocks_override",
    ),
    "cache_prompt": "use prefix_cache",
    "chat_template_config": OWN_TEMPLATE,
    "cpu_offload_gb": "use kv_host_memory, in bytes, for the KV cache, and on a CPU weights_memory for weights",
    "device_type": "use device",
    **each(
        NOT_NEEDED,
        "disable_log_stats eager_mode enable_metrics enforce_eager flash_attn max_seq_len_to_capture use_mlock",
    ),
    "download_dir": "set HF_HOME",
    "enable_chunked_prefill": "prompts are always prefilled in chunks; see max_step_tokens",
    "enable_prefix_caching": "use prefix_cache; it is on by default",
    **each(
        FROM_CHECKPOINT,
        "hf_overrides rope_freq_base rope_freq_scale rope_scaling rope_scaling_factor tokenizer "
        "tokenizer_mode use_logn_attn",
    ),
    **each("use kv_dtype", "kv_cache_dtype type_k type_v"),
    "kv_events_config": "use kv_events, tcp://HOST:PORT, and kv_events_topic; replays are at the next port",
    "language_model_only": TEXT_ONLY,
    "limit_mm_per_prompt": TEXT_ONLY,
    **each(BY_FORMAT, "load_format model_format"),
    "quantization": "use quantize for dense weights; " + BY_FORMAT,
    **each("use log_level", "log_requests max_log_len verbose"),
    **each("use max_queue", "max_concurrent_requests max_num_queued_reqs max_queued_requests"),
    "max_num_queued_tokens": "use max_queued_tokens",
    **each(
        "use max_step_tokens",
        "max_num_batched_tokens max_prefill_iters max_prefill_token_num n_batch n_ubatch num_tokens_per_iter",
    ),
    "max_num_seqs": "use max_batch_size",
    **each("use max_model_len", "max_seq_len n_ctx session_len"),
    "n_gpu_layers": "use device: cuda runs all layers on the GPU, cpu none",
    "n_threads": "use num_threads",
    "n_threads_batch": "use num_threads",
    "num_cpu_blocks": "use kv_host_memory, in bytes",
    "offload_kqv": "use device",
    "prefill_interval": "use decode_slowdown",
    "quant_policy": "use kv_dtype: int8 for 8, int4 for 4",
    "revision": "give the folder of a downloaded snapshot as the model",
    "seed": "it belongs to a generation: GenerationConfig(seed=...) here and seed over HTTP",
    "num_speculative_tokens": "use max_draft_tokens",
    "speculative_config": SPECULATION,
    "swap_space": "use kv_host_memory, in bytes",
    "trust_remote_code": NO_REMOTE_CODE,
    "use_mmap": "use packed_cache",
}

# Recipes of `lmkit quantize`: names of methods and of widths.
RECIPES: Mapping[str, str] = {
    **each("use awq_w4a16_g128", "awq auto_awq AWQ int4 w4a16 W4A16 q4"),
    **each("use w4a16_g128_sym_gptq, or gptq_w4a16_g128 for GPTQ alone", "gptq auto_gptq GPTQ"),
    **each("use signround_w4a16_g128", "signround autoround auto_round AutoRound"),
    **each("use smoothquant_w8a8, or smoothquant_w8a8_fp8", "smoothquant smooth_quant SmoothQuant w8a8 W8A8"),
    **each("use fp8_block, fp8_channel or fp8_tensor", "fp8 FP8 FP8_BLOCK FP8_DYNAMIC blocked_fp8"),
    **each("use rtn_w8a16, or smoothquant_w8a8 for int8 activations too", "int8 w8a16 W8A16 q8"),
    **each("use rtn_w4a16_g128 or rtn_w8a16", "rtn RTN"),
    "mixed": "use mixed_4.5, mixed_3.0 or mixed_2.5, or --average-bits",
}

# Of an HTTP body: its fields.
HTTP: Mapping[str, str] = {
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
    "num_predict": "use max_tokens",
    "prompt": "send it to /v1/completions",
    "prompt_token_ids": "send token ids as the prompt of /v1/completions",
    "random_seed": "use seed",
    "repeat_penalty": "use repetition_penalty",
    "request_id": "send the header x-request-id",
    "rid": "send the header x-request-id",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "store": "only answers of chats and of /v1/responses are stored",
    "top_n_tokens": "use top_logprobs",
}


def missing(value: object, name: str, others: Mapping[str, str]) -> AttributeError:
    """The error of `value.name` where there is no such attribute."""
    kind = type(value)
    ours = [own for own in [*dir(kind), *getattr(kind, "__annotations__", ())] if not own.startswith("_")]
    return AttributeError(f"{kind.__name__} has no {name}{hint(name, others, ours)}")


def hint(name: str, others: Mapping[str, str], ours: Iterable[str] = ()) -> str:
    """`: use seed` or `; did you mean seed?` to end an error that refuses `name`, or an empty text."""
    if name in others:
        return f": {others[name]}"
    close = get_close_matches(name, list(ours), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def is_misspelt(name: str, ours: Iterable[str]) -> bool:
    """Whether a name is nearly one of ours. In so short a distance nobody has another field."""
    return len(name) < 64 and bool(get_close_matches(name, list(ours), n=1, cutoff=0.9))
