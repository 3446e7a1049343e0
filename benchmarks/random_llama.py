"""A Llama, or with experts a Qwen3-MoE, of any size with random weights: a Hugging Face checkpoint, and its AWQ form.

Speed depends on shapes and storage alone. So nothing has to be downloaded to compare engines.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

import lmkit.demo
from lmkit.formats.awq import AwqFormat
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter, atomic_directory
from lmkit.jsonfile import to_json
from lmkit.qtensor import int_scheme, quantize

BOS, EOS = "<s>", "</s>"
SCALE = 0.02  # standard deviation of the weights
GROUP = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a model without biases. Its output head is not tied to its embedding. With `experts`, `mlp` is the size
    of one, and every layer is sparse."""

    hidden: int = 2048
    mlp: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 32000
    max_position: int = 4096
    experts: int = 0
    experts_per_token: int = 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name in a layer -> (outputs, inputs)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            **{
                f"{mlp}.{part}_proj": (self.hidden, self.mlp) if part == "down" else (self.mlp, self.hidden)
                for mlp in ([f"mlp.experts.{i}" for i in range(self.experts)] or ["mlp"])
                for part in ("gate", "up", "down")
            },
        }

    def vectors(self) -> dict[str, int]:
        """Name in a layer -> size."""
        norms = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        of_heads = {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return norms | (of_heads if self.experts else {})

    @property
    def num_linear(self) -> int:
        """Parameters of the decoder layers' matrices."""
        return self.layers * sum(n * k for n, k in self.linears().values())

    @property
    def num_expert(self) -> int:
        """The part of `num_linear` in experts."""
        return self.layers * self.experts * 3 * self.hidden * self.mlp

    @property
    def num_active(self) -> int:
        """The part of `num_linear` that a token is multiplied with."""
        return self.num_linear - self.num_expert + self.num_expert * self.experts_per_token // max(self.experts, 1)

    def share_read(self, num_tokens: int) -> float:
        """The share of `num_linear` that a step of so many tokens reads, if every expert is as likely as any other."""
        if not self.experts:
            return 1.0
        unread = self.num_expert * (1 - self.experts_per_token / self.experts) ** num_tokens
        return 1 - unread / self.num_linear

    @property
    def num_parameters(self) -> int:
        return self.num_linear + 2 * self.vocab * self.hidden + (2 * self.layers + 1) * self.hidden

    @property
    def kv_token_values(self) -> int:
        """Numbers that one token adds to the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_1B = Shape()
MOE_2B = Shape(2048, 768, 4, 32, 4, 128, experts=128, experts_per_token=8)  # 4 layers of Qwen3-30B-A3B


def config(shape: Shape) -> dict[str, object]:
    """config.json."""
    of_experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.mlp,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        **(of_experts if shape.experts else {}),
    }


def make_checkpoint(out: Path, shape: Shape, seed: int = 0, *, counts: bool = False) -> None:
    """Write the bfloat16 checkpoint with a tokenizer of its own to `out`, a folder that does not exist yet.

    `counts`: after token n the likeliest is n + 1, whatever stands before. The head has the embedding of n in row
    n + 1, and the layers compute as others do, but add nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * SCALE).bfloat16()

    with atomic_directory(out) as folder, tempfile.TemporaryDirectory() as texts:
        _write_tokenizer(Path(texts), shape.vocab)
        writer, ones = CheckpointWriter(folder), torch.ones(shape.hidden, dtype=torch.bfloat16)
        embedding = matrix(shape.vocab, shape.hidden)
        writer.add("model.embed_tokens.weight", embedding)
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            for name, (rows, columns) in shape.linears().items():
                weight = matrix(rows, columns)
                adds = name.endswith(("o_proj", "down_proj"))
                writer.add(f"{prefix}.{name}.weight", weight.zero_() if counts and adds else weight)
            if shape.experts:
                writer.add(f"{prefix}.mlp.gate.weight", matrix(shape.experts, shape.hidden))
            for name, size in shape.vectors().items():
                writer.add(f"{prefix}.{name}.weight", torch.ones(size, dtype=torch.bfloat16))
        writer.add("model.norm.weight", ones.clone())
        writer.add("lm_head.weight", embedding.roll(1, 0) if counts else matrix(shape.vocab, shape.hidden))
        writer.finish(dict(config(shape)), Path(texts))


def make_awq(source: Path, out: Path, group: int = GROUP) -> None:
    """Write `source` with its layers' matrices rounded to 4 bits in groups of `group` inputs. The groups are whole rows
    if a width is no multiple of `group`."""
    with CheckpointReader(source) as reader, atomic_directory(out) as folder:
        writer, awq = CheckpointWriter(folder), AwqFormat()
        columns = [reader.info(name).shape[1] for name in reader.names() if name.endswith("_proj.weight")]
        scheme = int_scheme(4, group if all(count % group == 0 for count in columns) else -1)
        for name in reader.names():
            tensor = reader.tensor(name)
            if name.endswith("_proj.weight"):
                awq.write_linear(writer, name.removesuffix(".weight"), quantize(tensor, scheme))
            else:
                writer.add(name, tensor)
        writer.finish(reader.config | {"quantization_config": awq.config_entry({"": scheme})}, source)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE of at most 2,048 tokens, trained on the demo's calibration text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 2048),
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(lmkit.demo.__file__).parent / "text" / "calibration.txt"
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_bytes(to_json(names))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
