"""Train an EAGLE-3 head (arXiv 2503.01840) that drafts the next tokens of the demo model.

    python -m lmkit.demo.make_draft_head OUT --seconds 1300

It reads three of the model's residual streams, and the embedding of the token after them. One layer of the model's own
shape turns both into the stream that the model's last layer would give, and the model's own head makes logits of it.
It learns the model's distributions on the text that the model was trained on: with streams of the model, then with its
own in their place, as it drafts (UNROLL tokens ahead). Its layer begins as the model's last one.
"""

import argparse
import json
import pathlib
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from lmkit.demo.make_demo_model import chats, encode, sources

MODEL = pathlib.Path(__file__).parent / "model"
STREAMS = (2, 5, 7)  # the layers whose inputs are read
SEQ, BATCH, UNROLL = 256, 8, 3
TEXTS = 250  # of the corpus: more than are seen
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 64, 256


class Head(torch.nn.Module):
    """The trained parts, under the names of EAGLE-3 checkpoints."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        last = model.model.layers[-1]
        zeros = {
            name: torch.zeros_like(getattr(last.self_attn, name).weight) for name in ("q_proj", "k_proj", "v_proj")
        }
        start = {
            "fc": torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1),
            "midlayer.hidden_norm": last.input_layernorm.weight,
            "midlayer.input_layernorm": torch.ones(HIDDEN),
            "midlayer.post_attention_layernorm": last.post_attention_layernorm.weight,
            "midlayer.self_attn.o_proj": last.self_attn.o_proj.weight,
            "norm": model.model.norm.weight,
        }
        for name, zero in zeros.items():
            start[f"midlayer.self_attn.{name}"] = torch.cat([zero, getattr(last.self_attn, name).weight], 1)
        for name in ("gate_proj", "up_proj", "down_proj"):
            start[f"midlayer.mlp.{name}"] = getattr(last.mlp, name).weight
        self.parts = torch.nn.ParameterDict(
            {name.replace(".", "/"): value.detach().clone() for name, value in start.items()}
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.parts[name.replace(".", "/")]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self[name]

    def forward(self, states, embedded, angles, earlier):
        """The stream after the layer, from `states` and `embedded` [batch, sequence, hidden]. `earlier` has (k, v) of
        each earlier turn of the unrolled drafting; this turn's are appended."""
        b, t, _ = states.shape
        turn = len(earlier)
        x = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), self.norm(states, "midlayer.hidden_norm")], -1)
        q, k, v = (
            F.linear(x, self[f"midlayer.self_attn.{n}_proj"]).view(b, t, -1, HEAD_DIM).transpose(1, 2) for n in "qkv"
        )
        q, k = rope(q, *angles), rope(k, *angles).repeat_interleave(HEADS // KV_HEADS, 1)
        earlier.append((k, v.repeat_interleave(HEADS // KV_HEADS, 1)))
        # A draft token sees the model's tokens up to `turn` places before it, then one draft token of each turn.
        first_k, first_v = earlier[0]
        seen = torch.ones(t, t, dtype=torch.bool).tril(-turn)
        scores = [(q @ first_k.transpose(2, 3) / HEAD_DIM**0.5).masked_fill(~seen, -1e9)]
        values = []
        for late, (later_k, later_v) in enumerate(earlier[1:], 1):
            back = turn - late
            scores.append((q * later_k.roll(back, 2)).sum(-1, keepdim=True) / HEAD_DIM**0.5)
            values.append(later_v.roll(back, 2))
        shares = torch.cat(scores, -1).softmax(-1)
        out = shares[..., :t] @ first_v
        for place, value in enumerate(values):
            out = out + shares[..., t + place, None] * value
        states = states + F.linear(out.transpose(1, 2).reshape(b, t, -1), self["midlayer.self_attn.o_proj"])
        x = self.norm(states, "midlayer.post_attention_layernorm")
        inner = F.silu(F.linear(x, self["midlayer.mlp.gate_proj"])) * F.linear(x, self["midlayer.mlp.up_proj"])
        return states + F.linear(inner, self["midlayer.mlp.down_proj"])


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def losses(model, head, ids, angles):
    """(loss, share of accepted draft tokens) of each turn."""
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        streams = torch.cat([out.hidden_states[i] for i in STREAMS], -1)
        wanted, embedded = out.logits[:, 1:], F.embedding(ids[:, 1:], table)
    states, earlier = F.linear(streams[:, :-1], head["fc"]), []
    for turn in range(UNROLL):  # place t: the stream of token t and the embedding of token t + 1 give token t + 2
        states = head(states, embedded, angles, earlier)
        logits = F.linear(head.norm(states, "norm"), table)[:, turn:]
        target = wanted[:, turn:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.softmax(-1).flatten(0, 1))
        yield loss, (logits.argmax(-1) == target.argmax(-1)).float().mean().item()
        states = states.roll(1, 1)


def sample(tokens, generator=None):
    starts = torch.randint(0, len(tokens) - SEQ, (BATCH,), generator=generator)
    return torch.stack([tokens[s : s + SEQ] for s in starts])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=900)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    random.seed(0)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    train_texts, held_texts = sources()
    some = random.sample(train_texts, TEXTS)
    train = encode(tokenizer, some + [chat for text in some for chat in chats(text)])
    held = encode(tokenizer, held_texts)
    head = Head(model)
    angle = torch.arange(SEQ - 1)[:, None] / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin()
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    @torch.no_grad()
    def held_out():
        generator = torch.Generator().manual_seed(1)
        rows = [[right for _, right in losses(model, head, sample(held, generator), angles)] for _ in range(8)]
        return " ".join(f"{sum(column) / len(rows):.1%}" for column in zip(*rows, strict=True))

    start, step = time.time(), 0
    while (done := (time.time() - start) / args.seconds) < 1:
        lr = 2e-3 * min(1, (step + 1) / 50) * (1 if done < 0.5 else max(0.02, (1 - done) / 0.5))
        for group in optimizer.param_groups:
            group["lr"] = lr  # warm up, hold, linear cool-down
        loss = sum(loss for loss, _ in losses(model, head, sample(train), angles))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item() / UNROLL:.3f}, held out, right: {held_out()}", flush=True)

    print(f"{step} steps, {step * SEQ * BATCH:,} tokens; held out, right: {held_out()}")
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {name.replace("/", ".") + ".weight": part.detach().bfloat16() for name, part in head.parts.items()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    for name in ("transformers_version", "use_cache", "pretraining_tp", "initializer_range"):
        config.pop(name)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(STREAMS), "use_aux_hidden_state": True},
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
