"""Fields of other engines' APIs that lmkit does not have, each with the values that ask for nothing.

Clients send such values because they write every field of their own API. A value that asks for nothing is accepted.
Any other is refused, because the field changes tokens, limits, privacy or money, or what the answer shows. Those of
HINTS change none of it: they are left out and noted (`lmkit.hints`), as are fields that stand in no table. The APIs are
those of OpenAI, vLLM, SGLang, LMDeploy, TGI, llama.cpp and TensorRT-LLM. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Values = tuple[Any, ...]

_NONE: Values = (None,)
_EMPTY: Values = (None, [], {}, "")
_OFF: Values = (None, False)
_ON: Values = (None, True)
_EITHER: Values = (None, True, False)  # a switch for something that is not there
_ZERO: Values = (None, 0)
_ONE: Values = (None, 1)
_MINUS: Values = (None, -1)

# Of a generation: in HTTP bodies and in Python. Chats have some of these fields; there the entry does not count.
GENERATION: Mapping[str, Values] = {
    # OpenAI
    "audio": _NONE,
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": _NONE,
    "parallel_tool_calls": _EITHER,
    "prediction": _NONE,
    "prompt_cache_options": _NONE,
    "prompt_cache_retention": _NONE,
    "reasoning_effort": _NONE,
    "safety_identifier": _NONE,
    "service_tier": (None, "auto", "default"),
    "store": _OFF,
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": _NONE,
    # beams
    "beam_search_diversity_rate": _ZERO,
    "beam_width": _ONE,
    "early_stopping": (None, False, 0),
    "length_penalty": _ONE,
    "num_beams": _ONE,
    "use_beam_search": _OFF,
    # other ways to sample
    "diversity_penalty": _ZERO,
    "dry_allowed_length": (None, 2),
    "dry_base": (None, 1.75),
    "dry_multiplier": _ZERO,
    "dry_penalty_last_n": (None, -1, 0),
    "dry_sequence_breakers": (None, [], ["\n", ":", '"', "*"]),
    "dynatemp_exponent": _ONE,
    "dynatemp_range": _ZERO,
    "encoder_repetition_penalty": _ONE,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "mirostat": _ZERO,
    "mirostat_eta": (None, 0.1),
    "mirostat_tau": (None, 5),
    "mirostat_mode": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "penalize_nl": _OFF,
    "penalty_alpha": _ZERO,
    "prompt_ignore_length": _ZERO,
    "repeat_last_n": _MINUS,  # repetition_penalty looks at the whole context
    "repetition_detection": _NONE,
    "samplers": (None, []),
    "tfs": _ONE,
    "tfs_z": _ONE,
    "top_a": _ZERO,
    "top_n_sigma": (None, -1, 0),
    "top_p_decay": _ONE,
    "top_p_min": _ZERO,
    "typical_p": _ONE,
    "watermark": _OFF,
    "watermarking": _OFF,
    "xtc_probability": _ZERO,
    "xtc_threshold": (None, 0.1),
    # length and ends
    "bad_stop_words": (None, []),
    "bad_words": (None, []),
    "do_sample": _NONE,
    "end_id": _NONE,
    "eos_token_id": _NONE,
    "max_length": _NONE,
    "max_new_tokens": _NONE,
    "min_length": _ZERO,
    "n_discard": _ZERO,
    "n_indent": _ZERO,
    "n_keep": _ZERO,
    "n_predict": _MINUS,
    "no_stop_trim": _OFF,
    "pad_id": _NONE,
    "random_seed": _MINUS,
    "stop_regex": (None, [], ""),
    "stop_words": (None, []),
    "t_max_predict_ms": _ZERO,
    "truncate": _NONE,
    # constraints
    "allowed_token_ids": (None, []),
    "custom_logit_processor": _NONE,
    "grammar_lazy": _OFF,
    "guided_decoding": _NONE,
    "guided_decoding_backend": _NONE,
    "guided_whitespace_pattern": _NONE,
    "logits_processors": (None, []),
    "structural_tag": _NONE,
    # what else the answer shows
    "decoder_input_details": _OFF,
    "details": _OFF,
    "detokenize": _ON,
    "exclude_input_from_output": _ON,
    "logprob_token_ids": (None, []),
    "n_probs": _ZERO,
    "output_hidden_states": _NONE,
    "output_logits": _NONE,
    "post_sampling_probs": _OFF,
    "response_fields": (None, []),
    "return_cached_tokens_details": _OFF,
    "return_bytes": _OFF,
    "return_context_logits": _OFF,
    "return_entropy": _OFF,
    "return_flat_raw_top_logprobs": _OFF,
    "return_flat_raw_top_logprobs_b64": _OFF,
    "return_full_text": _OFF,
    "return_generation_logits": _OFF,
    "return_hidden_states": _OFF,
    "return_indexer_topk": _OFF,
    "return_logprob": _OFF,
    "return_meta_info": _OFF,
    "return_mm_kwargs": _ON,
    "return_prompt_text": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_routed_experts": _OFF,
    "return_sampling_mask": _OFF,
    "return_text_in_logprobs": _EITHER,
    "return_token_offsets": _OFF,
    "return_tokens": _OFF,
    "return_weight_versions": _OFF,
    "routed_experts_prompt_start": _ZERO,
    "routed_experts_start_len": _ZERO,
    "spaces_between_special_tokens": _EITHER,  # the tokenizer alone decides
    "stream_interval": _ONE,
    "token_ids_logprob": (None, []),
    "top_n_tokens": _ZERO,
    # thoughts: no part of an answer is split off as such
    "include_reasoning": _ON,
    "max_thinking_tokens": _NONE,
    "reasoning": _NONE,
    "reasoning_format": (None, "none", "auto"),
    "reasoning_in_content": _EITHER,
    "require_reasoning": _OFF,
    "separate_reasoning": _EITHER,
    "stream_reasoning": _EITHER,
    "thinking_budget": _NONE,
    "thinking_budget_tokens": _MINUS,
    "thinking_forced_open": _OFF,
    "thinking_token_budget": _NONE,
    # inputs
    "audio_data": _EMPTY,
    "documents": (None, []),
    "image_data": _EMPTY,
    "images_config": _NONE,
    "input_embeds": _NONE,
    "models": (None, []),  # OpenRouter's: others to ask where this one fails
    "input_ids": _NONE,
    "max_dynamic_patch": _NONE,
    "media_io_kwargs": (None, {}),
    "min_dynamic_patch": _NONE,
    "mm_payload": _NONE,
    "mm_processor_kwargs": (None, {}),
    "multi_item_delimiter_indices": _NONE,
    "positional_embed_overrides": _NONE,
    "prompt_embeds": _NONE,
    "prompt_token_ids": _NONE,
    "skip_reading_prefix_cache": _OFF,
    "use_audio_in_video": _OFF,
    "video_config": _NONE,
    "video_data": _EMPTY,
    # adapters, extensions, and where a request runs
    "adapter_id": _NONE,
    "adapter_name": _NONE,
    "adapters": (None, []),
    "agent_hierarchy": _NONE,
    "bootstrap_host": _NONE,
    "bootstrap_port": _NONE,
    "bootstrap_room": _NONE,
    "cache_prompt": _ON,  # true asks for the prefix cache
    "conversation_params": _NONE,
    "custom_labels": (None, {}),
    "custom_params": _NONE,
    "data_parallel_rank": _NONE,
    "disagg_prefill_dp_rank": _NONE,
    "disaggregated_params": _NONE,
    "ec_transfer_params": _NONE,
    "extra_args": (None, {}),
    "extra_key": _NONE,
    "id_slot": _MINUS,
    "kv_transfer_params": _NONE,
    "kwargs": (None, {}),  # LMDeploy's APIClient sends its own **kwargs under this name
    "lora": (None, []),
    "lora_id": _NONE,
    "lora_path": _NONE,
    "lora_request": _NONE,
    "migration_request": _NONE,
    "ngram_corpus_id": _NONE,
    "no_logs": _OFF,
    "preserve_cache": _OFF,
    "request_id": _NONE,
    "rid": _NONE,
    "routed_dp_rank": _NONE,
    "session_params": _NONE,
    "tenant": _NONE,  # a key has one, and no field names another
    "vllm_xargs": (None, {}),
    "with_cache": _OFF,
}
# Of a body of one route alone, beside those of GENERATION.
CHAT: Mapping[str, Values] = {
    "add_special_tokens": _OFF,  # a chat template writes its own
    "best_of": _ONE,
    "chat_template": _NONE,
    "do_preprocess": _ON,
    "guideline": _NONE,
    "logprob_start_len": _ZERO,
    "suffix": (None, ""),
    "tool_prompt": _NONE,
}
COMPLETION: Mapping[str, Values] = {
    "continue_final_message": _OFF,
    "do_preprocess": _OFF,
    "top_logprobs": _ZERO,
}
# Of a body of /v1/embeddings, /v1/rerank or /v1/score.
EMBEDDING: Mapping[str, Values] = {
    "activation": _NONE,
    "additional_data": _NONE,
    "images": (None, []),
    "instruction": (None, ""),
    "max_chunks_per_doc": _NONE,
    "max_tokens_per_doc": _NONE,
    "mm_processor_kwargs": (None, {}),
    "rank_fields": (None, []),
    "request_id": _NONE,
    "softmax": _NONE,
    "use_activation": _ON,
}
# Of GenerationConfig alone, beside those of GENERATION.
PYTHON: Mapping[str, Values] = {
    "repeat_penalty": _ONE,
    "bad_token_ids": (None, []),
    "best_of": _ONE,
    "echo": _OFF,
    "n": _ONE,
    "num_return_sequences": _ONE,
    "prompt_logprobs": _NONE,
    "return_ppl": _OFF,
    "continue_final_message": _OFF,
    "return_progress": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "timings_per_token": _OFF,
    "truncate_prompt_tokens": _NONE,
    "truncation_side": _NONE,
}
# Of a chat message. Clients send an answer's message back with all its fields.
MESSAGE: Mapping[str, Values] = {
    "annotations": (None, []),
    "audio": _NONE,
    "function_call": _NONE,
    "images": (None, []),
    "provider_specific_fields": (None, {}),
    "reasoning": (None, ""),
    "reasoning_content": (None, ""),
    "refusal": _NONE,
    "thinking_blocks": (None, []),
    "tool_calls": (None, []),
    "tool_call_id": _NONE,
}
# Fields of these tables that change nothing of an answer.
_HINTS = """
agent_hierarchy annotations cache_prompt caller citations conversation_params custom_labels data_parallel_rank
defer_loading diagnostics disagg_prefill_dp_rank eager_input_streaming id_slot include_reasoning input_examples
media_io_kwargs metadata models moderation ngram_corpus_id parallel_tool_calls personality phase prediction
preserve_cache prompt_cache_breakpoint prompt_cache_options prompt_cache_retention provider_specific_fields reasoning
reasoning_content reasoning_effort reasoning_format reasoning_in_content refusal repeat_last_n request_id
response_fields return_cached_tokens_details rid routed_dp_rank safety_identifier separate_reasoning service_tier
skip_reading_prefix_cache speed stream_interval stream_reasoning thinking_blocks thinking_forced_open
use_audio_in_video user_profile_id verbosity web_search_options with_cache workspace_id
"""
HINTS = frozenset(_HINTS.split())
# Of fields that lmkit has: values with which other APIs say that a field is not set.
UNSET: Mapping[str, Values] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "ebnf": ("",),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_json_object": (False,),
    "guided_regex": ("",),
    "json_schema": ([], {}, ""),
    "logit_bias": ([],),  # as PHP writes an object without fields
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "metadata": ([],),
    "regex": ("",),
    "response_format": ({"type": "text"},),
    "seed": (-1,),
    "session_id": (-1,),
    "stop": ("",),
}


def is_neutral(value: Any, neutral: Collection[Any]) -> bool:
    """Whether `value` is one of `neutral`. 1 is 1.0, but no number is a boolean."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
