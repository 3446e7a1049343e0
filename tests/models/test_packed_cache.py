"""Packed weights in a file: a mapped model computes the same bits, and a file that does not fit is never used."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from lmkit.errors import CheckpointError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.jsonfile import read_json
from lmkit.kernels.cpu import isa, jit
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models import identity, packed_cache, roles
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.qtensor import int_scheme, quantize
from lmkit.turbo.kv import blocks as kv_blocks
from tests.models import tiny

PROMPTS = [[5, 7, 11, 2], [3]]


@pytest.fixture(autouse=True)
def private_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled kernels stay where they are; packed weights that cannot be beside a checkpoint go here."""
    jit.cache_directory()
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LMKIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def records() -> Iterator[list[str]]:
    """Messages of the cache's log, whatever the set-up of logging is."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    handler, loggers = Handler(), [logging.getLogger(f"lmkit.models.{name}") for name in ("packed_cache", "loader")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def logits(decoder: Decoder) -> torch.Tensor:
    spec = decoder.spec
    batch, num_blocks = whole_batch(PROMPTS, 8)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 8, layer.head_dim, (FLOAT32, FLOAT32)) for layer in spec.layers]
    return decoder(batch, kv)


def dense(path: Path, **overrides: Any) -> Path:
    tiny.make(path, "llama-tied-bias", **overrides)
    return path


def awq(path: Path) -> Path:
    """Attention in 4 bits but for one projection, MLP dense: a merged linear of two products."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    plain, scheme = dense(path / "plain", **shape), int_scheme(4, 32)
    weight_format = get_format("awq")
    writer = CheckpointWriter(path)
    with CheckpointReader(plain) as reader:
        for name in reader.names():
            module = name.removesuffix(".weight")
            if ".self_attn." in name and name.endswith(".weight") and "k_proj" not in name:
                weight_format.write_linear(writer, module, quantize(reader.tensor(name), scheme))
            else:
                writer.add(name, reader.tensor(name))
        entry = weight_format.config_entry({"q_proj": scheme, "k_proj": None, "mlp": None})
        writer.finish(reader.config | {"quantization_config": entry}, plain)
    shutil.rmtree(plain)
    return path


def float16(path: Path) -> Path:
    model = tiny.make(path, "qwen2")
    model.half().save_pretrained(path)
    return path


def files(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / packed_cache.FOLDER).glob("*"))


class Loaded(NamedTuple):
    checkpoint: Path
    file: Path
    logits: torch.Tensor


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """A checkpoint whose packed weights are on disk."""
    checkpoint = dense(tmp_path / "model")
    result = logits(load_model(checkpoint, packed_cache=True))
    (file,) = files(checkpoint)
    return Loaded(checkpoint, file, result)


@pytest.mark.parametrize("make", [dense, awq, float16])
@pytest.mark.parametrize("options", [{}, {"activations": "exact"}, {"lm_head": "int8"}, {"dtype": "bfloat16"}])
def test_a_mapped_model_computes_the_same_bits(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    checkpoint = make(tmp_path)
    expected = logits(load_model(checkpoint, **options))
    assert not files(checkpoint)
    first = logits(load_model(checkpoint, packed_cache=True, **options))
    (file,) = files(checkpoint)
    written = file.stat()
    second = load_model(checkpoint, packed_cache=True, **options)
    assert torch.equal(first, expected)
    assert torch.equal(logits(second), expected)
    assert file.stat().st_ino == written.st_ino
    assert [path.name for path in files(checkpoint)] == [file.name]


def test_auto_activations_are_int8_on_a_cpu_and_share_its_file(tmp_path: Path) -> None:
    checkpoint = awq(tmp_path)
    auto, int8 = (load_model(checkpoint, packed_cache=True, activations=name) for name in ("auto", "int8"))
    assert len(files(checkpoint)) == 1
    assert torch.equal(logits(auto), logits(int8))


def test_the_weights_are_mapped_and_aligned(loaded: Loaded) -> None:
    """The head is tied: its rows are the embeddings."""
    decoder = load_model(loaded.checkpoint, packed_cache=True)
    assert decoder.embed_tokens is decoder.lm_head
    addresses: list[int] = []

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.data_ptr() % 64 == 0, name
        addresses.append(tensor.data_ptr())
        return tensor

    for linear in [*decoder.layers[1].linears, decoder.lm_head]:
        linear.replace_packed("x", note)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(n, 16) for n in line[0].split("-")), line[5]) for line in maps if len(line) > 5]
    of = [next(path for low, high, path in spans if low <= address < high) for address in addresses]
    assert of == [str(loaded.file)] * len(addresses)


