"""The error of a whole layer on calibration rows that no statistics saw."""

from __future__ import annotations

from lmkit.models.decoder import DecoderLayer
from lmkit.qtensor import QTensor
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.moments import batches, run, squared
from lmkit.quant.report.layer_report import HeldOutReport


def compare_held_out(
    stream: Stream, layer: DecoderLayer, original: DecoderLayer, rtn: dict[str, QTensor]
) -> HeldOutReport | None:
    """Compare two layers with the original model on the held-out rows: the layer as it will be stored, and the layer
    with plain rounding of its original weights. None if there are no such rows."""
    plain = layer.with_weights({**original.weights, **rtn})
    error = plain_error = signal = 0.0
    num_tokens = 0
    for hidden, exact, held in batches(stream):
        if held:
            start = hidden if exact is None else exact
            target = run(original, stream, start)
            num_tokens += len(hidden)
            signal += squared(target - start)
            error += squared(run(layer, stream, hidden) - target)
            plain_error += squared(run(plain, stream, hidden) - target)
    if num_tokens == 0 or signal == 0:
        return None
    reason = "with plain rounding the whole layer errs less on held-out rows" if error > plain_error else None
    return HeldOutReport(num_tokens, error / signal, plain_error / signal, reason)
