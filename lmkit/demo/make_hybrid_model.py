"""Make the small hybrid of the tests: a Qwen3.5 of 5.0M parameters with a layer for multi-token prediction, trained
on the demo model's text with its tokenizer.

    python -m lmkit.demo.make_hybrid_model tests/data/qwen3_5 --steps 300

Model: hidden 256, three layers of linear attention (the gated delta rule, 4 heads of 64) and one of full attention (4
query and 2 key-value heads of 64, gated), MLP 640, tied head. Its embeddings start as the demo model's, everything else
at random. The layer for multi-token prediction learns with the model: it drafts the model's own distribution of the
token after next, then of the one after it from its own state. See small.py for runs that were stopped.
Trained in bfloat16 with float32 master weights; needs torch, transformers, tokenizers and safetensors.
"""

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from lmkit.demo.small import demo_embeddings, train

HIDDEN, VOCAB, EPS, STEPS, TURNS, SHARE = 256, 4096, 1e-6, 300, 2, 0.2
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "intermediate_size": 640,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "attention_bias": False,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": EPS, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 3, "dtype": "bfloat16",
}  # fmt: skip


def make_model() -> Qwen3_5ForCausalLM:
    """A Qwen3.5, and in `mtp` the layer that transformers leaves out."""
    config = Qwen3_5TextConfig(**CONFIG | {"dtype": "float32"})
    model = Qwen3_5ForCausalLM(config)
    model.model.embed_tokens.weight.data.copy_(demo_embeddings())
    mtp = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList([Qwen3_5DecoderLayer(config, 3)]),
            "fc": torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
            **{name: Qwen3_5RMSNorm(HIDDEN, EPS) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        }
    )
    for part in mtp.modules():
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.02)
    model.add_module("mtp", mtp)
    return model


def optimizers(model):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the linears, AdamW for the rest."""
    linears = [
        part.weight for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not model.lm_head
    ]
    rest = [p for p in model.parameters() if all(p is not weight for weight in linears)]
    return [
        torch.optim.Muon(linears, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def losses(model, rows):
    """Cross entropies in nats: of the next token, then a share of those of the added layer's drafts, turn by turn,
    against the model's own distributions."""
    with torch.autocast("cpu", torch.bfloat16):
        states, mtp = model.model(rows[:, :-1], use_cache=False).last_hidden_state, model.mtp
        logits = model.lm_head(states).float()
        yield F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        wanted = logits.detach().softmax(-1)[:, 1:]
        embedded = mtp["pre_fc_norm_embedding"](model.model.embed_tokens(rows[:, 1:-1]))
        states = states[:, :-1]
        places = torch.arange(states.shape[1])[None, None].expand(3, 1, -1)
        angles = model.model.rotary_emb(states, places)
        for turn in range(TURNS):  # place t: the state of token t and the embedding of token t + 1 give token t + 2
            x = mtp["fc"](torch.cat([embedded, mtp["pre_fc_norm_hidden"](states)], -1))
            states = mtp["norm"](mtp["layers"][0](x, position_embeddings=angles))
            drafted = model.lm_head(states[:, turn::2]).float()  # half of them, which is enough to learn from
            yield SHARE * F.cross_entropy(drafted.flatten(0, 1), wanted[:, turn::2].flatten(0, 1))
            states = states.roll(1, 1)


if __name__ == "__main__":
    train(__doc__, STEPS, make_model, optimizers, losses, CONFIG)
