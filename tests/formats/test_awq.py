"""AWQ there and back, against an independent reader, and every way in which its tensors and fields can disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats import awq
from lmkit.formats.base import FORMATS, get_format, resolve_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.qtensor import QTensor, QuantScheme, dequantize, int_scheme, quantize
from tests.formats.files import folder
from tests.formats.naive_awq import dequantized

AWQ, DENSE = get_format("awq"), get_format("dense")
ENTRY: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
MODULE = "model.layers.0.mlp.up_proj"


def config(**changes: Any) -> dict[str, Any]:
    entry = ENTRY | changes
    return {"quantization_config": {name: value for name, value in entry.items() if value != "absent"}}


def tensors(in_features: int = 32, out_features: int = 8, group: int = 16) -> dict[str, torch.Tensor]:
    rows = in_features // group
    return {
        f"{MODULE}.qweight": torch.randint(-(2**31), 2**31, (in_features, out_features // 8), dtype=torch.int32),
        f"{MODULE}.qzeros": torch.randint(-(2**31), 2**31, (rows, out_features // 8), dtype=torch.int32),
        f"{MODULE}.scales": torch.rand(rows, out_features).half(),
    }


def written(path: Path, weight: QTensor | torch.Tensor, entry: dict[str, Any] | None) -> Path:
    """A checkpoint with the one linear."""
    source = folder(path.with_name("source"), {"x": torch.ones(1)})
    path.mkdir(exist_ok=True)
    writer = CheckpointWriter(path)
    AWQ.write_linear(writer, MODULE, weight)
    writer.finish({"quantization_config": entry}, source)
    return path


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([-1, 8, 16]),
    st.booleans(),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_there_and_back(
    tmp_path: Path, outs: int, groups: int, group_size: int, symmetric: bool, seed: int, shifted: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    in_features = groups * max(group_size, 4)
    weight = torch.randn(8 * outs, in_features, generator=generator) + (2.0 if shifted else 0.0)
    q = quantize(weight, int_scheme(4, group_size, symmetric))
    path = written(tmp_path / "m", q, AWQ.config_entry({"m": q.scheme}))
    with CheckpointReader(path) as reader:
        assert resolve_format(reader.config) is AWQ
        read = AWQ.read_linear(reader, MODULE)
    assert isinstance(read, QTensor)
    assert torch.equal(read.codes, q.codes)
    assert torch.equal(read.zeros, q.zeros)
    assert torch.equal(read.scales, q.scales)
    assert (read.codes.dtype, read.zeros.dtype, read.scales.dtype) == (torch.uint8, torch.uint8, torch.float16)
    assert read.codes.is_contiguous()
    assert read.scheme == int_scheme(4, group_size)
    np.testing.assert_array_equal(dequantize(q).numpy(), dequantized(path / "model.safetensors", MODULE, group_size))


def test_files_of_others(tmp_path: Path) -> None:
    """Random words, not only those that our quantizer makes."""
    path = folder(tmp_path / "m", tensors(64, 24), config())
    with CheckpointReader(path) as reader:
        read = AWQ.read_linear(reader, MODULE)
    assert isinstance(read, QTensor)
    np.testing.assert_array_equal(dequantize(read).numpy(), dequantized(path / "model.safetensors", MODULE, 16))


def test_config_entry() -> None:
    entry = AWQ.config_entry({"c": int_scheme(4, 128), "lm_head": None, "a.b": None})
    assert entry == {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["a.b", "lm_head"],
    }  # fmt: skip
    assert AWQ.accepts({"quantization_config": entry}) is None
    assert (AWQ.config_entry({"c": int_scheme(4, 128, symmetric=True)}) or {})["modules_to_not_convert"] is None
    assert json.loads(json.dumps(entry)) == entry
    assert DENSE.config_entry({"c": int_scheme(4, 128)}) is None


@pytest.mark.parametrize(
    ("shape", "scheme", "reason"),
    [
        ((8, 256), int_scheme(4, 128), None),
        ((16, 100), int_scheme(4, -1), None),
        ((12, 256), int_scheme(4, 128), "12 outputs are not a multiple of 8"),
        ((8, 200), int_scheme(4, 128), "200 inputs are not a multiple of the group size 128"),
        ((8, 256), int_scheme(8, 128), "8 bits, AWQ has 4"),
    ],
)
def test_can_write(tmp_path: Path, shape: tuple[int, int], scheme: QuantScheme, reason: str | None) -> None:
    assert awq.can_write(shape, scheme) == AWQ.can_write(shape, scheme) == reason
    writer = CheckpointWriter(tmp_path)
    q = quantize(torch.ones(shape), scheme)
    if reason is None:
        AWQ.write_linear(writer, MODULE, q)
    else:
        with pytest.raises(UnsupportedError, match=f"{MODULE}.*{reason}"):
            AWQ.write_linear(writer, MODULE, q)


def test_modules_left_dense(tmp_path: Path) -> None:
    weight = torch.randn(6, 5).bfloat16()
    path = written(tmp_path / "m", weight, ENTRY)
    for skipped in (None, [MODULE], ["mlp"]):
        (path / "config.json").write_text(json.dumps(config(modules_to_not_convert=skipped)))
        with CheckpointReader(path) as reader:
            read = resolve_format(reader.config).read_linear(reader, MODULE)
            assert isinstance(read, torch.Tensor)
            assert torch.equal(read, weight)


@pytest.mark.parametrize("skipped", [MODULE, "model.layers.0", "mlp", "up_proj"])
def test_a_skipped_module_must_not_be_quantized(tmp_path: Path, skipped: str) -> None:
    reader = CheckpointReader(folder(tmp_path / "m", tensors(), config(modules_to_not_convert=["lm_head", skipped])))
    with pytest.raises(CheckpointError, match=f"modules_to_not_convert lists '{skipped}'"):
        AWQ.read_linear(reader, MODULE)


@pytest.mark.parametrize("skipped", ["model.layers", "up", "layers.00", "lm_head"])
def test_skipped_modules_are_named_by_whole_components(tmp_path: Path, skipped: str) -> None:
    reader = CheckpointReader(folder(tmp_path / "m", tensors(), config(modules_to_not_convert=[skipped])))
    if skipped == "model.layers":
        with pytest.raises(CheckpointError):
            AWQ.read_linear(reader, MODULE)
    else:
        assert isinstance(AWQ.read_linear(reader, MODULE), QTensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(8, 32)}, "has both qweight and weight"),
        ({"g_idx": torch.ones(32, dtype=torch.int32)}, "has both qweight and g_idx"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"scales": None}, "scales is missing"),
        ({"qweight": None}, "weight is missing"),
        ({"qweight": torch.ones(32, 1, dtype=torch.int64)}, "qweight is I64"),
        ({"qweight": torch.ones(32, dtype=torch.int32)}, r"qweight is I32 \[32\]"),
        ({"qweight": torch.ones(0, 1, dtype=torch.int32)}, r"qweight is I32 \[0, 1\]"),
        ({"qweight": torch.ones(40, 1, dtype=torch.int32)}, "40 inputs are not a multiple of the group size 16"),
        ({"qweight": torch.ones(64, 2, dtype=torch.int32)}, r"qzeros is I32 \[2, 1\].*ask for I32 \[2, 2\]"),
        ({"qzeros": torch.ones(2, 2, dtype=torch.int32)}, r"qzeros is I32 \[2, 2\]"),
        ({"scales": torch.ones(2, 8).double()}, "scales is F64"),
        ({"scales": torch.ones(2, 4)}, r"scales is F32 \[2, 4\].*ask for F16 or BF16 or F32 \[2, 8\]"),
        ({"scales": torch.ones(8, 2).half()}, r"scales is F16 \[8, 2\]"),
        ({"scales": torch.full((2, 8), torch.nan).half()}, "not finite"),
        ({"scales": torch.full((2, 8), torch.inf).half()}, "not finite"),
    ],
)
def test_tensors_that_disagree(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    changed = tensors() | {f"{MODULE}.{name}": tensor for name, tensor in changes.items()}
    path = folder(tmp_path / "m", {name: tensor for name, tensor in changed.items() if tensor is not None}, config())
    with pytest.raises(CheckpointError, match=message):
        AWQ.read_linear(CheckpointReader(path), MODULE)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "GEMM"},
        {"bits": "absent", "w_bit": 4},
        {"group_size": "absent", "q_group_size": 16},
        {"group_size": -1},
        {"zero_point": "absent"},
        {"modules_to_not_convert": "absent"},
        {"modules_to_not_convert": []},
        {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "modules_to_fuse": None},
        {"desc_act": False, "format": "gemm", "sym": True, "damp_percent": 0.1, "lm_head": False},
        {"zero_point": False, "sym": True},
        {"version": "absent", "format": "gemm", "method": "awq", "checkpoint_format": "gemm", "pack_dtype": "int32"},
        {"version": "absent", "bits": "absent", "group_size": "absent"},
        {"dynamic": {"-:.*q_proj": {}}, "meta": {"quantizer": ["gptqmodel:5.6"]}, "invented": {"later": [1]}},
    ],
)
def test_config_accepted(changes: dict[str, Any]) -> None:
    assert resolve_format(config(**changes)) is AWQ


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "marlin"}, "awq: version is 'marlin', expected gemm or gemv"),
        ({"version": "gemm", "format": "gemv"}, "awq: format is 'gemv', expected gemm"),
        ({"bits": 3}, "awq: bits is 3, expected 4"),
        ({"bits": 4.0}, "awq: bits is 4.0"),
        ({"bits": True}, "awq: bits is True"),
        ({"w_bit": 8}, "awq: w_bit is 8"),
        ({"group_size": 0}, "awq: group_size is 0"),
        ({"group_size": "128"}, "awq: group_size is '128'"),
        ({"q_group_size": 64}, "awq: group_size is 16 and q_group_size 64"),
        ({"modules_to_not_convert": "lm_head"}, "awq: modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, "awq: modules_to_not_convert"),
        ({"rotation": "hadamard"}, "awq: rotation is 'hadamard'"),
        (
            {"quant_method": "hqq"},
            r"config\.json: quant_method is 'hqq'; lmkit reads awq, gptq, compressed-tensors, fp8",
        ),
        ({"quant_method": "absent"}, "quant_method is None"),
    ],
)
def test_config_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        resolve_format(config(**changes))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(ENTRY)), st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.none())
    )
)
def test_any_config_has_an_answer(changes: dict[str, Any]) -> None:
    for weight_format in (one for one in FORMATS if one is not DENSE):
        reason = weight_format.accepts(config(**changes))
        assert reason is None or reason


def test_dense(tmp_path: Path) -> None:
    assert resolve_format({}) is DENSE
    assert resolve_format({"quantization_config": None}) is DENSE
    hidden_entries: tuple[dict[str, Any], ...] = (
        {"compression_config": {}},
        {"text_config": {"quantization_config": ENTRY}},
        {"quantization_config": []},
    )
    for hidden in hidden_entries:
        with pytest.raises(UnsupportedError):
            resolve_format(hidden)
    path = folder(
        tmp_path / "m", {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(2), "c.weight": torch.ones(2, 3).int()}
    )
    reader = CheckpointReader(path)
    assert torch.equal(DENSE.read_linear(reader, "a"), torch.ones(2, 3))  # type: ignore[arg-type]
    for module, message in (("b", r"b.weight is F32 \[2\]"), ("c", "c.weight is I32"), ("d", "d.weight is missing")):
        with pytest.raises(CheckpointError, match=message):
            DENSE.read_linear(reader, module)
    assert DENSE.can_write((8, 8), int_scheme(4, 8))
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(UnsupportedError, match=r"a\.b"):
        DENSE.write_linear(writer, "a.b", quantize(torch.ones(8, 8), int_scheme(4, 8)))


def test_formats_by_name() -> None:
    assert {weight_format.name for weight_format in FORMATS} == {
        "dense", "awq", "awq_gemv", "awq_gemv_fast", "gptq", "gptq_v2", "compressed-tensors", "fp8", "mxfp4",
        "bitsandbytes", "modelopt", "gguf",
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="'ggml' is not one of dense, awq"):
        get_format("ggml")
