"""A model's embedding and head on the reference operations, whose outputs have gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lmkit.kernels import ops
from lmkit.kernels.cuda.module import TORCH
from lmkit.kernels.ops import Norm
from lmkit.models import roles
from lmkit.models.source import ModelSource
from lmkit.quant.report.evaluate import LOGIT_BYTES


class HeadWithGradients:
    """The head of `source` on the torch device `device`. Products are of `dtype`."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: str) -> None:
        head = source.head(None, f"{TORCH}{device}")
        weight, norm = head.lm_head.weights[roles.LM_HEAD], head.final_norm
        assert isinstance(weight, Tensor)
        self.embed_rows, self.dtype = head.embed_rows, dtype
        self._weight, self._softcap = weight.to(dtype), source.spec.final_softcap
        self._norm = None if norm is None else Norm(norm, source.spec.norm_eps, bias=head.final_bias)
        self._rms_norm = ops.rms_norm.select(f"{TORCH}{device}")
        self.tokens_at_once = max(1, LOGIT_BYTES // (4 * source.spec.vocab_size))

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden float32 [tokens, hidden] after the last layer -> float32 [tokens, vocab]"""
        if self._norm is not None:
            hidden = self._rms_norm(hidden, self._norm)
        logits = functional.linear(hidden.to(self.dtype), self._weight).float()
        if self._softcap:
            logits = self._softcap * (logits / self._softcap).tanh()
        return logits.log_softmax(-1)
