"""Weight formats: the meaning of a checkpoint's tensors. Each format is one object without state, found by a table.

The tensors say what they are: which modules are quantized, and by codes of which width, in groups of which size. Of
`quantization_config` a format reads what tensors cannot say, and refuses what would change the model's values. All
other fields say how the file was made, or how another engine should run it, and have no effect.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.formats.awq import AwqFormat
from lmkit.formats.awq_gemv import AwqGemvFormat
from lmkit.formats.bitsandbytes import BitsAndBytesFormat
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.compressed_tensors import CompressedTensorsFormat
from lmkit.formats.dense import DenseFormat
from lmkit.formats.fp8 import Fp8Format
from lmkit.formats.gguf import GgufFormat
from lmkit.formats.gptq import GptqFormat
from lmkit.formats.mxfp4 import Mxfp4Format
from lmkit.formats.names import Activations
from lmkit.formats.nvfp4 import ModelOptFormat
from lmkit.qtensor import Linears, QTensor, QuantScheme


class WeightFormat(Protocol):
    """Translates linears between a checkpoint and memory. `module` is a name such as model.layers.0.mlp.up_proj."""

    @property
    def name(self) -> str: ...

    def accepts(self, config: dict[str, Any]) -> str | None:
        """None if this format reads a checkpoint with this config.json, whose `quant_method` and layout are its own;
        else the reason why it does not."""

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


DENSE: WeightFormat = DenseFormat()


class Method(NamedTuple):
    """A `quant_method`: the fields that name a layout of its tensors, and the format of each layout. The first layout
    is that of a file that names none."""

    fields: tuple[str, ...]
    layouts: dict[str, WeightFormat]


AWQ_FAST = AwqGemvFormat("awq_gemv_fast")
METHODS: dict[str, Method] = {
    "awq": Method(
        ("version", "format", "checkpoint_format"),
        {"gemm": AwqFormat(), "gemv": AwqGemvFormat("awq_gemv"), "gemv_fast": AWQ_FAST, "llm-awq": AWQ_FAST},
    ),
    "gptq": Method(("checkpoint_format", "format"), {"gptq": GptqFormat("gptq"), "gptq_v2": GptqFormat("gptq_v2")}),
    "compressed-tensors": Method((), {"": CompressedTensorsFormat()}),
    "fp8": Method((), {"": Fp8Format()}),
    "mxfp4": Method((), {"": Mxfp4Format()}),
    "modelopt": Method((), {"": ModelOptFormat()}),
    "bitsandbytes": Method((), {"": BitsAndBytesFormat()}),
    "gguf": Method((), {"": GgufFormat()}),
}
FORMATS: tuple[WeightFormat, ...] = tuple(
    dict.fromkeys([DENSE, *(found for method in METHODS.values() for found in method.layouts.values())])
)


def resolve_format(config: dict[str, Any]) -> WeightFormat:
    """The format of a checkpoint with this config.json. Raises UnsupportedError with the reason why the format that
    `quantization_config` names does not read it."""
    if (entry := config.get("quantization_config")) is None:
        return _accepted(DENSE, config)
    if not isinstance(entry, dict):
        raise UnsupportedError("config.json: quantization_config is not an object")
    name = entry.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise UnsupportedError(f"config.json: quant_method is {name!r}; lmkit reads {', '.join(METHODS)}")
    method = METHODS[name]
    named = {field: str(entry[field]).lower() for field in method.fields if entry.get(field) is not None}
    layout = next(iter(named.values()), next(iter(method.layouts)))
    for field, value in named.items():
        if value not in method.layouts or value != layout:
            known = layout if layout in method.layouts else " or ".join(method.layouts)
            raise UnsupportedError(f"config.json: {name}: {field} is {value!r}, expected {known}")
    return _accepted(method.layouts[layout], config)


def _accepted(weight_format: WeightFormat, config: dict[str, Any]) -> WeightFormat:
    if reason := weight_format.accepts(config):
        raise UnsupportedError(f"config.json: {weight_format.name}: {reason}")
    return weight_format


def get_format(name: str) -> WeightFormat:
    """The format of this name, for writing. Raises UnsupportedError."""
    for weight_format in FORMATS:
        if weight_format.name == name:
            return weight_format
    known = ", ".join(weight_format.name for weight_format in FORMATS)
    raise UnsupportedError(f"weight format {name!r} is not one of {known}")
