"""GGUF: block types against naive decoders, whole models against what they were made from, damaged files."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.errors import CheckpointError, LMKitError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.gguf import GgufReader, convert_gguf, is_gguf
from lmkit.formats.gguf_file import GgufFile
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models import load_spec
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize
from tests.formats import gguf_writer
from tests.formats.gguf_writer import Encoded, decode, floats, q4_0, q8_0, write, write_model
from tests.models import tiny

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


def made(folder: Path, name: str, encode: Callable[[Tensor], Encoded] = floats, **overrides: object) -> Path:
    """A tiny model of family `name` as `folder`/model.gguf beside a tokenizer, and in `folder`/source as it was."""
    folder.mkdir(exist_ok=True)
    model = tiny.make(folder / "source", name, **(SMALL | overrides))
    write_model(folder / "model.gguf", model, encode)
    shutil.copyfile(DEMO_FOLDER / "tokenizer.json", folder / "tokenizer.json")
    return folder / "model.gguf"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, name)
    convert_gguf(path, tmp_path / "out", "dense")
    with CheckpointReader(tmp_path / "source") as before, CheckpointReader(tmp_path / "out") as after:
        assert after.names() == before.names()
        for tensor in before.names():
            assert torch.equal(before.tensor(tensor), after.tensor(tensor)), tensor
        assert load_spec(after.config) == load_spec(before.config)
    ModelSource(tmp_path / "out")


@pytest.mark.parametrize(("encode", "bits"), [(q4_0, 4), (q8_0, 8)])
def test_quantized_linears_keep_their_values(tmp_path: Path, encode: Callable[[Tensor], Encoded], bits: int) -> None:
    path = made(tmp_path, "llama", encode)
    reader = GgufReader(path)
    with CheckpointReader(tmp_path / "source") as source:
        for module, scheme in reader.linears().items():
            assert scheme is not None
            q = reader.read_linear(module)
            assert isinstance(q, QTensor)
            assert q.scheme == scheme
            assert scheme.bits == bits
            assert bool((q.scales >= 0).all())
            assert torch.equal(dequantize(q), decode(encode(source.tensor(module + ".weight")))), module


def test_q4_0_known_block(tmp_path: Path) -> None:
    """Low nibbles are the first half; a negative scale turns the codes around."""
    data = struct.pack("<e", -0.5) + bytes(range(16)) + struct.pack("<e", 0.25) + bytes([0xF0] * 16)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": ("Q4_0", (2, 32), data)})
    q = GgufReader(tmp_path / "m.gguf").read_linear("model.layers.0.mlp.up_proj")
    assert isinstance(q, QTensor)
    assert q.zeros.tolist() == [[7], [8]]
    assert q.scales.tolist() == [[0.5], [0.25]]
    weight = dequantize(q)
    assert weight[0].tolist() == [(8 - i) / 2 for i in range(16)] + [4.0] * 16
    assert weight[1].tolist() == [-2.0] * 16 + [1.75] * 16


def test_q6_k_is_read_as_floats(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 210), generator=generator, dtype=torch.uint8)
    blocks[:, 208:] = torch.tensor([0.01]).half().view(torch.uint8)
    encoded = ("Q6_K", (3, 512), blocks.numpy().tobytes())
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"output.weight": encoded})
    assert torch.equal(GgufReader(tmp_path / "m.gguf").tensor("lm_head.weight"), decode(encoded).half())


def test_four_bit_linears_become_awq(tmp_path: Path) -> None:
    path = made(tmp_path, "qwen3", q4_0)
    convert_gguf(path, tmp_path / "out", "awq")
    reader, source = GgufReader(path), ModelSource(tmp_path / "out")
    for module in reader.linears():
        stored, q = source.format.read_linear(source.reader, module), reader.read_linear(module)
        assert isinstance(stored, QTensor)
        assert isinstance(q, QTensor)
        assert torch.equal(dequantize(stored), dequantize(q))


LLAMA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.block_count": 1, "llama.feed_forward_length": 64, "llama.attention.head_count": 2,
}  # fmt: skip
EMBED: dict[str, Encoded] = {"token_embd.weight": floats(torch.zeros(3, 32))}


def test_refusals(tmp_path: Path) -> None:
    path = made(tmp_path, "llama", q8_0)
    with pytest.raises(UnsupportedError, match=r"mlp\.down_proj: awq cannot store it: 8 bits.*--format, or dense"):
        convert_gguf(path, tmp_path / "out", "awq")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json beside it"):
        convert_gguf(path, tmp_path / "out", "dense")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"0 \.gguf files"):
        GgufReader(tmp_path / "source")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "mamba"}, EMBED, "architecture 'mamba'; lmkit reads llama, qwen2, qwen3"),
        (LLAMA, {}, "token_embd.weight is missing"),
        (LLAMA, EMBED | {"rope_freqs.weight": floats(torch.ones(4))}, "Llama 3's RoPE scaling"),
        (LLAMA, EMBED | {"blk.0.ssm_a": floats(torch.ones(4))}, "not part of a model"),
        (LLAMA | {"llama.embedding_length": "many"}, EMBED, "embedding_length is 'many', expected a number"),
        (LLAMA | {"llama.rope.scaling.type": "longrope"}, EMBED, "rope.scaling.type 'longrope'"),
        (LLAMA | {"llama.attention.sliding_window": 512}, EMBED, "sliding window"),
        (LLAMA | {"general.alignment": 48}, EMBED, "alignment is 48"),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, metadata: dict[str, object], tensors: dict[str, Encoded], message: str
) -> None:
    write(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(LMKitError, match=message):
        GgufReader(tmp_path / "m.gguf")


def test_another_type_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf_writer.TYPES, "Q4_K", 12)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": ("Q4_K", (1, 256), bytes(144))})
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.ffn_up\.weight' has GGML type 12; lmkit reads F32, F16"):
        GgufFile(tmp_path / "m.gguf")


def test_a_damaged_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte of the header changed: read, or refused, never anything else."""
    write(tmp_path / "m.gguf", LLAMA | {"tokenizer.ggml.tokens": ["a", "b"]}, EMBED)
    whole = (tmp_path / "m.gguf").read_bytes()
    header = len(whole) - 3 * 32 * 4
    damaged = tmp_path / "damaged.gguf"
    for cut in range(0, len(whole), 3):
        damaged.write_bytes(whole[:cut])
        with pytest.raises(LMKitError):
            GgufReader(damaged)
    messages = []
    for place in range(header):
        for value in (0xFF, 0x80):
            damaged.write_bytes(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
            try:
                GgufReader(damaged).tensor("model.embed_tokens.weight")
            except LMKitError as error:
                messages.append(str(error))
    assert len(messages) > header // 2
    assert not any("\n" in message for message in messages)


def test_counts_are_held_against_the_file(tmp_path: Path) -> None:
    """A vocabulary said to have 2**60 strings ends with the file, at once."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for kind in (0, 8, 10):
        (tmp_path / "m.gguf").write_bytes(start + struct.pack("<IIQ", 9, kind, 1 << 60) + bytes(64))
        with pytest.raises(CheckpointError, match="truncated"):
            GgufFile(tmp_path / "m.gguf")


def test_lmkit_convert_takes_a_file_or_its_folder(tmp_path: Path) -> None:
    path = made(tmp_path / "folder", "llama", q4_0)
    shutil.rmtree(tmp_path / "folder" / "source")
    for number, model in enumerate((path, path.parent)):
        out = tmp_path / str(number)
        result = CliRunner().invoke(app, ["convert", str(model), "-o", str(out), "--format", "compressed-tensors"])
        assert result.exit_code == 0, result.output
        assert "14 linears as compressed-tensors" in result.output
        assert ModelSource(out).format.name == "compressed-tensors"
    assert not is_gguf(tmp_path / "0")
    assert not is_gguf(tmp_path / "absent.gguf")
