"""What `--deterministic` refuses on a GPU: models with a sum whose order the switch `invariant` does not pin
(lmkit.kernels.cuda.switches), and calls that a kernel hands to torch.
"""

from __future__ import annotations

from collections import Counter

import torch

from lmkit.errors import ConfigError
from lmkit.kernels import ops
from lmkit.kernels.cuda.append import MAX_HEAD_DIM
from lmkit.kernels.cuda.library import CodedWeight
from lmkit.kernels.registry import Op
from lmkit.layers.batch import KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.runners.cuda_captured import obstacle

Fallbacks = Counter[tuple[str, str]]  # by the op's name and the reason


def refuse(decoder: Decoder, kv: list[KVLayer]) -> None:
    """Raise ConfigError for a model whose results depend on the batch."""
    if (reason := _problem(decoder, kv)) is not None:
        raise _refusal(reason)


def fallbacks() -> Fallbacks:
    """The calls that were handed to torch so far."""
    found = (each for each in vars(ops).values() if isinstance(each, Op))
    return Counter({(op.name, reason): count for op in found for reason, count in op.fallbacks.items()})


def refuse_fallbacks(before: Fallbacks) -> None:
    """Raise ConfigError if calls were handed to torch since `before`."""
    for (name, reason), _ in (fallbacks() - before).items():
        raise _refusal(f"{name} runs through torch ({reason})")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"deterministic does not hold here: {reason}; leave it out, or use --device cpu")


def _problem(decoder: Decoder, kv: list[KVLayer]) -> str | None:
    layers = decoder.layers
    if any(layer.spec.kv is not None and layer.spec.kv.shared for layer in layers):
        return "attention is latent, which a GPU computes in another order for each batch"
    if any(layer.spec.head_dim > MAX_HEAD_DIM for layer in layers):
        return f"heads have more than {MAX_HEAD_DIM} elements, whose attention is split by the batch on a GPU"
    linears = (*(linear for layer in layers for linear in layer.linears), decoder.lm_head)
    weights = [packed.weight for linear in linears for packed in linear.packed or ()]
    if any(isinstance(weight, CodedWeight) and weight.codes.dtype == torch.float8_e4m3fn for weight in weights):
        return "inputs are rounded to float8, which --activations exact avoids"
    return obstacle(decoder, kv)
