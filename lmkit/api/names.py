"""Names that other tools have in Python for what lmkit has. `lmkit.other_names` has those of fields and options."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.other_names import NO_BEAMS, NOT_OUTPUT, OWN_TEMPLATE, SPECULATION, TEXT_ONLY, each

# Of `pipeline`: its own arguments.
OPENING: Mapping[str, str] = {
    "engine_config": "use backend_config",
    "model_id": "use model",
    "model_name": "use model",
    "model_path": "use model",
    "repo_id": "use model",
}

# Of a call of a pipeline: its keywords.
CALL: Mapping[str, str] = {
    "config": "use gen_config",
    "generation_config": "use gen_config",
    "images": 'put parts {"type": "image", "image": ...} into a message',
    "lora_request": "use adapter_name, one of EngineConfig.adapters",
    "max_tokens": "use gen_config=GenerationConfig(max_new_tokens=...)",
    "request_output_len": "use gen_config=GenerationConfig(max_new_tokens=...)",
    "sampling_params": "use gen_config=GenerationConfig(...)",
    "sequence_end": "use pipe.chat(prompt, session)",
    "sequence_start": "use pipe.chat(prompt, session)",
    "sessions": "use pipe.chat(prompt, session), one call for each session",
    "stream": "use pipe.stream_infer(...)",
}

# Of a pipeline: its methods and attributes.
PIPELINE: Mapping[str, str] = {
    "apply_chat_template": "use pipe.tokenizer.render_chat(messages)",
    "async_engine": "use AsyncPipeline",
    "batch_infer": "use pipe(prompts)",
    "beam_search": NO_BEAMS,
    "classify": TEXT_ONLY,
    "create_chat_completion": "use pipe(messages) or pipe.chat(prompt)",
    "create_completion": "use pipe(prompt, do_preprocess=False)",
    "encode": "use pipe.tokenizer.encode(text)",
    "generate": "use pipe(prompts, gen_config), or AsyncPipeline",
    "get_logits": f"{NOT_OUTPUT}; use logprobs or pipe.ppl(...)",
    "get_reward_score": "lmkit runs no reward models",
    "get_tokenizer": "use pipe.tokenizer",
    "llm_engine": "use pipe.engine",
    "score": "use pipe.embed(...), or pipe.ppl(...)",
    "shutdown": "use pipe.close()",
    "stop_session": "end the iteration over pipe.chat(..., stream_response=True)",
    "tokenize": "use pipe.tokenizer.encode(text)",
}

# Of a Response and a Session: their attributes.
RESPONSE: Mapping[str, str] = {
    "cached_tokens": "use cached_token_len",
    "last_hidden_state": NOT_OUTPUT,
    "logits": f"{NOT_OUTPUT}; use logprobs",
    "num_cached_tokens": "use cached_token_len",
    "outputs": "use text, token_ids and finish_reason; one Response is one answer",
    "prompt_token_ids": "use pipe.tokenizer",
    "routed_experts": NOT_OUTPUT,
    "usage": "use input_token_len and generate_token_len",
}
SESSION: Mapping[str, str] = {
    "abort": "end the iteration over pipe.chat(..., stream_response=True)",
    "close": "a session needs no end; its KV goes when its lease ends",
    "messages": "use history",
    "prompt": "use history",
}

# Of the package: what `from lmkit import ...` asks for.
PACKAGE: Mapping[str, str] = {
    "AsyncLLMEngine": "use AsyncPipeline(model)",
    **each("use pipeline(model)", "AutoModelForCausalLM LLM LLMEngine"),
    "AutoTokenizer": "use pipeline(model).tokenizer",
    "ChatTemplateConfig": OWN_TEMPLATE,
    **each("use EngineConfig", "EngineArgs PytorchEngineConfig TurbomindEngineConfig"),
    "Llama": "use pipeline(model); a model may be a GGUF file",
    "SamplingParams": "use GenerationConfig",
    "SpeculativeConfig": SPECULATION,
    "VisionConfig": TEXT_ONLY,
    "client": "use `lmkit chat http://host:port`, or OpenAI's client",
}
