"""Make the small Qwen3-MoE of the tests: 5.0M parameters, trained on the demo model's text with its tokenizer.

    python -m lmkit.demo.make_moe_model tests/data/qwen3_moe --steps 600

Model: hidden 256, 4 layers, 4 query and 2 key-value heads of 64 with norms, 8 experts of 128 in each layer, 2 for a
token, tied head. Its embeddings start as the demo model's, everything else at random. See small.py
for runs that were stopped. Trained in bfloat16 with float32 master weights; needs torch, transformers, tokenizers and
safetensors.
"""

import math

import torch
import torch.nn.functional as F

from lmkit.demo.make_demo_model import linear, rms_norm, rope
from lmkit.demo.small import SEQ, demo_embeddings, train

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 64
EXPERTS, CHOSEN, INNER, VOCAB, EPS = 8, 2, 128, 4096, 1e-6
BALANCE = 0.01
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": 4 * INNER, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "decoder_sparse_step": 1,
    "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "mlp_only_layers": [], "hidden_act": "silu",
    "rms_norm_eps": EPS, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 3, "dtype": "bfloat16",
}  # fmt: skip


class Matrix(torch.nn.Module):
    """A linear without bias; `linear` multiplies with it."""

    def __init__(self, outputs: int, inputs: int, std: float = 0.02):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) * std)


class Vector(torch.nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


def named(**modules: torch.nn.Module) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(modules)


def make_model() -> torch.nn.ModuleDict:
    """The parameters, by the names of a Qwen3-MoE checkpoint."""
    small = 0.02 / math.sqrt(2 * LAYERS)
    layers = [
        named(
            input_layernorm=Vector(HIDDEN),
            self_attn=named(
                q_proj=Matrix(HEADS * HEAD_DIM, HIDDEN), k_proj=Matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                v_proj=Matrix(KV_HEADS * HEAD_DIM, HIDDEN), o_proj=Matrix(HIDDEN, HEADS * HEAD_DIM, small),
                q_norm=Vector(HEAD_DIM), k_norm=Vector(HEAD_DIM),
            ),
            post_attention_layernorm=Vector(HIDDEN),
            mlp=named(
                gate=Matrix(EXPERTS, HIDDEN),
                experts=torch.nn.ModuleList(
                    named(gate_proj=Matrix(INNER, HIDDEN), up_proj=Matrix(INNER, HIDDEN),
                          down_proj=Matrix(HIDDEN, INNER, small))
                    for _ in range(EXPERTS)
                ),
            ),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    embed = Matrix(VOCAB, HIDDEN)
    embed.weight.data.copy_(demo_embeddings())
    return named(model=named(embed_tokens=embed, layers=torch.nn.ModuleList(layers), norm=Vector(HIDDEN)))


def attention(x, attn, cos, sin):
    """x bfloat16 [batch, sequence, hidden], normalized."""
    b, t, _ = x.shape
    q, k, v = (linear(x, attn[name]).view(b, t, -1, HEAD_DIM) for name in ("q_proj", "k_proj", "v_proj"))
    q, k = (
        rope(rms_norm(part, attn[norm].weight).transpose(1, 2), cos, sin)
        for part, norm in ((q, "q_norm"), (k, "k_norm"))
    )
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v.transpose(1, 2)))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(o.transpose(1, 2).reshape(b, t, -1), attn["o_proj"]).float()


def experts(x, mlp):
    """(the mixture's output float32 [tokens, hidden], how unevenly tokens are sent) of x bfloat16, normalized."""
    scores = F.linear(x.float(), mlp["gate"].weight).softmax(-1)
    best, chosen = scores.topk(CHOSEN)
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for number, expert in enumerate(mlp["experts"]):
        tokens, place = (chosen == number).nonzero(as_tuple=True)
        mine = x.index_select(0, tokens)
        inner = F.silu(linear(mine, expert["gate_proj"])) * linear(mine, expert["up_proj"])
        out = out.index_add(0, tokens, linear(inner, expert["down_proj"]).float() * best[tokens, place][:, None])
    load = torch.zeros(EXPERTS).index_add(0, chosen.flatten(), torch.ones(chosen.numel())) / chosen.numel()
    return out, EXPERTS * (load * scores.mean(0)).sum()


def loss_of(model, ids, targets, cos, sin):
    """(next-token cross entropy in nats, the mean imbalance of the layers); ids and targets are [batch, sequence]."""
    model, uneven = model["model"], 0.0
    h = F.embedding(ids, model["embed_tokens"].weight)
    for layer in model["layers"]:
        h = h + attention(rms_norm(h, layer["input_layernorm"].weight), layer["self_attn"], cos, sin)
        out, imbalance = experts(rms_norm(h, layer["post_attention_layernorm"].weight).flatten(0, 1), layer["mlp"])
        h, uneven = h + out.view(h.shape), uneven + imbalance / LAYERS
    logits = F.linear(rms_norm(h, model["norm"].weight), model["embed_tokens"].weight.bfloat16())
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), uneven


def main():
    angles = torch.arange(SEQ)[:, None] / CONFIG["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], 1)[None, None]
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def losses(model, rows):
        loss, uneven = loss_of(model, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), cos, sin)
        yield loss
        yield BALANCE * uneven

    def optimizers(model):
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]

    train(__doc__, 600, make_model, optimizers, losses, CONFIG)


if __name__ == "__main__":
    main()
