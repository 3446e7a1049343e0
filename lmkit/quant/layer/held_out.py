"""The error of a whole layer on calibration rows that no statistics saw."""

from __future__ import annotations

from torch import Tensor

from lmkit.models.decoder_layer import DecoderLayer
from lmkit.qtensor import QTensor
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.moments import held_out_rows, run, squared
from lmkit.quant.report.layer_report import HeldOutReport


def compare_held_out(stream: Stream, original: DecoderLayer, rtn: dict[str, QTensor]) -> HeldOutReport | None:
    """Compare two layers with the original model on the held-out rows: the layer as it will be stored, and the layer
    with plain rounding of its original weights. All rows have passed the stored layer, and the original if the stream
    has its states, but the stream still stands before it. None if there are no such rows."""
    plain = original.with_weights({**original.weights, **rtn})
    first_held = stream.num_rows - held_out_rows(stream.num_rows)
    pieces = [tokens for number in range(len(stream)) for tokens in stream.slices(number, first_held)]
    error = plain_error = signal = 0.0
    num_tokens = 0
    for tokens in pieces:
        if tokens.start >= first_held * stream.seq_len:
            start, stored = _around(stream, tokens)
            exact, target = _around(stream, tokens, exact=True) if stream.has_exact else (start, None)
            target = run(original, stream, exact, tokens) if target is None else target
            num_tokens += len(start)
            signal += squared(target - exact)
            error += squared(stored - target)
            plain_error += squared(run(plain, stream, start, tokens) - target)
    if num_tokens == 0 or signal == 0:
        return None
    reason = "with plain rounding the whole layer errs less on held-out rows" if error > plain_error else None
    return HeldOutReport(num_tokens, error / signal, plain_error / signal, reason)


def _around(stream: Stream, tokens: slice, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """The states of `tokens` before the present layer and after it."""
    before, after = (stream.states(stream.layer + i, exact=exact)[tokens] for i in (0, 1))
    return stream.here(before), stream.here(after)
