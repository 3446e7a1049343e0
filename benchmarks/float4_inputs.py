"""The quality of checkpoints whose inputs engines round to float4, as such an engine computes (W4A4).

    python -m benchmarks.float4_inputs ORIGINAL CHECKPOINT [CHECKPOINT ...] [--text FILE] [--eval-tokens N]

lmkit gives weights of float4 exact inputs, so `lmkit eval` shows what the weights alone cost. Here transformers
computes with the dense weights in float32, and the input of each quantized linear is rounded as the file asks for:
NVFP4 with a float8 scale for each 16 inputs of a token and the file's `input_global_scale`, or MXFP4. Windows of 512
tokens as in lmkit.quant.report.evaluate.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_peers.dense import load_float32
from lmkit.codes import stepped
from lmkit.formats.hub import resolve_model_path
from lmkit.models.source import ModelSource
from lmkit.models.to_dense import to_dense
from lmkit.qtensor import QTensor, QuantScheme, dequantize, quantize
from lmkit.quant.report.evaluate import cut_windows, encode_text, window_prefix

SEQ_LEN = 512


def load(path: Path) -> tuple[Any, dict[str, QTensor]]:
    """(a transformers model with the checkpoint's weights in float32, its quantized weights by module)."""
    source = ModelSource(path)
    if source.format.name == "dense":
        return load_float32(path), {}
    quantized = {}
    for index, layer in enumerate(source.spec.layers):
        for role, weight in source.layer_weights(index).items():
            if isinstance(weight, QTensor):
                quantized[layer.module_name(index, role)] = weight
    with tempfile.TemporaryDirectory() as folder:
        to_dense(path, Path(folder) / "dense")
        return load_float32(Path(folder) / "dense"), quantized


def round_inputs(model: Any, quantized: dict[str, QTensor]) -> None:
    """Let each of these linears round its input as an engine with float4 products does."""
    for module, weight in quantized.items():
        codes, spacing = stepped(weight.scheme.codes), weight.scheme.scales.spacing(weight.input_factor)
        largest = torch.tensor(spacing.largest * spacing.factor * codes.largest)  # that a group of inputs may have

        def hook(_: Any, given: tuple[Tensor], scheme: QuantScheme = weight.scheme, top: Tensor = largest) -> Tensor:
            return dequantize(quantize(given[0].flatten(0, -2), scheme, largest=top)).view(given[0].shape)

        model.get_submodule(module).register_forward_pre_hook(hook)


@torch.inference_mode()
def divergence(model: Any, reference: Any, windows: list[list[int]]) -> tuple[float, float]:
    """(mean, standard error) of the KL divergence of the model's predictions from the reference's, in nats a token."""
    parts = []
    for window in windows:
        ids = torch.tensor([window])
        p, q = (each(ids).logits[0, :-1].log_softmax(-1) for each in (reference, model))
        parts.append((p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0))
    kl = torch.cat(parts)
    return float(kl.mean()), float(kl.std() / len(kl) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("original", help="the dense checkpoint, or demo")
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, help="the text to evaluate on; default the demo model's held-out text")
    parser.add_argument("--eval-tokens", type=int, default=8192, help="of that text")
    arguments = parser.parse_args()
    original = resolve_model_path(arguments.original)
    ids = encode_text(original, arguments.text)
    windows = cut_windows(ids, SEQ_LEN, arguments.eval_tokens, window_prefix(original))
    reference, _ = load(original)
    for path in arguments.checkpoints:
        model, quantized = load(path)
        weights = "{:.5f} ({:.5f})".format(*divergence(model, reference, windows))
        round_inputs(model, quantized)
        both = "{:.5f} ({:.5f})".format(*divergence(model, reference, windows))
        print(f"{path.name}: KL of the weights {weights}, with rounded inputs {both}", flush=True)


if __name__ == "__main__":
    main()
