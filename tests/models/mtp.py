"""Tiny checkpoints with a layer for multi-token prediction, and what it computes in float32.

transformers ignores these layers. A model of one layer of the same family is the oracle for what stands between fc and
the head; the rest is written down here (arXiv 2412.19437).
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmkit.formats.hub import DEMO_FOLDER
from tests.models import tiny

# family -> the options of a model whose one layer is of the kind that predicts
ALONE: dict[str, dict[str, Any]] = {
    "qwen3-next": {"full_attention_interval": 1},
    "qwen3.5": {"full_attention_interval": 1},
    "deepseek-v3": {"first_k_dense_replace": 0},
    "glm4-moe": {"first_k_dense_replace": 0},
}
BESIDE = {"layer": "mtp.layers.0.", "fc": "mtp.fc", "token": "mtp.pre_fc_norm_embedding",
          "state": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}  # fmt: skip
BEHIND = {"layer": "", "fc": "eh_proj", "token": "enorm", "state": "hnorm", "norm": "shared_head.norm"}


@dataclass
class Reference:
    """A model and its layer. `norms`: before fc, of embeddings and of states."""

    model: Any
    alone: Any  # of one layer
    fc: Tensor
    norms: tuple[Any, Any]

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], start: int, count: int) -> list[int]:
        """The next `count` tokens. The layer's text begins at token `start`."""
        states = self.model.model(torch.tensor([token_ids])).last_hidden_state[0]
        of_token, of_state = self.norms
        tokens, rows = list(token_ids), [states[place - 1] for place in range(start, len(token_ids))]
        found: list[int] = []
        while True:
            embedded = self.model.model.embed_tokens(torch.tensor(tokens[start:]))
            x = F.linear(torch.cat([of_token(embedded), of_state(torch.stack(rows))], -1), self.fc)
            after = self.alone.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            found.append(int(self.model.lm_head(after).argmax()))
            if len(found) == count:
                return found
            tokens.append(found[-1])
            rows.append(after)


def make(path: Path, name: str, **overrides: Any) -> Reference:
    """Write a model of family `name` with its layer, and the demo model's tokenizer, to `path`."""
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512} | overrides
    model = tiny.make(path, name, **sizes)
    one = path / "one"
    alone = tiny.make(one, name, **sizes | {"num_hidden_layers": 1} | ALONE[name])
    layers = model.config.num_hidden_layers
    names = BESIDE if name.startswith("qwen") else {k: f"model.layers.{layers}.{v}" for k, v in BEHIND.items()}
    hidden = model.config.hidden_size
    fc = torch.randn(hidden, 2 * hidden) * 0.2
    norms = copy.deepcopy(model.model.norm), copy.deepcopy(model.model.norm)
    for norm in norms:
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    tensors = load_file(path / "model.safetensors")
    for stored, tensor in load_file(one / "model.safetensors").items():
        if stored.startswith("model.layers.0."):
            tensors[names["layer"] + stored.removeprefix("model.layers.0.")] = tensor
    plain = {"fc": fc, "token": norms[0].weight, "state": norms[1].weight, "norm": alone.model.norm.weight}
    tensors |= {f"{names[part]}.weight": tensor.detach().clone() for part, tensor in plain.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    shutil.rmtree(one)
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / file, path / file)
    return Reference(model, alone, fc, norms)
