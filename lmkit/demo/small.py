"""Training of the tests' small models, on the demo model's text with its tokenizer.

The batch of a step depends on its number alone, so a run that was stopped goes on from OUT.training as if it had not
been (`--at-most N` stops it).
"""

import argparse
import json
import pathlib
import shutil
import time

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lmkit.demo.make_demo_model import chats, encode, sources

DEMO = pathlib.Path(__file__).parent / "model"
SEQ, BATCH, PEAK = 256, 16, 3e-3  # PEAK: the highest learning rate


def demo_embeddings() -> torch.Tensor:
    return load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]


def batch_of(tokens, seed):
    """Rows of SEQ tokens, and the token after each."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - SEQ - 1, (BATCH,), generator=generator)
    return torch.stack([tokens[s : s + SEQ + 1] for s in starts])


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


def save(tensors: dict[str, torch.Tensor], config: dict, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: x.detach().bfloat16().contiguous() for name, x in tensors.items() if not name.startswith("lm_head")
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(DEMO / name, out / name)


def train(doc: str, steps: int, make_model, optimizers_of, losses, config: dict) -> None:
    """The command of a small model. `losses(model, rows)`: that of the next token first; their sum is learned."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--at-most", type=int, help="steps of this call")
    args = parser.parse_args()
    folder = args.out.with_name(args.out.name + ".training")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokens, model, kept, first = corpus(folder), make_model(), folder / "state.pt", 0
    optimizers = optimizers_of(model)
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        for optimizer, numbers in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(numbers)
        first = state["step"]

    @torch.no_grad()
    def held_out():
        rows = [[x.item() for x in losses(model, batch_of(tokens["held"], -1 - i))] for i in range(8)]
        return ", ".join(f"{sum(column) / len(rows):.4f}" for column in zip(*rows, strict=True))

    start, last = time.time(), min(args.steps, first + (args.at_most or args.steps))
    for step in range(first, last):
        done = step / args.steps
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK * min(1, (step + 1) / 100) * min(1, max(0.02, (1 - done) / 0.5))
        parts = list(losses(model, batch_of(tokens["train"], step)))
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            shown = ", ".join(f"{x.item():.3f}" for x in parts)
            print(f"step {step + 1}: losses {shown}, {time.time() - start:.0f} s", flush=True)
    state = {"model": model.state_dict(), "optimizers": [x.state_dict() for x in optimizers], "step": last}
    torch.save(state, kept)
    if last == args.steps:
        print(f"{last} steps, {last * SEQ * BATCH:,} tokens, losses of held-out text: {held_out()}", flush=True)
        save(model.state_dict(), config, args.out)
