"""transformers, with the compressed-tensors library, loads our checkpoints and computes the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.names import Activations
from lmkit.formats.nvfp4 import NVFP4
from lmkit.qtensor import QuantScheme, int_scheme
from tests.models import tiny
from tests.models.test_formats import CHANNEL, EIGHT, SHAPE, rewritten

pytest.importorskip("compressed_tensors")
TOKENS = torch.tensor([[5, 7, 11, 2, 9, 30]])


def logits(path: Path, **options: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    torch.nn.Module.float(model)  # it decodes float4 to bfloat16
    with torch.inference_mode():
        result: torch.Tensor = model(TOKENS).logits
    return result


@pytest.mark.parametrize(
    ("schemes", "activations", "tolerance"),
    [
        ({"_proj": int_scheme(4, 32)}, "none", 2e-3),  # the library's product with float16 scales is float16
        ({"_proj": int_scheme(4, 32, True)}, "none", 1e-5),
        ({"_proj": int_scheme(8, -1, True)}, "none", 1e-5),
        ({"_proj": CHANNEL}, "none", 1e-5),
        ({"_proj": EIGHT}, "int8", 0.1),  # it rounds activations
        ({"_proj": NVFP4}, "none", 2e-2),  # it multiplies scales in bfloat16
        ({"_proj": MXFP4}, "none", 1e-5),
        ({"_proj": MXFP4}, "float4", 0.5),
        ({"q_proj": int_scheme(4, 32, True), "v_proj": CHANNEL, "up_proj": EIGHT}, "none", 1e-5),
    ],
)
def test_the_same_logits(
    tmp_path: Path, schemes: dict[str, QuantScheme], activations: Activations, tolerance: float
) -> None:
    tiny.make(tmp_path / "plain", "llama-tied-bias", **SHAPE, tie_word_embeddings=False)
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, "compressed-tensors", schemes, activations)
    options = {}
    # kept compressed, it expects zeros that are not packed, and float4 with float32 inputs fails
    if any(not scheme.symmetric or scheme in (NVFP4, MXFP4) for scheme in schemes.values()):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    expected, got = logits(dense), logits(quantized, **options)
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
