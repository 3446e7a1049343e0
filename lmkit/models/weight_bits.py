"""How many bits a weight takes in a checkpoint: one figure for tables, reports, lists and logs.

It is the mean over the weights of all linears of the layers, in the file: codes, scales and zeros of quantized linears,
and all of dense ones. Embeddings, the head, routers, norms and biases do not count, nor do tensors that say a shape or
an order.
"""

from __future__ import annotations

from pathlib import Path

from lmkit.errors import LMKitError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec

NOT_COUNTED = ("bias", "weight_shape", "g_idx", "weight_g_idx", "weight_format", "input_scale", "input_global_scale",
               "k_scale", "v_scale")  # fmt: skip


def stored_bits(spec: ModelSpec, reader: CheckpointReader) -> dict[str, int]:
    """The bits that each linear of the layers takes, by its module. `reader` shows the names of `spec`."""
    bits = {layer.module_name(index, role): 0 for index, layer in enumerate(spec.layers) for role in layer.linears}
    for name in reader.names():
        module, _, part = name.rpartition(".")
        owner = module if module in bits else module.removesuffix(".weight")  # bitsandbytes: q_proj.weight.absmax
        if owner in bits and part not in NOT_COUNTED:
            bits[owner] += 8 * reader.info(name).nbytes
    return bits


def bits_of_linears(spec: ModelSpec, reader: CheckpointReader) -> float:
    """The mean bits of a weight."""
    return sum(stored_bits(spec, reader).values()) / max(spec.num_weights, 1)


def bits_of_folder(path: str | Path) -> float | None:
    """The mean bits of a weight of a checkpoint; None for one that lmkit cannot open."""
    try:
        source = ModelSource(path)
        bits = bits_of_linears(source.spec, source.reader)
        source.close()
    except LMKitError:
        return None
    return bits
