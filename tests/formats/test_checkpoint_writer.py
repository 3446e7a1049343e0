"""What is written: shards, index, copied files; the same bytes every time, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter, atomic_directory
from lmkit.formats.sentences import read_sentences
from lmkit.turbo.engine.sentences import read_layers
from tests.formats.files import folder

CONFIG = {"model_type": "llama", "name": "größe", "b": [1, 2.5, None]}
TENSORS = {f"layers.{i}.w": torch.full((8, 4), float(i)) for i in range(5)}  # 128 bytes each

TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with text files that a parser would not reproduce."""
    path = folder(tmp_path / "source", {"x": torch.ones(1)}, {"old": True})
    for name in TEXTS:
        (path / name).write_bytes(b'{ "a":1.0,\r\n"a" : 1 }\xff' + name.encode())
    for name in ("LICENSE", "LICENSE.txt", "README.md", "modeling_x.py", "pytorch_model.bin"):
        (path / name).write_bytes(name.encode())
    return path


def write(out: Path, source: Path, max_shard_bytes: int = 300) -> dict[str, bytes]:
    with atomic_directory(out) as partial:
        writer = CheckpointWriter(partial, max_shard_bytes=max_shard_bytes)
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        writer.finish(CONFIG, source)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_one_file(tmp_path: Path, source: Path) -> None:
    files = write(tmp_path / "out", source, max_shard_bytes=1 << 20)
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == TENSORS.keys()
    assert json.loads(files["config.json"]) == CONFIG
    copied = [*TEXTS, "LICENSE", "LICENSE.txt"]
    assert sorted(files) == sorted([*copied, "config.json", "model.safetensors"])
    for name in copied:
        assert files[name] == (source / name).read_bytes()
    reader = CheckpointReader(tmp_path / "out")
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in TENSORS.items())


def test_shards_and_index(tmp_path: Path, source: Path) -> None:
    files = write(tmp_path / "out", source)
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 5 * 128}
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [index["weight_map"][name] for name in TENSORS] == [names[0], names[0], names[1], names[1], names[2]]
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load(files[file])[name], TENSORS[name])
    reader = CheckpointReader(tmp_path / "out")
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in TENSORS.items())


def test_flush_ends_a_shard(tmp_path: Path, source: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    for name, tensor in TENSORS.items():
        writer.flush()  # one with nothing in it writes nothing
        writer.add(name, tensor)
        writer.flush()
    writer.finish(CONFIG, source)
    assert len(list(tmp_path.glob("model-*-of-00005.safetensors"))) == 5


def test_equal_bytes(tmp_path: Path, source: Path) -> None:
    assert write(tmp_path / "a", source) == write(tmp_path / "b", source)


def test_a_copied_file_must_not_lead_outside(tmp_path: Path, source: Path) -> None:
    (tmp_path / "secret").touch()
    (source / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab.json: links to a file outside"):
        write(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, ConfigError])
def test_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "out") as partial:
            assert partial.parent == tmp_path
            (partial / "sub").mkdir()
            (partial / "sub" / "file").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_target_must_be_free(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (("file", "is a file"), ("full", "is not empty"), ("file/sub", "cannot be made")):
        with pytest.raises(ConfigError, match=message), atomic_directory(tmp_path / name):
            pytest.fail("entered")
    for name in ("empty", "new/deep [1]*"):
        with atomic_directory(tmp_path / name) as partial:
            (partial / "x").touch()
        assert (tmp_path / name / "x").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "new"]


def test_target_taken_meanwhile(tmp_path: Path) -> None:
    def race() -> None:
        with atomic_directory(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "x").touch()

    with pytest.raises(ConfigError, match="cannot be put in place"):
        race()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_writers_of_one_target(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as partial:
        (partial / "x").touch()
        with pytest.raises(ConfigError, match="another process is writing it"), atomic_directory(tmp_path / "out"):
            pytest.fail("entered")
        with atomic_directory(partial / "out"):  # below or beside it is another matter
            pass
    assert (tmp_path / "out" / "x").exists()


KILLED = """
import sys, time, torch
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
with atomic_directory(sys.argv[1]) as partial:
    writer = CheckpointWriter(partial, max_shard_bytes=1000)
    for i in range(5000):
        writer.add(f"w{i}", torch.zeros(1000))
        if i == 3:
            print("writing", flush=True)
    time.sleep(60)
"""


def test_killed_writer_leaves_no_target(tmp_path: Path) -> None:
    out = tmp_path / "out[1]"  # not a pattern
    root = Path(__file__).parents[2]
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, cwd=root)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(ConfigError, match="another process is writing it"), atomic_directory(out):
            pytest.fail("entered")
    finally:
        writer.kill()
        writer.communicate()
    [left] = tmp_path.iterdir()
    assert left.name == f".{out.name}.partial-{writer.pid}"
    assert any(left.iterdir())
    with atomic_directory(out) as partial:
        (partial / "x").touch()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert [path.name for path in out.iterdir()] == ["x"]


def test_the_modules_of_sentence_transformers_are_copied(tmp_path: Path) -> None:
    """Embeddings of the new checkpoint are made as those of the source. A link out of the folder is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 24},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "similarity_fn_name": "dot"},
        "1_Pooling/config.json": {"pooling_mode_cls_token": True},
        "2_Dense/config.json": {"activation_function": "torch.nn.modules.linear.Identity"},
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(json.dumps(content))
    safetensors.torch.save_file({"linear.weight": torch.randn(3, 2)}, source / "2_Dense" / "model.safetensors")
    target.mkdir()
    writer = CheckpointWriter(target)
    writer.add("a", torch.zeros(2))
    writer.finish({}, source)
    wanted = read_sentences(source)
    assert (wanted.pooling, wanted.max_tokens, wanted.prompts, wanted.similarity) == (
        "cls",
        24,
        {"query": "Q: "},
        "dot",
    )
    assert read_sentences(target) == wanted
    assert read_layers(target, wanted, 2) == read_layers(source, wanted, 2)
    (source / "1_Pooling" / "config.json").unlink()
    (source / "1_Pooling" / "config.json").symlink_to("/etc/hostname")
    again = CheckpointWriter(tmp_path)
    again.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        again.finish({}, source)