@pytest.mark.parametrize(("tied", "options"), [(False, {}), (True, {"lm_head": "int8"})])
def test_embeddings_of_their_own_are_mapped_from_the_checkpoint(
    tmp_path: Path, tied: bool, options: dict[str, Any]
) -> None:
    checkpoint = dense(tmp_path / "model", tie_word_embeddings=tied)
    embed = load_model(checkpoint, packed_cache=True, **options).embed_tokens
    assert isinstance(embed, torch.Tensor)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(n, 16) for n in line[0].split("-")), line[5]) for line in maps if len(line) > 5]
    of = next(path for low, high, path in spans if low <= embed.data_ptr() < high)
    assert of == str(checkpoint / "model.safetensors")


def test_the_file_is_one_that_other_programs_read(loaded: Loaded) -> None:
    with safe_open(loaded.file, framework="pt") as file:
        names = list(file.keys())
        assert f"layers.3.{roles.LM_HEAD}.0.data" in names
        assert all(file.get_tensor(name).numel() for name in names)


def test_each_packing_has_a_file_and_a_changed_checkpoint_leaves_none(loaded: Loaded) -> None:
    load_model(loaded.checkpoint, packed_cache=True, lm_head="int8")
    assert len(files(loaded.checkpoint)) == 2
    weights = loaded.checkpoint / "model.safetensors"
    times, data = weights.stat(), bytearray(weights.read_bytes())
    data[-2] ^= 64  # one weight; same size, same time
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    expected = logits(load_model(loaded.checkpoint))
    assert not torch.equal(expected, loaded.logits)
    assert torch.equal(logits(load_model(loaded.checkpoint, packed_cache=True)), expected)
    (file,) = files(loaded.checkpoint)
    assert file.name != loaded.file.name


