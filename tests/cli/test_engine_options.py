"""Every field of EngineConfig can be said on the command line, and means there what it means in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmkit.cli import serve as serve_module
from lmkit.cli.options import struct_of, takes
from lmkit.cli.serve import serve
from lmkit.config import EngineConfig
from lmkit.option import options_of

ALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kv_dtype": "int8", "activations": "exact", "lm_head": "int8",
    "quantize": "int4", "model_impl": "flexible",
    "packed_cache": False, "tp": 2, "ep": 2, "pp": 3, "devices": "0,2", "cluster": "ray",
    "block_size": 16,
    "deterministic": True, "selftest": "off",
    "max_batch_size": 3, "max_step_tokens": 64, "max_model_len": 100,
    "kv_memory": 3 << 20, "max_queue": 7, "num_threads": 2, "prefix_cache": False, "cache_quota": 0.25,
    "audit": 77,
    "session_lease": 1.5, "kv_host_memory": 2 << 30, "kv_disk_path": "kv", "kv_disk_memory": 5 << 30,
    "image_memory": 7 << 20, "image_pixels": 5000,
    "attention_sinks": 4, "priority_seconds": 0.0, "max_overtakes": 0, "decode_slowdown": 3.0, "overlap": False,
    "request_timeout": 9.0, "generation_config": "none", "queue_quota": 0.75, "max_queued_tokens": 999,
    "pooling": "mean", "chat_template": "own.jinja", "speculate": "ngram", "max_draft_tokens": 5,
    "draft_history": 999,
    "adapters": ("a=one", "b=two"), "adapter_root": "folders", "max_adapters": 3,
    "weights_memory": 9 << 30, "weights_path": "nvme", "kv_events": "tcp://*:5557", "kv_events_topic": "kv",
    "kv_listen": "127.0.0.1:7400", "kv_peer": "10.0.0.5:7400", "kv_key_file": "kv.key",
}  # fmt: skip
SIZES = {
    "weights_memory": "9G",
    "kv_memory": "3M",
    "kv_host_memory": "2GiB",
    "kv_disk_memory": "5g",
    "image_memory": "7M",
}


def arguments(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            words += [word for part in value for word in (f"--{option}", part)]
        else:
            words += [f"--{option}", SIZES.get(name, str(value))]
    return words


def application(found: list[EngineConfig] | None = None) -> typer.Typer:
    """A command that appends its EngineConfig to `found`."""

    @takes(config=struct_of(EngineConfig, "engine options"))
    def command(config: EngineConfig) -> None:
        if found is not None:
            found.append(config)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return app


def parsed(words: list[str]) -> EngineConfig:
    found: list[EngineConfig] = []
    result = CliRunner().invoke(application(found), words)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_defaults_are_the_configuration_s() -> None:
    assert parsed([]) == EngineConfig()


def test_every_field_is_an_option() -> None:
    assert sorted(ALL) == sorted(EngineConfig.__struct_fields__) == sorted(options_of(EngineConfig))
    default = EngineConfig()
    assert all(getattr(default, name) != value for name, value in ALL.items())
    assert parsed(arguments(ALL)) == EngineConfig(**ALL)


@pytest.mark.parametrize(
    "words",
    [
        ["--cache-quota", "0"], ["--cache-quota", "1.5"], ["--session-lease", "0"], ["--kv-host-memory", "much"],
        ["--kv-disk-memory", "0"], ["--attention-sinks", "-1"], ["--priority-seconds", "-1"], ["--max-overtakes", "-1"],
        ["--decode-slowdown", "1"], ["--request-timeout", "0"], ["--device", "tpu"], ["--kv-memory", ""],
        ["--kv-dtype", "int5"],
    ],
)  # fmt: skip
def test_values_out_of_range_name_the_option(words: list[str]) -> None:
    result = CliRunner().invoke(application(), words)
    assert words[0] in f"{result.stderr} {result.exception}"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineConfig]:
    """`lmkit serve` with these options, up to the engine's start: what it would be given."""

    def run(*words: str) -> EngineConfig:
        given: list[EngineConfig] = []
        monkeypatch.setattr(
            "lmkit.turbo.transport.async_engine.AsyncEngine", lambda path, config, **_: given.append(config)
        )
        monkeypatch.setattr("lmkit.serve.server.serve", lambda *_: 0)
        app = typer.Typer()
        app.command()(serve)
        result = CliRunner().invoke(app, [str(Path(serve_module.__file__).parents[1] / "demo" / "model"), *words])
        assert result.exit_code == 0, result.output
        return given[0]

    return run


def test_several_keys_share_the_cache(served: Callable[..., EngineConfig]) -> None:
    two = ("--api-key", "a", "--api-key", "b")
    assert served().cache_quota == 1.0
    assert served("--api-key", "a").cache_quota == 1.0
    assert served(*two).cache_quota == 0.5
    assert served(*two, "--cache-quota", "1").cache_quota == 1.0
    assert served(*two, "--cache-quota", "0.3").cache_quota == 0.3


def test_several_tenants_share_the_queue(served: Callable[..., EngineConfig], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a role=proxy\n")
    assert served("--api-key", "a").queue_quota == 1.0
    assert served("--api-key", "a", "--api-key", "b").queue_quota == 0.5
    proxied = served("--api-key-file", str(keys), "--queue-quota", "0.2")
    assert (proxied.cache_quota, proxied.queue_quota) == (0.5, 0.2)
