"""Random quantized linears with every code and every zero, and checkpoints of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.names import Activations
from lmkit.qtensor import QTensor, QuantScheme, quantize
from tests.formats.files import folder

MODULE = "model.layers.0.mlp.up_proj"


def random_linear(
    scheme: QuantScheme,
    shape: tuple[int, int] = (16, 64),
    *,
    dtype: torch.dtype = torch.float16,
    smallest_zero: int = 0,
) -> QTensor:
    """A random quantized weight. Codes use all bits, also the top bits of words. Values that a symmetric scheme fixes
    have these values."""
    if not scheme.codes.uniform:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80
        scales = torch.rand(scheme.num_row_groups(shape[0]), scheme.num_groups(shape[1])).to(dtype)
        return QTensor(codes.view(torch.float8_e4m3fn), scales, torch.zeros(0, dtype=torch.uint8), scheme)
    groups, top = (shape[0], scheme.num_groups(shape[1])), scheme.max_code + 1
    zeros = torch.randint(smallest_zero, top, groups, dtype=torch.uint8)
    if scheme.symmetric:
        zeros = torch.full(groups, top // 2, dtype=torch.uint8)
    scales = (torch.rand(groups) - 0.3).to(dtype)
    order = random_order(scheme, shape[1])
    return QTensor(torch.randint(0, top, shape, dtype=torch.uint8), scales, zeros, scheme, order)


def random_order(scheme: QuantScheme, in_features: int) -> torch.Tensor | None:
    """An order of the inputs that puts random groups together, if the scheme has one."""
    if not scheme.act_order:
        return None
    return (torch.randperm(in_features) // scheme.group_size).argsort(stable=True).int()


def rounded(weight: torch.Tensor, scheme: QuantScheme) -> QTensor:
    """`quantize`, with random groups if the scheme has activation order."""
    order = random_order(scheme, weight.shape[1])
    if order is None:
        return quantize(weight, scheme)
    return replace(quantize(weight[:, order], replace(scheme, act_order=False)), scheme=scheme, order=order)


def written(
    path: Path,
    format_name: str,
    linears: dict[str, QTensor | torch.Tensor],
    *,
    activations: Activations = "none",
    **entry: Any,
) -> Path:
    """A checkpoint of these modules, with an embedding and a norm beside them. `entry`: changes of its config.json."""
    source = folder(path.with_name(path.name + "-source"), {"x": torch.ones(1)})
    (source / "tokenizer.json").write_text('{"any": "text"}')
    path.mkdir()
    weight_format, writer = get_format(format_name), CheckpointWriter(path)
    writer.add("model.embed_tokens.weight", torch.ones(3, 4))
    writer.add("model.norm.weight", torch.ones(4))
    for module, weight in linears.items():
        weight_format.write_linear(writer, module, weight, activations=activations)
    schemes = {module: weight.scheme if isinstance(weight, QTensor) else None for module, weight in linears.items()}
    config = weight_format.config_entry(schemes, activations=activations) or {}
    writer.finish({"quantization_config": config | entry}, source)
    return path


def read_any(path: Path, format_name: str, module: str = MODULE) -> torch.Tensor | QTensor:
    """A linear of a checkpoint, quantized or dense."""
    with CheckpointReader(path) as reader:
        weight_format = get_format(format_name)
        assert weight_format.accepts(reader.config) is None
        return weight_format.read_linear(reader, module)


def read(path: Path, format_name: str, module: str = MODULE) -> QTensor:
    weight = read_any(path, format_name, module)
    assert isinstance(weight, QTensor)
    return weight


def assert_same(a: QTensor, b: QTensor) -> None:
    """Assert that both have the same bits."""
    assert a.scheme == b.scheme
    for name in ("codes", "scales", "zeros", *(("order",) if a.scheme.act_order else ())):
        one, other = getattr(a, name), getattr(b, name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
