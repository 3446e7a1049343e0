"""Make the small Qwen3-MoE of the tests: 5.0M parameters, trained on the demo model's text with its tokenizer.

    python -m lmkit.demo.make_moe_model tests/data/qwen3_moe --steps 600

Model: hidden 256, 4 layers, 4 query and 2 key-value heads of 64 with norms, 8 experts of 128 in each layer, 2 for a
token, tied head. Its embeddings start as the demo model's, everything else at random. The batch of a step depends on
its number alone, so a run that was stopped goes on from OUT.training as if it had not been (`--at-most N` stops it).
Trained in bfloat16 with float32 master weights; needs torch, transformers, tokenizers and safetensors.
"""

import argparse
import json
import math
import pathlib
import shutil
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lmkit.demo.make_demo_model import chats, encode, linear, rms_norm, rope, sources

DEMO = pathlib.Path(__file__).parent / "model"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 64
EXPERTS, CHOSEN, INNER, VOCAB, EPS = 8, 2, 128, 4096, 1e-6
SEQ, BATCH, BALANCE = 256, 16, 0.01
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
    embed.weight.data.copy_(load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"])
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


def batch_of(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - SEQ - 1, (BATCH,), generator=generator)
    rows = torch.stack([tokens[s : s + SEQ + 1] for s in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def corpus(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The demo model's training and held-out tokens. They are kept in `folder`."""
    file = folder / "tokens.pt"
    if not file.exists():
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        train, held = sources()
        pairs = [c for text in train for c in chats(text)]
        tokens = {"train": encode(tokenizer, train + pairs * 2), "held": encode(tokenizer, held)}
        torch.save({name: ids.to(torch.int32) for name, ids in tokens.items()}, file)
    return {name: ids.long() for name, ids in torch.load(file).items()}


def save(model, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(DEMO / name, out / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--at-most", type=int, help="steps of this call")
    args = parser.parse_args()
    folder = args.out.with_name(args.out.name + ".training")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokens, model, kept = corpus(folder), make_model(), folder / "state.pt"
    angles = torch.arange(SEQ)[:, None] / CONFIG["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], 1)[None, None]
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, first = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True), 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    @torch.no_grad()
    def held_loss():
        return sum(loss_of(model, *batch_of(tokens["held"], -1 - i), cos, sin)[0].item() for i in range(8)) / 8

    start, last = time.time(), min(args.steps, first + (args.at_most or args.steps))
    for step in range(first, last):
        done = step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 100) * min(1, max(0.02, (1 - done) / 0.5))
        loss, uneven = loss_of(model, *batch_of(tokens["train"], step), cos, sin)
        (loss + BALANCE * uneven).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.time() - start:.0f} s", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": last}, kept)
    print(f"{last} of {args.steps} steps, {last * SEQ * BATCH:,} tokens, held-out loss {held_loss():.4f}", flush=True)
    if last == args.steps:
        save(model, args.out)


if __name__ == "__main__":
    main()