def test_a_touched_checkpoint_or_another_config_is_another_checkpoint(loaded: Loaded) -> None:
    os.utime(loaded.checkpoint / "model.safetensors")
    load_model(loaded.checkpoint, packed_cache=True)
    (touched,) = files(loaded.checkpoint)
    config = loaded.checkpoint / "config.json"
    assert read_json(config, 1 << 20)["rms_norm_eps"] == 1e-5
    config.write_text(config.read_text().replace("1e-05", "2e-05"))
    load_model(loaded.checkpoint, packed_cache=True)
    (changed,) = files(loaded.checkpoint)
    assert len({loaded.file.name, touched.name, changed.name}) == 3


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def flipped(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "half a header": lambda data: data[: header_end(data) // 2],
    "longer": lambda data: data + b"\0",
    "another key": lambda data: data.replace(b'"key":"', b'"key":"0', 1)[: header_end(data)] + data[header_end(data) :],
    "another scheme": lambda data: data.replace(b"float32", b"float16", 1),
    "another shape": lambda data: data.replace(b'"shape":[', b'"shape":[1,', 1).replace(b"  ", b"", 1),
    "another name": lambda data: data.replace(b"layers.0", b"layers.9", 1),
    "a bit of the first tensor": lambda data: flipped(data, header_end(data)),
    "the last bit": lambda data: flipped(data, -1),
    "zeros": lambda data: data[: header_end(data)] + bytes(len(data) - header_end(data)),
    "a digit": lambda data: flipped(data, data.index(b"data_offsets") + 15),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(loaded: Loaded, records: list[str], damage: str) -> None:
    data = loaded.file.read_bytes()
    bad = DAMAGES[damage](data)
    assert bad != data
    loaded.file.write_bytes(bad)
    assert torch.equal(logits(load_model(loaded.checkpoint, packed_cache=True)), loaded.logits)
    assert len([line for line in records if line.startswith("WARNING")]) == 1
    assert loaded.file.read_bytes() == data


def test_a_whole_file_of_other_contents_is_made_anew(loaded: Loaded, tmp_path: Path, records: list[str]) -> None:
    """Everything about it is right, its checksum too, but that its tensors are a smaller model's."""
    small = dense(tmp_path / "small", intermediate_size=48)
    data = loaded.file.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "content_digest", lambda self: "the same")
        load_model(small, packed_cache=True)
        (forged,) = files(small)
        shutil.copy(forged, loaded.file.with_name(forged.name))
        assert torch.equal(logits(load_model(loaded.checkpoint, packed_cache=True)), loaded.logits)
    assert any("packed anew" in line for line in records)
    assert max(path.stat().st_size for path in files(loaded.checkpoint)) == len(data)


def test_a_folder_that_cannot_be_written_has_its_file_elsewhere(tmp_path: Path, private_folder: Path) -> None:
    checkpoint = dense(tmp_path)
    (checkpoint / packed_cache.FOLDER).write_text("not a folder")
    expected = logits(load_model(checkpoint, packed_cache=True))
    (file,) = private_folder.glob("packed/*/packed-*.safetensors")
    inode = file.stat().st_ino
    assert torch.equal(logits(load_model(checkpoint, packed_cache=True)), expected)
    assert file.stat().st_ino == inode


def test_a_link_that_leads_out_of_the_checkpoint_is_not_followed(tmp_path: Path, private_folder: Path) -> None:
    checkpoint, elsewhere = dense(tmp_path / "model"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (checkpoint / packed_cache.FOLDER).symlink_to(elsewhere)
    load_model(checkpoint, packed_cache=True)
    assert not list(elsewhere.iterdir())
    assert len(list(private_folder.glob("packed/*/packed-*.safetensors"))) == 1


@pytest.mark.parametrize(("of_checkpoint", "of_folder", "is_used"), [(0o755, 0o775, False), (0o775, 0o775, True)])
def test_a_folder_that_more_may_write_to_than_to_the_checkpoint_is_not_used(
    loaded: Loaded, private_folder: Path, records: list[str], of_checkpoint: int, of_folder: int, is_used: bool
) -> None:
    loaded.checkpoint.chmod(of_checkpoint)
    loaded.file.parent.chmod(of_folder)
    assert torch.equal(logits(load_model(loaded.checkpoint, packed_cache=True)), loaded.logits)
    assert len(list(private_folder.glob("packed/*/packed-*.safetensors"))) == (not is_used)
    assert any("others may write to it and not to the checkpoint" in line for line in records) == (not is_used)


@pytest.mark.parametrize("rights", [0o755, 0o775])
def test_the_folder_of_a_checkpoint_has_no_more_rights(tmp_path: Path, rights: int) -> None:
    checkpoint, before = dense(tmp_path / "model"), os.umask(0)
    try:
        checkpoint.chmod(rights)
        load_model(checkpoint, packed_cache=True)
    finally:
        os.umask(before)
    assert (checkpoint / packed_cache.FOLDER).stat().st_mode & 0o022 == rights & 0o022


@pytest.mark.parametrize("failure", ["no room", "full while writing"])
def test_without_room_the_model_loads_all_the_same(
    tmp_path: Path, private_folder: Path, records: list[str], monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    if failure == "no room":
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    else:
        monkeypatch.setattr("lmkit.formats.safetensors_stream.fsync", full_disk)
    checkpoint = dense(tmp_path)
    assert torch.equal(logits(load_model(checkpoint, packed_cache=True)), logits(load_model(checkpoint)))
    assert len([line for line in records if line.startswith("WARNING")]) == 1
    assert not files(checkpoint)
    assert not [path for path in private_folder.rglob("*") if path.is_file()]


def full_disk(fd: int) -> None:
    raise OSError(28, "No space left on device")


def test_several_starts_at_once_write_one_file(tmp_path: Path, records: list[str]) -> None:
    checkpoint = dense(tmp_path)
    together = threading.Barrier(4)

    def start() -> torch.Tensor:
        together.wait()
        return logits(load_model(checkpoint, packed_cache=True))

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(start) for _ in range(4)]]
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(files(checkpoint)) == 1
    assert len([line for line in records if "packing the weights once" in line]) == 1


def test_a_folder_that_another_start_makes_at_the_same_moment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, mkdir = dense(tmp_path), Path.mkdir

    def second(path: Path, *args: Any, **options: Any) -> None:
        if path.name == packed_cache.FOLDER:
            mkdir(path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", second)
    load_model(checkpoint, packed_cache=True)
    assert len(files(checkpoint)) == 1


def test_a_start_waits_for_the_one_that_packs(loaded: Loaded, records: list[str]) -> None:
    """The lock is held as another process would, and the file appears before it is let go."""
    inode, hidden = loaded.file.stat().st_ino, loaded.file.with_suffix(".hidden")
    loaded.file.rename(hidden)
    fd = os.open(loaded.file.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(load_model, loaded.checkpoint, packed_cache=True)
        while not any("waiting for another process" in line for line in records):
            assert not future.done()
        hidden.rename(loaded.file)
        os.close(fd)
        assert torch.equal(logits(future.result()), loaded.logits)
    assert loaded.file.stat().st_ino == inode


def test_a_checkpoint_that_cannot_be_packed_is_that_error_alone(tmp_path: Path, records: list[str]) -> None:
    checkpoint = dense(tmp_path)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 88', '"intermediate_size": 80'))
    with pytest.raises(CheckpointError, match="gate_proj is"):
        load_model(checkpoint, packed_cache=True)
    assert not [line for line in records if line.startswith("WARNING")]
    assert not files(checkpoint)


@pytest.mark.parametrize("make", [dense, awq])
def test_packing_has_one_packed_linear_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    keep, kept = packed_cache.PackedWriter.keep, list[tuple[str, weakref.ref[torch.Tensor]]]()

    def noted(self: packed_cache.PackedWriter, name: str, tensor: torch.Tensor) -> torch.Tensor:
        linear = name.partition("+")[0] if "+" in name else name.rpartition(".")[0]
        assert not [other for other, left in kept if left() is not None and other != linear]
        kept.append((linear, weakref.ref(tensor)))
        return keep(self, name, tensor)

    monkeypatch.setattr(packed_cache.PackedWriter, "keep", noted)
    load_model(make(tmp_path), packed_cache=True)
    assert len({linear for linear, _ in kept}) > 4


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    checkpoint = dense(tmp_path)
    (checkpoint / packed_cache.FOLDER).mkdir()
    left = checkpoint / packed_cache.FOLDER / "packed-0-0.safetensors.77.partial"
    left.write_text("torn")
    load_model(checkpoint, packed_cache=True)
    assert not left.exists()


@pytest.mark.parametrize("activations", ["int8", "exact"])
def test_an_int8_head_is_close_to_the_checkpoints(tmp_path: Path, activations: str) -> None:
    checkpoint = dense(tmp_path)
    plain, quantized = (
        logits(load_model(checkpoint, lm_head=head, activations=activations)) for head in ("auto", "int8")
    )
    assert not torch.equal(plain, quantized)
    assert (plain - quantized).abs().max() < 0.02 * plain.abs().max()


def test_every_pattern_of_the_sources_behind_a_digest_matches_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename would drop a file silently, and stale files would be taken for good ones."""
    for pattern in (*identity.SOURCES, *kv_blocks.SOURCES):
        assert list(identity.PACKAGE.glob(pattern)), pattern
    with pytest.raises(AssertionError, match="no source file matches layers/renamed"):
        identity.sources_digest(("layers/*.py", "layers/renamed.py"))


def test_levels_with_one_layout_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for level in ("amx", "avx512_vnni", "avx2"):
        monkeypatch.setattr(isa, "host", lambda level=level: isa.named(level))
        names.append(identity.packing_identity(identity.Packing("cpu", "float32", "int8", "auto")))
    assert names[0] == names[1] != names[2]
