"""Inserts the tokens that the last step sampled into the next step's token ids: csrc/tokens.cu."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda.elementwise import accepts
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.registry import implements

THREADS = 256
KERNEL = Kernel("tokens.cu", "known_tokens")


@implements(ops.known_tokens, "cuda", device="cuda", accepts=partial(accepts, "tokens.cu"), priority=20)
def known_tokens(token_ids: Tensor, last_token: Tensor) -> None:
    KERNEL(-(-len(token_ids) // THREADS), THREADS, [token_ids, last_token, len(token_ids)])
