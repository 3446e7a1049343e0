"""llama.cpp by llama-cpp-python's low-level interface: GGUF Q4_0, flash attention, one batch for all sequences."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as ll
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.protocol import Facts, Options, main
from benchmarks.peers.safetensors_numpy import Array, tensors

MICRO_BATCH = 2048
ROOM = 256  # tokens of an answer
Q8_0_TOKENS = 16_384  # larger caches have 8 bits; smaller ones are faster in float16
Q8_0, Q8_0_BYTES = 8, 34 / 32  # ggml's number of the KV type; 32 numbers have a float16 scale
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(\d+)\.(\w+)_proj\.weight")


class LlamaCpp:
    package = "llama-cpp-python"

    def __init__(self, options: Options) -> None:
        self.options = options
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(str(options.model).encode(), ll.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self.has_experts = any("_exps." in tensor.name for tensor in gguf.GGUFReader(options.model).tensors)
        self.context: Any = None
        self.size = (0, 0)  # sequences and tokens of a sequence that the context holds
        self.sequences: list[int] = []  # last token of each
        self.position = 0
        self.loop: Any = None  # llama_cpp.Llama, for answers
        self.facts = Facts(
            metadata.version(self.package),
            f"Q4_0, flash attention, float16 KV (Q8_0 above 16k tokens), {_features()}",
            _read_bytes(options.model),
            Q8_0_BYTES,
            _read_bytes(options.model, "output."),
        )

    def prefill(self, prompts: list[list[int]]) -> None:
        """Run the first prompt and copy its cache to the other sequences. They get memory of their own, and preparation
        is shorter. Equal sequences would choose the same experts, so with experts every prompt runs."""
        self._open(len(prompts), len(prompts[0]) + ROOM)
        self.position = len(prompts[0])
        if self.has_experts:
            self.sequences = [self._first_token(prompt, number) for number, prompt in enumerate(prompts)]
            return
        self.sequences = [self._first_token(prompts[0], 0)] * len(prompts)
        memory = ll.llama_get_memory(self.context)
        for number in range(1, len(prompts)):
            ll.llama_memory_seq_cp(memory, 0, number, -1, -1)

    def _first_token(self, prompt: list[int], number: int) -> int:
        """Run the prompt of sequence `number`."""
        entries = [(token, i, number, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        for start in range(0, len(prompt), MICRO_BATCH):
            self._decode(entries[start : start + MICRO_BATCH])
        return self._best(-1)

    def step(self) -> int:
        self._decode([(token, self.position, number, True) for number, token in enumerate(self.sequences)])
        self.position += 1
        self.sequences = [self._best(number) for number in range(len(self.sequences))]
        return len(self.sequences)

    def answer(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        """By llama-cpp-python's own loop, which has a prompt lookup."""
        if self.loop is None:
            options, threads = self.options, self.options.threads
            lookup = LlamaPromptLookupDecoding(num_pred_tokens=options.drafts) if options.drafts else None
            self.loop = ll.Llama(
                str(options.model), n_ctx=options.max_context, n_batch=MICRO_BATCH, n_threads=threads,
                n_threads_batch=threads, flash_attn=True, draft_model=lookup, verbose=False,
            )  # fmt: skip
        tokens = self.loop.generate(prompt, temp=0.0)
        yield from ([token] for token in itertools.islice(tokens, count))

    def _open(self, batch: int, length: int) -> None:
        """Empty the context, or make one for another batch. Its cache has no room to spare, and its sequences have
        streams of their own."""
        if self.size == (batch, length):
            ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
            return
        if self.context is not None:
            ll.llama_free(self.context)
        params = ll.llama_context_default_params()
        params.n_ctx = batch * length
        if batch * length > Q8_0_TOKENS:
            params.type_k = params.type_v = Q8_0
        params.n_seq_max = batch
        params.n_batch = params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = self.options.threads
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context for {batch} sequences")
        self.size = batch, length

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Run entries (token, position, sequence, whether its logits are wanted)."""
        batch = ll.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        status = ll.llama_decode(self.context, batch)
        ll.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, index: int) -> int:
        """The most likely token after the entry `index` of the last batch."""
        logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, index), (self.options.vocab,))
        return int(logits.argmax())


def _features() -> str:
    """The instruction sets of this build that the processor has, as llama.cpp reports them."""
    pairs = (part.partition("=") for part in ll.llama_print_system_info().decode().split("|"))
    return " ".join(name.split(":")[-1].strip() for name, _, on in pairs if on.strip() == "1")


def prepare(source: Path, out: Path) -> None:
    """Write a GGUF in bfloat16, then quantize it as llama.cpp's own tool does."""
    full = out.with_suffix(".full")
    _write_gguf(source, full)
    params = ll.llama_model_quantize_default_params()
    params.ftype = ll.LLAMA_FTYPE_MOSTLY_Q4_0
    partial = out.with_suffix(".partial")
    status = ll.llama_model_quantize(str(full).encode(), str(partial).encode(), ctypes.byref(params))
    full.unlink()
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    partial.rename(out)


def _write_gguf(source: Path, out: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    num_experts = config.get("num_experts", 0)
    writer = gguf.GGUFWriter(out, "qwen3moe" if num_experts else "llama")
    add_sizes(writer, config)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, values in _experts_together(source, num_experts):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        array = values if heads is None or num_experts else _interleaved(values, config[heads])
        small = array.ndim == 1 or name.endswith("mlp.gate.weight")
        writer.add_tensor(gguf_name(name), array.astype(np.float32 if small else np.float16))
    finish(writer)


def add_sizes(writer: Any, config: dict[str, Any]) -> None:
    """What config.json says of a dense model."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")  # ids go in and come out
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_together(source: Path, num_experts: int) -> Iterator[tuple[str, Array]]:
    """The checkpoint's tensors; all experts of a layer in one, [experts, outputs, inputs] in float16."""
    parts: dict[str, dict[int, Array]] = {}
    for name, values in tensors(source):
        if (found := EXPERT.fullmatch(name)) is None:
            yield name, values
            continue
        mlp, number, part = found.groups()
        held = parts.setdefault(f"{mlp}.experts.{part}", {})
        held[int(number)] = values.astype(np.float16)
        if len(held) == num_experts:
            yield f"{mlp}.experts.{part}", np.stack([held.pop(i) for i in range(num_experts)])


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if ".experts." in name:
        return f"blk.{module.split('.')[2]}.ffn_{module.split('.')[-1]}_exps.weight"
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[module]}.weight"


def _interleaved(weight: Array, heads: int) -> Array:
    """Rows of each head in the order 0, half, 1, half + 1, ..., as rotary pairs are neighbours in llama.cpp."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _read_bytes(path: Path, prefix: str = "") -> int:
    """Bytes of all tensors of this prefix except the embedding. A token reads only one row of it."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    return sum(size for name, size in sizes.items() if name.startswith(prefix) and not name.startswith("token_embd"))


if __name__ == "__main__":
    main(LlamaCpp, prepare)
