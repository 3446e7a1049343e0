"""A copy of a Llama-like checkpoint with outlier channels that computes the same function.

    python -m benchmarks.outliers demo /tmp/outliers30 --factor 30

In every layer a few channels of each norm are multiplied by `factor`, and the columns of the linears after it are
divided by `factor`. Activations get the large channels that real models have; logits stay (float32, up to rounding).
The script uses nothing of lmkit except the place of the demo model, so that other tools are measured on the same file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARE = 0.015  # of a norm's channels

NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def make_outliers(source: Path, target: Path, factor: float, *, share: float = SHARE, seed: int = 0) -> None:
    """Write the checkpoint `source` to `target` (a new directory) in float32, with its norms' outliers times
    `factor`."""
    target.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    if factor != 1:
        add_outliers(tensors, factor, share=share, seed=seed)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".model") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def add_outliers(tensors: dict[str, Tensor], factor: float, *, share: float = SHARE, seed: int = 0) -> None:
    """Change float32 `tensors` of a dense checkpoint, by name, in place. At least one channel of each norm changes."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        prefix, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in NORMS:
            continue
        size = tensors[name].numel()
        channels = torch.randperm(size, generator=generator)[: max(1, round(share * size))]
        gain = torch.ones(size)
        gain[channels] = factor
        tensors[name] = tensors[name] * gain
        for linear in NORMS[norm]:
            weight = f"{prefix}.{linear}.weight"
            tensors[weight] = tensors[weight] / gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", help="a checkpoint's folder, or demo")
    parser.add_argument("target", type=Path)
    parser.add_argument("--factor", type=float, required=True)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.source == "demo":
        from lmkit.formats.hub import DEMO_FOLDER

        args.source = DEMO_FOLDER
    make_outliers(Path(args.source), args.target, args.factor, share=args.share, seed=args.seed)


if __name__ == "__main__":
    main()
