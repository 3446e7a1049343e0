"""config.json of a GGUF file, from its metadata. Each architecture of llama.cpp is an entry of `ARCHITECTURES`.

What a family has that no key tells (an activation, biases, norms of q and k) is seen from the tensors, or is fixed in
its entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_architecture import CAPS, OPTIONAL, SIZES, WINDOW, Architecture
from lmkit.formats.gguf_dense import DENSE
from lmkit.formats.gguf_experts import MOE
from lmkit.formats.gguf_facts import Facts
from lmkit.formats.gguf_hybrids import HYBRIDS
from lmkit.formats.gguf_model import GgufModel
from lmkit.formats.gguf_rope import rope_fields

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **MOE, **HYBRIDS}
# A file without the key has no such thing. A config.json without it has the default of its family's class.
NONE_IF_ABSENT = {*WINDOW, *CAPS, "q_lora_rank"}
ENCODERS = "bert", "modern-bert"  # whose rules give what RoPE needs


def make_config(file: GgufModel) -> dict[str, Any]:
    """The content of config.json. Its numbers are checked like those of every config.json.

    Raises UnsupportedError for an architecture that is not known, and CheckpointError for missing or wrong metadata.
    """
    kind = file.metadata.get("general.architecture")
    entry = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise UnsupportedError(
            f"{file.path}: architecture {kind!r}; lmkit reads {', '.join(ARCHITECTURES)} from GGUF (docs/formats.md)"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    assert isinstance(kind, str)
    facts = Facts(file, kind)
    config: dict[str, Any] = {"architectures": [entry.name], "model_type": entry.model_type}
    config |= {name: facts.needed(key) for name, key in SIZES.items()} | {"num_hidden_layers": facts.num_layers}
    config |= facts.fields({name: key for name, key in OPTIONAL.items() if name not in entry.apart})
    config |= facts.fields(entry.fields) | dict(entry.fixed)
    config |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "attention_bias": any(map(facts.has, ("attn_q.bias", "attn_qkv.bias", "attn_kv_a_mqa.bias"))),
        "attention_out_bias": facts.has("attn_output.bias"),
        "bias": facts.has("attn_q.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": file.float_type,
    }
    config |= entry.more(facts, config)
    if "rope_parameters" not in config and kind not in ENCODERS:
        config |= rope_fields(facts, config)
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if type(token := file.metadata.get(f"tokenizer.ggml.{name}_token_id")) is int:
            config[key] = token
    absent = dict.fromkeys(NONE_IF_ABSENT & entry.fields.keys())
    return absent | {name: value for name, value in config.items() if value is not None or name in NONE_IF_ABSENT}
