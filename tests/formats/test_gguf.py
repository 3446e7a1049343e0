"""GGUF: block types against llama.cpp's own decoder, whole models against what they were made from, split and damaged
files."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.errors import CheckpointError, LMKitError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.gguf import GgufFormat, GgufReader
from lmkit.formats.gguf_blocks import CODED
from lmkit.formats.gguf_file import STORAGES, GgufFile
from lmkit.formats.gguf_model import GgufModel, find_gguf, is_gguf
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.layers.rope import frequencies
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models import load_spec
from lmkit.models.families.llama import rope_spec
from lmkit.models.gguf_convert import convert_gguf
from lmkit.models.gguf_names import pieces
from lmkit.models.loader import load_model
from lmkit.models.resolved import SPLIT, resolved
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize, int_scheme
from tests.formats import gguf_writer
from tests.formats.gguf_writer import TYPES, Encoded, decode, floats, q4_0, q8_0, write, write_model
from tests.models import tiny

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


def opened(path: Path) -> GgufReader:
    """A reader of a file, which need not have a whole model."""
    reader = GgufReader(path)
    reader.show_pieces(pieces(reader, load_spec(reader.config)))
    return reader


def linear(path: Path, module: str) -> Tensor | QTensor:
    return GgufFormat().read_linear(opened(path), module)


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
    """Served as they are, and as floats where they are to be."""
    path = made(tmp_path, "llama", encode)
    coded, plain = ModelSource(path), ModelSource(path, floats=True)
    with CheckpointReader(tmp_path / "source") as source:
        for role, q in coded.layer_weights(1).items():
            if role not in coded.spec.layers[1].linears:
                continue
            module = coded.spec.module_name(1, role)
            exact = decode(encode(gguf_writer.paired(module, source.tensor(module + ".weight"), 4, 2)))
            exact = gguf_writer.halves(module, exact, 4, 2)
            assert isinstance(q, QTensor)
            assert q.scheme.bits == bits
            assert bool((q.scales >= 0).all())
            assert torch.equal(dequantize(q), exact), module
            assert torch.equal(plain.layer_weights(1)[role], exact.half())


def test_q4_0_known_block(tmp_path: Path) -> None:
    """Low nibbles are the first half; a negative scale turns the codes around."""
    data = struct.pack("<e", -0.5) + bytes(range(16)) + struct.pack("<e", 0.25) + bytes([0xF0] * 16)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": ("Q4_0", (2, 32), data)})
    q = linear(tmp_path / "m.gguf", "model.layers.0.mlp.up_proj")
    assert isinstance(q, QTensor)
    assert q.zeros.tolist() == [[7], [8]]
    assert q.scales.tolist() == [[0.5], [0.25]]
    weight = dequantize(q)
    assert weight[0].tolist() == [(8 - i) / 2 for i in range(16)] + [4.0] * 16
    assert weight[1].tolist() == [-2.0] * 16 + [1.75] * 16


# A type -> the places of float16 numbers in a block.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip


def random_blocks(kind: str) -> Encoded:
    """40 blocks with random bytes, and random scales that are no larger than those of models."""
    storage = next(storage for storage in STORAGES.values() if storage.name == kind)
    generator = torch.Generator().manual_seed(5)
    raw = torch.randint(0, 256, (40, storage.nbytes), generator=generator, dtype=torch.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = (torch.randn(40, 1, generator=generator) * 0.02).half().view(torch.uint8)
    if kind == "Q8_0":
        raw[:, 1] &= 0x7F  # llama.cpp writes no negative scale here, for -128 has no opposite
    if kind == "IQ1_M":  # a positive d of 0.01 or so, in the highest bits of four words
        raw[:, 49:56:2] &= 15
        raw[:, 49:56:2] |= torch.tensor([16 * digit for digit in (0, 2, 1, 2)], dtype=torch.uint8)
    if kind == "MXFP4":
        raw[:, 0] = raw[:, 0] % 8 + 120
    return kind, (10, 4 * storage.block), raw.numpy().tobytes()


@pytest.mark.parametrize("kind", HALVES)
def test_every_type_has_the_bits_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    """The package gguf is the oracle. A linear that is kept quantized has the same values."""
    _, shape, data = encoded = random_blocks(kind)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(len(data) // STORAGES[TYPES[kind]].nbytes, -1)
    exact = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).copy()).view(shape)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": encoded})
    reader = opened(tmp_path / "m.gguf")
    weight = linear(tmp_path / "m.gguf", "model.layers.0.mlp.up_proj")
    tensor = reader.tensor("model.layers.0.mlp.up_proj.weight")
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, exact)
    assert torch.equal(dequantize(weight) if isinstance(weight, QTensor) else weight, exact)
    assert isinstance(weight, QTensor) == (kind not in ("TQ1_0", "TQ2_0"))
    if isinstance(weight, QTensor):
        assert reader.info("model.layers.0.mlp.up_proj.weight").nbytes == len(data)


@pytest.mark.parametrize("kind", ["Q5_0", "IQ4_NL", "IQ4_XS"])
def test_types_that_other_formats_hold_with_more_bits_move_without_loss(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": random_blocks(kind)})
    own, moved, module = opened(tmp_path / "m.gguf"), opened(tmp_path / "m.gguf"), "model.layers.0.mlp.up_proj"
    moved.move()
    kept, wide = (GgufFormat().read_linear(reader, module) for reader in (own, moved))
    assert isinstance(kept, QTensor)
    assert isinstance(wide, QTensor)
    assert wide.scheme == int_scheme(8, 32, symmetric=True)
    assert torch.equal(dequantize(kept), dequantize(wide))


def test_all_types_have_a_decoder() -> None:
    assert {storage.name for storage in STORAGES.values()} == {*CODED, "F32", "F16", "BF16"}
    assert HALVES.keys() == CODED.keys()


@pytest.mark.parametrize(
    ("kind", "form"), [("Q4_K", "dense"), ("IQ4_XS", "compressed-tensors"), ("IQ4_NL", "gptq"), ("IQ3_XXS", "dense")]
)
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
    served = ModelSource(tmp_path / "out").layer(0, torch.float32).weights
    for role, module in (("attn.q", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
        got, stored = served[role], linear(path, f"model.layers.0.{module}")
        assert isinstance(stored, QTensor)
        wanted = dequantize(stored) if form != "dense" else dequantize(stored).half().float()
        assert isinstance(got, QTensor) == (form != "dense")
        assert torch.equal(dequantize(got) if isinstance(got, QTensor) else got, wanted)
    assert load_model(tmp_path / "out").spec.num_layers == 1


def test_inputs_of_planes_keep_16_bits_unless_8_are_asked_for(tmp_path: Path) -> None:
    def encode(tensor: Tensor) -> Encoded:
        blocks = random_blocks("Q4_1")[2]
        return "Q4_1", (len(tensor), 64), (blocks * len(tensor))[: len(tensor) * 40]

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    planes, plain = made(tmp_path / "a", "llama", encode, **sizes), made(tmp_path / "b", "llama", q4_0, **sizes)
    for path, asked, found in ((planes, "auto", SPLIT), (planes, "int8", "int8"), (plain, "auto", "int8")):
        with resolved(path, activations=asked) as model:
            assert model.packing.activations == found


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
    assert rope_spec(opened(tmp_path / "m.gguf").config, 16) == scaled


def test_other_divisors_of_rope_are_kept(tmp_path: Path) -> None:
    """As LongRoPE, which divides frequencies by any numbers."""
    divisors = torch.tensor([1.0, 1.5, 2.0, 7.0, 7.5, 8.0, 9.0, 9.5])
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"rope_freqs.weight": floats(divisors)})
    plain = RopeSpec(theta=10000.0, rotary_dim=16)
    found = frequencies(rope_spec(opened(tmp_path / "m.gguf").config, 16))[0]
    torch.testing.assert_close(found, frequencies(plain)[0] / divisors)


def test_four_bit_linears_become_awq(tmp_path: Path) -> None:
    path = made(tmp_path, "qwen3", q4_0)
    convert_gguf(path, tmp_path / "out", "awq")
    coded, source = ModelSource(path), ModelSource(tmp_path / "out")
    for role, q in coded.layer_weights(1).items():
        if isinstance(q, QTensor):
            stored = source.layer_weights(1)[role]
            assert isinstance(stored, QTensor)
            assert torch.equal(dequantize(stored), dequantize(q))


LLAMA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.block_count": 1, "llama.feed_forward_length": 64, "llama.attention.head_count": 2,
}  # fmt: skip
EMBED: dict[str, Encoded] = {"token_embd.weight": floats(torch.zeros(3, 32))}


def test_refusals(tmp_path: Path) -> None:
    path = made(tmp_path, "llama", q8_0)
    with pytest.raises(UnsupportedError, match=r"self_attn\.q_proj: awq cannot store it: 8 bits.*--format, or dense"):
        convert_gguf(path, tmp_path / "out", "awq")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json beside it"):
        convert_gguf(path, tmp_path / "out", "dense")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"0 \.gguf models"):
        GgufReader(tmp_path / "source")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "mamba"}, EMBED, "architecture 'mamba'; lmkit reads llama, mistral3, qwen2"),
        (LLAMA, {}, "token_embd.weight is missing"),
        (LLAMA, EMBED | {"rope_freqs.weight": floats(torch.ones(4))}, "4 divisors of RoPE do not fit 16"),
        (LLAMA, EMBED | {"blk.0.attn_qkv.weight": floats(torch.ones(4, 32))}, "cannot hold attn.q: expected 96 rows"),
        (LLAMA | {"llama.embedding_length": "many"}, EMBED, "embedding_length is 'many', expected a number"),
        (LLAMA | {"llama.rope.scaling.type": "ntk"}, EMBED, "rope.scaling.type 'ntk'"),
        (LLAMA | {"llama.attention.head_count_kv": [1, 2]}, EMBED, "head_count_kv differs between layers"),
        (LLAMA | {"split.count": 3, "split.no": 1}, EMBED, "is part 2 of 3 of a model; name the parts"),
        (LLAMA | {"general.alignment": 48}, EMBED, "alignment is 48"),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, metadata: dict[str, object], tensors: dict[str, Encoded], message: str
) -> None:
    write(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(LMKitError, match=message):
        opened(tmp_path / "m.gguf")


def test_another_type_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf_writer.TYPES, "Q8_K", 15)
    write(tmp_path / "m.gguf", LLAMA, EMBED | {"blk.0.ffn_up.weight": ("Q8_K", (1, 256), bytes(292))})
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.ffn_up\.weight' has GGML type 15; lmkit reads F32, F16"):
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
            opened(damaged)
    messages = []
    for place in range(header):
        for value in (0xFF, 0x80):
            damaged.write_bytes(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
            try:
                opened(damaged).tensor("model.embed_tokens.weight")
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
    """Without --format it writes the one that holds what the file has."""
    path = made(tmp_path / "folder", "llama", q4_0)
    shutil.rmtree(tmp_path / "folder" / "source")
    for number, model in enumerate((path, path.parent)):
        out = tmp_path / str(number)
        result = CliRunner().invoke(app, ["convert", str(model), "-o", str(out)])
        assert result.exit_code == 0, result.output
        assert "14 linears as compressed-tensors" in result.output
        assert ModelSource(out).format.name == "compressed-tensors"
    assert not is_gguf(tmp_path / "0")
    assert not is_gguf(tmp_path / "absent.gguf")
    result = CliRunner().invoke(app, ["convert", str(made(tmp_path / "dense", "qwen2")), "-o", str(tmp_path / "2")])
    assert "14 linears are dense" in result.output
    assert ModelSource(tmp_path / "2").format.name == "dense"


def split(path: Path, folder: Path, counts: dict[str, int] | None = None) -> list[Path]:
    """The model of a file in three files: layer 1 in the second, the head in the third."""
    file = GgufFile(path)
    folder.mkdir()
    parts: list[dict[str, Encoded]] = [{}, {}, {}]
    for name, info in file.tensors.items():
        number = 1 if name.startswith("blk.1.") else 2 if name == "output.weight" else 0
        parts[number][name] = info.storage.name, info.shape, bytes(file.raw(name))
    paths = []
    for number, tensors in enumerate(parts):
        own = {"split.no": number, "split.count": 3, "split.tensors.count": len(file.tensors)} | (counts or {})
        paths.append(folder / f"model-{number + 1:05d}-of-00003.gguf")
        write(paths[-1], (file.metadata if number == 0 else {}) | own, tensors)
    return paths


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    """By the path of any part, or of the folder."""
    whole = made(tmp_path / "whole", "llama", q4_0)
    paths = split(whole, tmp_path / "parts")
    expected = ModelSource(whole)
    for given in (*paths, tmp_path / "parts"):
        source = ModelSource(given)
        assert source.reader.path == paths[0] == find_gguf(given)
        assert source.spec == expected.spec
        assert source.reader.names() == expected.reader.names()
        for name in source.reader.names():
            assert torch.equal(source.reader.tensor(name), expected.reader.tensor(name))
    digest = GgufModel(paths[0]).content_digest()
    paths[2].write_bytes(paths[2].read_bytes() + bytes(32))
    assert GgufModel(paths[0]).content_digest() != digest


def test_a_part_that_is_missing_or_another_is_named(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", "llama")
    paths = split(whole, tmp_path / "parts")
    paths[1].rename(tmp_path / "away")
    for given in (paths[0], paths[2], tmp_path / "parts"):
        with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: is missing: it is one of the 3 parts"):
            ModelSource(given)
    shutil.copyfile(paths[2], paths[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: says that it is part 2 \(from 0\) of 3"):
        ModelSource(paths[0])
    lying = split(whole, tmp_path / "lying", {"split.tensors.count": 7})
    with pytest.raises(CheckpointError, match="its parts have 21 tensors, not 7"):
        ModelSource(lying[0])
    (tmp_path / "lying" / "other.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 \.gguf models; give one of them: model-00001-of-00003\.gguf, other"):
        ModelSource(tmp_path / "lying")
