"""Our checkpoints give our logits in transformers; each test needs the library that transformers decodes with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from lmkit.formats.base import WeightFormat, get_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.qtensor import int_scheme, quantize
from tests.interop.logits import exact_logits
from tests.models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
IDS = list(range(3, 43))


def quantized(folder: Path, weight_format: WeightFormat, *, symmetric: bool) -> Path:
    """A tiny Llama with its layers' linears rounded to 4 bits in groups of 32."""
    tiny.make(folder / "source", "llama", **SIZES)
    scheme = int_scheme(4, 32, symmetric)
    out = folder / "out"
    out.mkdir()
    writer, linears = CheckpointWriter(out), {}
    with CheckpointReader(folder / "source") as reader:
        for name in reader.names():
            module = name.removesuffix(".weight")
            if module.endswith("_proj"):
                weight_format.write_linear(writer, module, quantize(reader.tensor(name), scheme))
                linears[module] = scheme
            else:
                writer.add(name, reader.tensor(name))
        config = reader.config | {"quantization_config": weight_format.config_entry(linears)}
        writer.finish(config, reader.path)
    return out


def assert_same_logits(path: Path, tolerance: float, **options: object) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0].float()
    torch.testing.assert_close(theirs, exact_logits(path, IDS), rtol=0, atol=tolerance)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(tmp_path: Path, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    path = quantized(tmp_path, get_format("compressed-tensors"), symmetric=symmetric)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    assert_same_logits(path, 5e-2, quantization_config=config)  # decodes to float16; logits have a deviation of 1.7


def test_awq(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    path = quantized(tmp_path, get_format("awq"), symmetric=False)
    assert_same_logits(path, 5e-2, device_map="cpu")  # its kernel computes in float16 or bfloat16


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, name: str) -> None:
    pytest.importorskip("gptqmodel")
    path = quantized(tmp_path, get_format(name), symmetric=name == "gptq")
    assert_same_logits(path, 5e-2, device_map="cpu")
