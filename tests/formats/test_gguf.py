"""GGUF: block types against naive decoders, whole models against what they were made from, damaged files."""

from __future__ import annotations

import hashlib
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
from lmkit.formats.gguf_blocks import values
from lmkit.formats.gguf_file import STORAGES, GgufFile
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.layers.rope import frequencies
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models import load_spec
from lmkit.models.families.llama import rope_spec
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from tests.formats import gguf_writer
from tests.formats.gguf_writer import TYPES, Encoded, decode, floats, q4_0, q8_0, write, write_model
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


# A type -> the places of float16 numbers in a block, and the start of the SHA-256 of what version 0.19 of the package
# gguf, llama.cpp's own, decodes from `random_blocks` as float32.
DECODED = {
    "Q4_0": ((0,), "79106ef275fcb12b147712ed"), "Q4_1": ((0, 2), "afe46851d404dbf20271b2a7"),
    "Q5_0": ((0,), "acbc71c1007fc7f24f2ca754"), "Q5_1": ((0, 2), "9c26a72a4078a164da6502c3"),
    "Q8_0": ((0,), "f4cafdc69da2b1be242d894c"), "Q2_K": ((80, 82), "5d73b37b74201780a074df12"),
    "Q3_K": ((108,), "01696626c5a10b9b59f2c2cb"), "Q4_K": ((0, 2), "908c0a23b8837e70dda48b73"),
    "Q5_K": ((0, 2), "ea4807e7249b1c502f06d936"), "Q6_K": ((208,), "02013eb8bcc1f532c12d6e92"),
    "IQ4_NL": ((0,), "7cebbc7cb013fb926364c406"), "IQ4_XS": ((0,), "03bbc1b3f9d5a4a685e1ff2e"),
}  # fmt: skip


def random_blocks(kind: str) -> Encoded:
    """40 blocks with random bytes, and random scales that are no larger than those of models."""
    storage = next(storage for storage in STORAGES.values() if storage.name == kind)
    generator = torch.Generator().manual_seed(5)
    raw = torch.randint(0, 256, (40, storage.nbytes), generator=generator, dtype=torch.uint8)
    for at in DECODED[kind][0]:
        raw[:, at : at + 2] = (torch.randn(40, 1, generator=generator) * 0.02).half().view(torch.uint8)
    return kind, (10, 4 * storage.block), raw.numpy().tobytes()


@pytest.mark.parametrize("kind", DECODED)
def test_every_type_has_the_bits_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    """And a linear that is kept quantized has the same values."""
    _, shape, data = encoded = random_blocks(kind)
    weights = values(kind, torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data) // 40)
    assert hashlib.sha256((weights + 0).numpy().tobytes()).hexdigest().startswith(DECODED[kind][1])
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": encoded})
    reader = GgufReader(tmp_path / "m.gguf")
    assert torch.equal(reader.tensor("model.layers.0.mlp.up_proj.weight"), weights.half().view(shape))
    if kind in ("Q5_0", "IQ4_NL", "IQ4_XS"):
        q = reader.read_linear("model.layers.0.mlp.up_proj")
        assert isinstance(q, QTensor)
        assert q.scheme == QuantScheme(8, 32, symmetric=True)
        assert bool((q.scales >= 0).all())
        assert torch.equal(dequantize(q), weights.view(shape))


@pytest.mark.parametrize(("kind", "form"), [("Q4_K", "dense"), ("IQ4_XS", "compressed-tensors"), ("IQ4_NL", "gptq")])
def test_a_model_of_k_quants_is_served(tmp_path: Path, kind: str, form: str) -> None:
    """It gives the logits of a dense model of the same weights."""

    def encode(tensor: Tensor) -> Encoded:
        _, _, data = random_blocks(kind)
        rows, columns = tensor.shape
        size = len(data) * rows * columns // (40 * STORAGES[TYPES[kind]].block)
        return kind, (rows, columns), (data * (size // len(data) + 1))[:size]

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 4}
    path = made(tmp_path, "llama", encode, **sizes)
    convert_gguf(path, tmp_path / "out", form)
    reader = GgufReader(path)
    served = ModelSource(tmp_path / "out").layer(0, torch.float32).weights
    for role, module in (("attn.q", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
        got, stored = served[role], reader.read_linear(f"model.layers.0.{module}")
        wanted = dequantize(stored) if isinstance(stored, QTensor) else stored.float()
        assert isinstance(got, QTensor) == (form != "dense")
        assert torch.equal(dequantize(got) if isinstance(got, QTensor) else got, wanted)
    assert load_model(tmp_path / "out").spec.num_layers == 1


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_of_llama_3_is_found(tmp_path: Path, factor: float) -> None:
    """rope_freqs holds only quotients of frequencies."""
    found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
    plain = RopeSpec(theta=5e5, rotary_dim=16)
    scaled = rope_spec({"rope_parameters": found}, 16)
    quotients = frequencies(plain)[0] / frequencies(scaled)[0]
    data = LLAMA | {"llama.rope.freq_base": 5e5}
    write(tmp_path / "m.gguf", data, EMBED | {"rope_freqs.weight": floats(quotients)})
    reader = GgufReader(tmp_path / "m.gguf")
    assert rope_spec(reader.config, 16) == scaled
    assert reader.names() == ["model.embed_tokens.weight"]


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
        (LLAMA, EMBED | {"rope_freqs.weight": floats(torch.ones(4))}, "not that of Llama 3.1"),
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
    monkeypatch.setitem(gguf_writer.TYPES, "IQ2_S", 22)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": ("IQ2_S", (1, 256), bytes(82))})
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.ffn_up\.weight' has GGML type 22; lmkit reads F32, F16"):
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


def test_arrays_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    arrays = {"s": ["a", "", "ü\n"], "i": [-1, 1 << 30], "f": [0.5, -2.0], "b": [True, False]}
    path = tmp_path / "m.gguf"
    write(path, LLAMA | arrays, EMBED)
    file = GgufFile(path)
    assert {key: file.array(key) for key in arrays} == arrays
    assert file.array("none") == []
    assert not arrays.keys() & file.metadata.keys()
    with pytest.raises(CheckpointError, match=r"key 'general\.architecture' is str, expected an array"):
        file.array("general.architecture")
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))
    with pytest.raises(CheckpointError, match="not UTF-8"):
        GgufFile(path).array("s")


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
