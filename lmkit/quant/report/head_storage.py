"""How a quantized checkpoint asks for its head to be served: in INT8, where that changes next to nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lmkit.config import StrictStruct
from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.models import roles
from lmkit.models.head import ASKED_HEAD, rounded_head
from lmkit.models.source import ModelSource
from lmkit.qtensor import dequantize

LARGEST_KL = 1e-4
VOCAB_ROWS = 4096  # multiplied at a time


class HeadReport(StrictStruct, frozen=True):
    """The head's storage, and the mean KL in nats per token of an INT8 head from the stored one, both behind the
    quantized layers, on so many held-out tokens. None: it was not measured."""

    storage: Literal["int8", "stored"]
    kl: float | None = None
    num_tokens: int = 0

    @property
    def config(self) -> dict[str, str]:
        """What config.json says of it."""
        return {} if self.storage == "stored" else {ASKED_HEAD: self.storage}


def head_line(head: HeadReport) -> str:
    """`head: int8, KL 1.2e-06 nats a token`"""
    return f"head: {head.storage}" + ("" if head.kl is None else f"; in INT8 its KL is {head.kl:.1e} nats per token")


def choose_head(source: ModelSource, asked: str, hidden: Tensor | None) -> HeadReport:
    """The storage of the head of a quantized `source`. auto: INT8 if its KL is at most LARGEST_KL.

    `hidden` float32 [tokens, hidden] are states after the last layer, or None without a text; then auto keeps the head.
    """
    if source.spec.foreign or not source.has_head or asked == "stored":
        return HeadReport("stored")
    if hidden is None:
        return HeadReport("int8" if asked == "int8" else "stored")
    kl = int8_kl(source, hidden)
    return HeadReport(
        "int8" if asked == "int8" or (asked == "auto" and kl <= LARGEST_KL) else "stored", kl, len(hidden)
    )


def int8_kl(source: ModelSource, hidden: Tensor) -> float:
    """The mean KL of an INT8 head from the stored one. Sums go over the vocabulary part by part: no logits are kept."""
    norm, spec = source.final_norm(), source.spec
    x: Tensor = hidden.cpu()
    if norm is not None:
        x = ops.rms_norm.select("cpu")(x, Norm(norm, spec.norm_eps, bias=source.final_bias()))
    top = torch.full((len(x), 1), -torch.inf)
    sums = torch.zeros(3, len(x), 1, dtype=torch.float64)  # of e^a, of e^b, of e^a (a - b), each over e^top
    for rows in _head(source).split(VOCAB_ROWS):
        a, b = (x @ w.T for w in (rows.float(), dequantize(rounded_head(rows))))
        if spec.final_softcap:
            a, b = (spec.final_softcap * (logits / spec.final_softcap).tanh() for logits in (a, b))
        before, top = top, torch.maximum(top, torch.maximum(a, b).amax(1, keepdim=True))
        p, q = (a - top).double().exp(), (b - top).double().exp()
        found = [part.sum(1, keepdim=True) for part in (p, q, p * (a - b))]
        sums = sums * (before - top).double().exp() + torch.stack(found)
    source.reader.release()
    return float((sums[2] / sums[0] + (sums[1] / sums[0]).log()).mean().clamp_min(0))


def _head(source: ModelSource) -> Tensor:
    weight = source.lm_head().weights[roles.LM_HEAD]
    assert isinstance(weight, Tensor)
    return weight
