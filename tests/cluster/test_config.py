"""The file of `lmkit up`: what it may say, and what a mistake says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.cluster.config import OWN_OPTIONS, ClusterConfig, Group, read
from lmkit.errors import ConfigError

FULL = """
proxy: {port: 9000, policy: least_tokens, key_store: keys.db, api_keys: [secret]}
ray: auto
address: http://10.0.0.1:9000
models:
  - model: demo
    name: small
    replicas: {min: 0, max: 3}
    scaling: {requests: 2, tokens: 100, idle_seconds: 5}
    cores: 2
    version: "2"
    options: {kv-memory: 64M, prefix_cache: no}
  - model: demo
"""

PREFILL = "{model: demo, role: prefill, options: {kv_host_memory: 64M}}"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FULL)
    config = read(path)
    assert [group.called for group in config.models] == ["small", "demo"]
    assert (config.models[0].bounds.min, config.models[0].bounds.max, config.models[1].bounds.min) == (0, 3, 1)
    assert config.proxy.key_store == str(tmp_path / "keys.db")  # beside the file
    assert CliRunner().invoke(app, ["up", str(path), "--check"]).stdout == f"{path}: small, demo\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", ":1: Expected `array` of length >= 1"),
        ("modles: []", "unknown field `modles`"),
        ("models: [{model: demo}, {model: demo}]", "two models are called 'demo'"),
        ("models:\n- model: demo\n  core: 2", ":3: Object contains unknown field `core`"),
        ("models:\n- model: demo\n  core: 2", "did you mean cores?"),
        ("models: [{model: demo, replicas: {min: 3, max: 2}}]", "min 3 is more than max 2"),
        ("models: [{model: demo, replicas: 0}]", ">= 1"),
        ("models: [{model: demo, options: {port: 80}}]", "port is what `lmkit up` sets itself"),
        ("models: [{model: demo, options: {api-key: k}}]", "api_key is what `lmkit up` sets itself"),
        ("models: [{model: demo, options: {kv_memroy: 1G}}]", "'kv_memroy' is not an option; did you mean kv_memory?"),
        ("models: [{model: demo, options: {kv_memory: lots}}]", "kv_memory"),
        ("models: [{model: demo, options: {role: decode}}]", "role is a field of the model, beside options"),
        ("models: [{model: demo, role: decode}]", "demo-decode: 'demo' needs one group with role: prefill and one"),
        (f"models: [{PREFILL}, {{model: demo, role: decode}}, {{model: demo}}]", "role: decode, and no other"),
        (f"models: [{PREFILL}, {{model: x, name: demo, role: decode}}]", "both groups of 'demo' need the same `model`"),
        (f"models: [{PREFILL}, {{model: demo, role: decode, replicas: {{min: 0}}}}]", "needs a replica"),
        ("models: [{model: demo, role: prefill}, {model: demo, role: decode}]", "add kv_host_memory"),
        (f"models: [{PREFILL}, {{model: demo, role: decode, options: {{kv-peer: 'a:1'}}}}]", "leave out kv_listen and"),
        (f"ray: auto\nmodels: [{PREFILL}, {{model: demo, role: decode}}]", "add kv_key_file to the options of both"),
        ("models: [{model: demo}]\nproxy: {nodes: [{url: 'http://a:1'}]}", "proxy.nodes is not for a cluster"),
        ("models: [{model: demo}]\nproxy: {polcy: prefix}", "did you mean policy?"),
        ("models: [{model: demo}]\nproxy: {tls_cert: a.pem}", "needs `address`"),
        ("models: [{model: demo}]\naddress: 10.0.0.1", "write for example http://10.0.0.1:8080"),
    ],
)
def test_a_mistake_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["up", str(path)])
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    assert message in str(result.exception)
    assert str(result.exception).startswith(str(path))
    assert "\n" not in str(result.exception)


def test_a_change_of_what_a_replica_is_makes_another_version() -> None:
    group = Group(model="demo", options={"kv_memory": "1G", "tp": 1})
    same = {"replicas": 3, "options": {"tp": 1, "kv_memory": "1G"}}
    assert msgspec.structs.replace(group, **same).digest == group.digest
    changed = {"cores": 2}, {"version": "x"}, {"options": {"tp": 2}}, {"role": "decode"}, {"model": "x", "name": "demo"}
    for other in changed:
        assert msgspec.structs.replace(group, **other).digest != group.digest, other


def test_the_options_that_a_cluster_sets_exist() -> None:
    import typer

    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert {str(param.name) for param in serve.params} >= OWN_OPTIONS
    assert ClusterConfig.__struct_fields__[0] == "models"
