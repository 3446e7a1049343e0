"""Sampling on the GPU: launches of csrc/sampling.cu and csrc/edit_logits.cu, and ops.draw.

The state of a sequence lies in its slot of a table on the device: records of SLOT, int64 [slots, WORDS].
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.elementwise import accepts
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.registry import implements

# struct Slot of csrc/slot.cuh; held, bias_ids, bias, seen and mask are addresses on the device.
SLOT = np.dtype(
    [("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("seed", "u8"), ("num_outputs", "i8"),
     ("min_tokens", "i8"), ("held", "u8"), ("num_held", "i8"), ("bias_ids", "u8"), ("bias", "u8"),
     ("num_bias", "i8"), ("seen", "u8"), ("presence", "f8"), ("repetition", "f4"), ("frequency", "f4"),
     ("num_top", "i8"), ("mask", "u8")]
)  # fmt: skip
WORDS = SLOT.itemsize // 8

_THREADS = 512
_SHARED = 2 * 4 * 2048 + 8 * _THREADS + 8 * (_THREADS // 32) + 16
_EDIT_THREADS, _EDIT_CHUNK = 256, 2048
_MAX_PARTS, _PART_TOKENS = 16, 4096  # of a row
_PROGRESS_WORDS = 5152  # struct Progress of csrc/sampling.cu

_PEAKS, _SAMPLE, _ARGMAX, _SCORE = (Kernel("sampling.cu", name) for name in ("peaks", "sample", "argmax", "score"))
_EDIT = Kernel("edit_logits.cu", "edit_logits")


def compile_kernels(device: str) -> None:
    """Compile the kernels and allocate their counters now, not in a step that is captured."""
    for kernel in (_PEAKS, _SAMPLE, _ARGMAX, _SCORE, _EDIT):
        kernel.compile(device)
    module.counters(device)


def argmax(logits: Tensor, table: Tensor, slots: Tensor, last_token: Tensor | None, tokens: Tensor) -> None:
    """tokens int64 [R] = the greatest of each row of logits float32 [R, V]. Of equal logits the lowest id is taken. The
    token is -2 if the greatest logit is not finite. Each row's slot (int32 [R]) counts the token, and last_token (int64
    [slots]) stores it; without `last_token` neither happens. A row with a negative slot pads the batch and gets no
    token, nor does a row with a temperature. Can be captured in a graph.
    """
    num_rows, vocab = logits.shape
    parts = _parts(logits, num_rows)
    partial = torch.empty(num_rows * parts, dtype=torch.int64, device=logits.device)
    counters = module.counters(logits.device.type)
    args = [logits, np.int64(logits.stride(0)), vocab, table, slots, partial, counters, last_token, tokens]
    _ARGMAX((parts, num_rows), _THREADS, args, shared=_SHARED)


def _parts(logits: Tensor, num_rows: int) -> int:
    """How many blocks a row has."""
    wanted = 2 * module.backend(logits.device.type).num_sms() // max(num_rows, 1)
    return max(1, min(wanted, _MAX_PARTS, logits.shape[1] // _PART_TOKENS))


def sample(
    logits: Tensor, table: Tensor, slots: Tensor, last_token: Tensor, tokens: Tensor, *, drawn_only: bool = False
) -> None:
    """As argmax, and for rows with a temperature, too; `drawn_only`: for no others. Can be captured in a graph."""
    _sample(logits, None, table, slots, None, last_token, tokens, drawn_only=drawn_only)


def _sample(
    logits: Tensor, rows: Tensor | None, table: Tensor, slots: Tensor | None, share: Tensor | None,
    last_token: Tensor | None, tokens: Tensor, *, drawn_only: bool = False,
) -> None:  # fmt: skip
    """The kernels' arguments: tokens of `rows` of logits, by their slots or, without these, by the table's rows."""
    num_rows, device = len(tokens), logits.device
    progress = torch.empty(num_rows, _PROGRESS_WORDS, dtype=torch.int64, device=device)
    grid = _parts(logits, num_rows), num_rows
    args = [logits, np.int64(logits.stride(0)), logits.shape[1], rows, table, slots, drawn_only, progress]
    _PEAKS(grid, _THREADS, args, shared=_SHARED)
    _SAMPLE(grid, _THREADS, [*args, module.counters(device.type), share, last_token, tokens], shared=_SHARED)


def edit_logits(logits: Tensor, rows: Tensor, slots: Tensor, table: Tensor) -> None:
    """Edit `rows` (int32) of logits float32 [R, V] in place, each as its sequence's slot requests."""
    args = [logits, np.int64(logits.stride(0)), logits.shape[1], rows, slots, table]
    _EDIT((-(-logits.shape[1] // _EDIT_CHUNK), len(rows)), _EDIT_THREADS, args, shared=4 * _EDIT_CHUNK)


def score(
    logits: Tensor, rows: Tensor, slots: Tensor, table: Tensor, tokens: Tensor, max_top: int, *, gathered: bool
) -> Tensor:
    """float64 [n, 2 + 2 max_top] of `rows` int32 [n] and their tokens: the logarithm of the sum of e^logit, the token's
    logit, then id and logit of the most likely tokens in any order. A row's slot has the number of these.

    gathered: logits has just these rows, else all rows. The result of a row that has failed is undefined.
    """
    out = torch.empty(len(rows), 2 + 2 * max_top, dtype=torch.float64, device=logits.device)
    args = [logits, np.int64(logits.stride(0)), logits.shape[1], gathered, rows, table, slots, tokens, max_top, out]
    _SCORE(len(rows), _THREADS, args, shared=_SHARED)
    return out


@implements(ops.draw, "cuda", device="cuda", accepts=partial(accepts, "sampling.cu"), priority=20)
def draw(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, share: Tensor
) -> Tensor:
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1)
    table = torch.zeros(len(rows), WORDS, dtype=torch.int64, device=logits.device)
    for name, values in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        offset = SLOT.fields[name][1] // 8  # type: ignore[index]
        table[:, offset] = values.view(torch.int64)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    _sample(logits, rows.contiguous(), table, None, share.contiguous(), None, tokens)
    return tokens
