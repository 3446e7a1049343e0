"""Options of `lmkit serve` and `lmkit proxy` from the environment and a file: which counts, and what a mistake says."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.option import options_of
from lmkit.other_names import names


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMKIT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that should have been refused fail at once: no server starts in this process."""

    def serve(*_: object) -> int:
        raise AssertionError("these words were not refused: a server would have started")

    monkeypatch.setattr("lmkit.serve.server.serve", serve)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("model: demo\nport: 8123\nkv-memory: 32M\noverlap: no\nkv_dtype: int8\napi_key: [a, b]\n")
    return path


def printed(*words: str | Path) -> dict[str, tuple[str, str]]:
    """`--print-config`: name -> (value, where it stands)."""
    result = CliRunner().invoke(app, ["serve", "--print-config", *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)
    parts = [line.rpartition("  # ") for line in result.stdout.splitlines()]
    lines = [(text.removeprefix("# ").strip().partition(":"), place) for text, _, place in parts]
    return {name: (value.strip(), place) for (name, _, value), place in lines}


def mistake(*words: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(("given", "size"), [("0", 0), ("2M", 2 << 20)])
def test_a_size_may_be_nothing_where_that_means_something(given: str, size: int) -> None:
    """--response-store 0 stores no responses; --kv-memory 0 is no size."""
    assert printed("demo", "--response-store", given)["response_store"][0] == str(size)
    assert "kv-memory" in mistake("serve", "--print-config", "demo", "--kv-memory", "0")


def test_a_file_gives_options(file: Path) -> None:
    options = printed("--config", file)
    assert options["model"] == ("demo", f"{file}:1: model")
    assert options["port"] == ("8123", f"{file}:2: port")
    assert options["kv_memory"] == (str(32 << 20), f"{file}:3: kv_memory")
    assert options["overlap"] == ("false", f"{file}:4: overlap")
    assert options["host"] == ("127.0.0.1", "default")


def test_the_command_line_comes_first_then_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_CONFIG", str(file))
    monkeypatch.setenv("LMKIT_PORT", "9000")
    monkeypatch.setenv("LMKIT_KV_DTYPE", "int4")
    options = printed("--kv-dtype", "fp8")
    assert options["kv_dtype"] == ("fp8", "--kv-dtype")
    assert printed("other")["model"] == ("other", "MODEL")
    assert options["port"] == ("9000", "LMKIT_PORT")
    assert options["model"] == ("demo", f"{file}:1: model")


def test_every_option_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"LMKIT_MODEL": "demo", "LMKIT_API_KEY": "a b", "LMKIT_LOG_LEVEL": "error", "LMKIT_PREFIX_CACHE": "0"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    options = printed()
    assert {name: options[name][1] for name in ("model", "api_key", "log_level", "prefix_cache")} == {
        "model": "LMKIT_MODEL", "api_key": "LMKIT_API_KEY", "log_level": "LMKIT_LOG_LEVEL",
        "prefix_cache": "LMKIT_PREFIX_CACHE",
    }  # fmt: skip
    assert options["prefix_cache"][0] == "false"
    assert options["log_level"][0] == "ERROR"
    assert options["api_key"][0] == "2, not shown"


def test_what_is_printed_is_a_file(file: Path, tmp_path: Path) -> None:
    text = CliRunner().invoke(app, ["serve", "--print-config", "--config", str(file)]).stdout
    again = tmp_path / "again.yaml"
    again.write_text(text)
    first, second = printed("--config", file), printed("--config", again)
    assert {name: value for name, (value, _) in first.items()} | {"api_key": ""} == {
        name: value for name, (value, _) in second.items()
    } | {"api_key": ""}
    assert set(yaml.safe_load(text)) <= first.keys()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("kv_memry: 2G", ("'kv_memry'", "did you mean kv_memory?")),
        ("session_len: 8192", ("'session_len'", "use max_model_len")),
        ("server-port: 8000", ("'server-port'", "use port")),
        ("port: true", ("port", "integer")),
        ("port:", ("port", "no value")),
        ("port: [1, 2]", ("port", "one value")),
        ("port: 1\nport: 2", ("given twice",)),
        ("port: 70000", ("port", "65535")),
        ("kv_dtype: q8_0", ("kv_dtype", "int4", "use int8")),
        ("kv_memory: much", ("kv_memory", "'much'")),
        ("print_config: true", ("'print_config'",)),
        ("port: [", ("bad.yaml:2",)),
        ("- port", ("name: value",)),
        ("? [port]\n: 1", ("bad.yaml:1", "not valid YAML")),
        ("port: &a [*a]", ("port", "one value")),
        ("port: " + 2000 * "[" + 2000 * "]", ("not valid YAML",)),
    ],
)
def test_mistakes_in_a_file_name_it(tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(line + "\n")
    message = mistake("serve", "demo", "--config", path)
    assert message.startswith(f"{path}"), message
    assert all(part in message for part in parts), message


def test_a_file_that_is_missing() -> None:
    assert "none.yaml: cannot be read" in mistake("serve", "demo", "--config", "none.yaml")


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("LMKIT_PORT", "x", "integer"), ("LMKIT_CACHE_QUOTA", "3", "at most 1"), ("LMKIT_KV_DTYPE", "int5", "int8"),
        ("LMKIT_MAX_BODY", "x", "size"), ("LMKIT_OVERLAP", "maybe", "true or false"),
        ("LMKIT_CONFIG", "none", "cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_in_the_environment_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, part: str
) -> None:
    monkeypatch.setenv(variable, value)
    message = mistake("serve", "demo")
    assert part in message
    assert message.startswith(variable) or variable == "LMKIT_CONFIG"


def test_an_unknown_variable_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lmkit").propagate = True
    monkeypatch.setenv("LMKIT_KV_MEMRY", "1G")
    monkeypatch.setenv("LMKIT_PROXY_PORT", "1")  # the proxy's
    monkeypatch.setenv("LMKIT_CACHE_DIR", "/tmp")
    printed("demo")
    assert [record.getMessage() for record in caplog.records] == [
        "LMKIT_KV_MEMRY is not a variable of lmkit; did you mean LMKIT_KV_MEMORY?"
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--server-port", "1"], "--port"), (["--server-name=0.0.0.0"], "--host"),
        (["--session-len", "9"], "--max-model-len"), (["--cache-max-entry-count", "0.5"], "--kv-memory"),
        (["--quant-policy", "8"], "--kv-dtype"), (["--model-name", "x"], "--served-model-name"),
        (["--api-keys", "a"], "--api-key"), (["--max-concurrent-requests", "4"], "--max-queue"),
        (["--chat-template-file", "x"], "--chat-template"), (["--tool-call-parser", "qwen"], "--tool-parser"),
        (["--gpu-memory-utilization", "0.9"], "--kv-memory"), (["--max-num-seqs", "8"], "--max-batch-size"),
        (["--tensor-parallel-size", "2"], "--tp"), (["--pipeline-parallel-size", "2"], "--pp"),
        (["--max-num-batched-tokens", "8"], "--max-step-tokens"),
        (["--enable-prefix-caching"], "--prefix-cache"), (["--dtype", "half"], "float16"),
        (["-c", "4"], "--max-model-len"),
        (["--ctx-size", "4"], "--max-model-len"), (["-ngl", "99"], "--device"), (["--n-gpu-layers", "99"], "--device"),
        (["-np", "4"], "--max-batch-size"), (["--kv-cache-dtype", "fp8"], "--kv-dtype"), (["--prot", "1"], "--port"),
        (["--kv-dtype", "int5"], "int8"), (["--trust-remote-code"], "code"), (["--log-level", "loud"], "WARNING"),
    ],
)  # fmt: skip
def test_options_of_other_servers_tell_ours(words: list[str], part: str) -> None:
    message = mistake("serve", "demo", *words)
    assert words[0].partition("=")[0] in message
    assert part.lower() in message.lower()


