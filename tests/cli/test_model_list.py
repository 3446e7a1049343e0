"""The models of `lmkit serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.cli.model_list import listed_models
from lmkit.config import EngineConfig, ServerConfig
from lmkit.errors import ConfigError

FOR_ALL = EngineConfig(max_batch_size=8)


def test_a_file_gives_names_and_options(tmp_path: Path) -> None:
    (file := tmp_path / "models.yaml").write_text(
        "small: demo\nlarge:\n  path: /models/large\n  aliases: [big]\n  revision: v1\n"
        "  kv-memory: 64M\n  keep_alive: 60\n  max_batch_size: 2\n"
    )
    small, large = listed_models([str(file)], FOR_ALL, ServerConfig(keep_alive=5))
    assert (small.name, small.path, small.engine, small.keep_alive) == ("small", "demo", FOR_ALL, 5)
    assert (large.name, large.path, large.keep_alive) == ("large", "/models/large", 60)
    assert (large.aliases, large.revision) == (("big",), "v1")
    assert (large.engine.kv_memory, large.engine.max_batch_size) == (64 << 20, 2)


def test_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    models = listed_models([str(tmp_path / "one"), "owner/two"], FOR_ALL, ServerConfig())
    assert [model.name for model in models] == ["one", "owner/two"]
    (named,) = listed_models(["demo"], FOR_ALL, ServerConfig(served_model_name=("mine", "gpt-4")))
    assert (named.name, named.aliases) == ("mine", ("gpt-4",))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected models"),
        ("- demo", "expected models"),
        ("a: 1", ":1: a: expected a path"),
        ("a: demo\nb: {kv_memory: 1G}", ":2: b: expected a path"),
        ("a: {path: demo, kv_cache: 1}", "'kv_cache' is not an option of a model"),
        ("a: {path: demo, kv_memory: much}", "kv_memory: 'much' is not a size"),
        ("a: {path: demo, max_batch_size: many}", ":1: a: "),
        ("a: {path: demo, keep_alive: -1}", ":1: a: keep_alive"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    (file := tmp_path / "models.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        listed_models([str(file)], FOR_ALL, ServerConfig())
    assert str(file) in str(caught.value)
    assert error in str(caught.value)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models are called 'demo'"):
        listed_models(["demo", "demo"], FOR_ALL, ServerConfig())
    with pytest.raises(ConfigError, match="two models are called 'x'"):
        listed_models(["demo"], FOR_ALL, ServerConfig(served_model_name=("x", "x")))
    with pytest.raises(ConfigError, match="--served-model-name is for a single model"):
        listed_models(["demo", "other"], FOR_ALL, ServerConfig(served_model_name=("x",)))
    with pytest.raises(ConfigError, match="--revision is for a single model"):
        listed_models(["demo", "other"], FOR_ALL, ServerConfig(), "main")
