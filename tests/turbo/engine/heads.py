"""The demo model's draft head, and its arithmetic in float32: EAGLE-3 (arXiv 2503.01840), written down again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmkit.formats.hub import DEMO_HEAD

STREAMS = (2, 5, 7)
HEADS, KV_HEADS, SIZE = 4, 2, 64


def with_tokens(folder: Path, demo_model: Path, tokens: list[int]) -> Path:
    """The demo model's head with these tokens alone."""
    shutil.copytree(DEMO_HEAD, folder)
    embeddings = load_file(demo_model / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(folder / "model.safetensors")
    weights |= {"lm_head.weight": embeddings[tokens], "d2t": torch.tensor(tokens) - torch.arange(len(tokens))}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"draft_vocab_size": len(tokens)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_head(folder: Path, model: Path, tokens: list[int], streams: tuple[int, int, int]) -> Path:
    """A head of random weights for a tiny model. It drafts these tokens alone."""
    of_model = json.loads((model / "config.json").read_text())
    hidden, wide = of_model["hidden_size"], of_model["intermediate_size"]
    config = json.loads((DEMO_HEAD / "config.json").read_text()) | {
        "hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": 2, "num_key_value_heads": 1,
        "draft_vocab_size": len(tokens), "eagle_config": {"eagle_aux_hidden_state_layer_ids": streams},
    }  # fmt: skip
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (len(tokens), hidden),
        "midlayer.self_attn.q_proj": (2 * SIZE, 2 * hidden), "midlayer.self_attn.k_proj": (SIZE, 2 * hidden),
        "midlayer.self_attn.v_proj": (SIZE, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, 2 * SIZE),
        "midlayer.mlp.gate_proj": (wide, hidden), "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = "norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir()
    save_file(weights | {"d2t": torch.tensor(tokens) - torch.arange(len(tokens))}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """What a head computes, one token after the other."""

    def __init__(self, head: Path, embeddings: Tensor) -> None:
        self.weights = {name: x.float() for name, x in load_file(head / "model.safetensors").items() if name != "d2t"}
        self.embeddings = embeddings.float()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-5) * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def turned(self, x: Tensor, position: int) -> Tensor:
        angles = position / 10000.0 ** (torch.arange(0, SIZE, 2) / SIZE)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def state(self, streams: Tensor) -> Tensor:
        """Streams [3 * hidden] of a token -> the state before the token after it."""
        return self.linear(streams, "fc")

    def step(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """(the next state, logits) of the next token in the text."""
        position = len(self.keys)
        embedded = self.norm(self.embeddings[token], "midlayer.input_layernorm")
        x = torch.cat([embedded, self.norm(state, "midlayer.hidden_norm")])
        q, k, v = (self.linear(x, f"midlayer.self_attn.{name}_proj").view(-1, SIZE) for name in "qkv")
        self.keys.append(self.turned(k, position))
        self.values.append(v)
        keys, values = (torch.stack(held).repeat_interleave(HEADS // KV_HEADS, 1) for held in (self.keys, self.values))
        shares = torch.einsum("hd,thd->ht", self.turned(q, position), keys).div(SIZE**0.5).softmax(-1)
        attended = torch.einsum("ht,thd->hd", shares, values).flatten()
        state = state + self.linear(attended, "midlayer.self_attn.o_proj")
        x = self.norm(state, "midlayer.post_attention_layernorm")
        inner = F.silu(self.linear(x, "midlayer.mlp.gate_proj")) * self.linear(x, "midlayer.mlp.up_proj")
        state = state + self.linear(inner, "midlayer.mlp.down_proj")
        head = self.weights.get("lm_head.weight", self.embeddings)
        return state, F.linear(self.norm(state, "norm"), head)