LMDEPLOY = """
allow_credentials allow_headers allow_methods allow_origins allow_terminate_by_client allowed_media_domains
api_keys backend cache_block_seq_len cache_max_entry_count communicator cp disable_fastapi_docs
disable_metrics dist_init_addr distributed_executor_backend dllm_block_length download_dir dp_rank eager_mode
enable_abort_handling enable_eplb enable_microbatch enable_prefix_caching hf_overrides language_model_only
logprobs_mode max_concurrent_requests max_log_len max_prefill_iters max_prefill_token_num migration_backend model_format
model_name nnodes node_rank num_tokens_per_iter proxy_url quant_policy
rope_scaling_factor server_name server_port session_len speculative_algorithm speculative_draft_model
speculative_num_draft_tokens ssl tool_call_parser trust_remote_code vision_max_batch_size
"""
LMDEPLOY_PROXY = """
api_keys disable_cache_status disable_gdr dummy_prefill link_type migration_protocol routing_strategy server_name
server_port serving_strategy ssl
"""


def test_every_option_of_lmdeploy_has_an_answer() -> None:
    assert not set(LMDEPLOY.split()) - names("lmkit serve").keys()
    assert not set(LMDEPLOY_PROXY.split()) - names("lmkit proxy").keys()


def test_commands_of_other_servers_tell_ours() -> None:
    assert "lmkit serve MODEL" in mistake("serve", "api_server", "demo")
    assert "lmkit proxy" in mistake("serve", "proxy")


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--server-port", "1"], "--port"), (["--routing-strategy", "random"], "--policy"), (["--policy", "x"], "random")],
)
def test_options_of_other_proxies_tell_ours(words: list[str], part: str) -> None:
    assert part in mistake("proxy", *words)


def test_the_proxy_has_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PORT", "not the proxy's")
    monkeypatch.setenv("LMKIT_PROXY_PORT", "many")
    assert mistake("proxy").startswith("LMKIT_PROXY_PORT")
    result = CliRunner().invoke(app, ["proxy", "status", "--proxy", "http://127.0.0.1:1"])
    assert "options come after" not in str(result.exception)


def test_help_has_groups_and_fits_the_terminal() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], terminal_width=80).stdout
    assert all(
        f"\n{title}:\n" in text for title in {option.group for option in options_of(EngineConfig).values()} | {"Server"}
    )
    assert "int8|fp8|int4" in text
    assert "LMKIT_KV_MEMORY" in text
    assert max(map(len, text.splitlines())) <= 80
