"""Weight formats: the meaning of a checkpoint's tensors. Each format is one object without state, found by a table."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.formats.awq import AwqFormat
from lmkit.formats.awq_gemv import AwqGemvFormat
from lmkit.formats.bitsandbytes import BitsAndBytesFormat
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.compressed_tensors import CompressedTensorsFormat
from lmkit.formats.dense import DenseFormat
from lmkit.formats.fp8 import Fp8Format
from lmkit.formats.gptq import GptqFormat
from lmkit.formats.mxfp4 import Mxfp4Format
from lmkit.formats.nvfp4 import ModelOptFormat
from lmkit.formats.parts import Activations
from lmkit.qtensor import Linears, QTensor, QuantScheme


class WeightFormat(Protocol):
    """Translates linears between a checkpoint and memory. `module` is a name such as model.layers.0.mlp.up_proj."""

    @property
    def name(self) -> str: ...

    def accepts(self, config: dict[str, Any]) -> str | None:
        """None if a checkpoint with this config.json is in this format, else the reason why it is not."""

    def activations(self, config: dict[str, Any]) -> Activations:
        """The activations that a checkpoint with this config.json asks for with its 8-bit weights."""

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        """The weight [out, in]; a float tensor if the checkpoint leaves it dense. Raises CheckpointError."""

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        """None if a weight [out, in] quantized by `scheme` can be stored, else the reason why not."""

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        """Add the weight's tensors. `activations` is as in `config_entry`.

        Raises UnsupportedError with `can_write`'s reason for a weight that the format cannot store.
        """

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """config.json's `quantization_config` for these linears; at least one of them is quantized. None = no entry.

        `activations`: the activations with which engines should run the 8-bit weights of that kind. `kv_cache_scheme`
        is passed through. Raises UnsupportedError if the format cannot express the linears or the activations.
        """


FORMATS: tuple[WeightFormat, ...] = (
    DenseFormat(), AwqFormat(), GptqFormat("gptq"), GptqFormat("gptq_v2"), CompressedTensorsFormat(), Fp8Format(),
    AwqGemvFormat("awq_gemv"), AwqGemvFormat("awq_gemv_fast"), Mxfp4Format(), ModelOptFormat(), BitsAndBytesFormat(),
)  # fmt: skip


def resolve_format(config: dict[str, Any]) -> WeightFormat:
    """The format of a checkpoint with this config.json. Raises UnsupportedError with every format's reason."""
    reasons = []
    for weight_format in FORMATS:
        reason = weight_format.accepts(config)
        if reason is None:
            return weight_format
        reasons.append(f"{weight_format.name}: {reason}")
    raise UnsupportedError("config.json: no weight format reads this checkpoint: " + "; ".join(reasons))


def get_format(name: str) -> WeightFormat:
    """The format of this name, for writing. Raises UnsupportedError."""
    for weight_format in FORMATS:
        if weight_format.name == name:
            return weight_format
    known = ", ".join(weight_format.name for weight_format in FORMATS)
    raise UnsupportedError(f"weight format {name!r} is not one of {known}")
