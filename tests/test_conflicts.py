"""Every row of the table of options that do not go together is refused for its reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import typer

from lmkit import conflicts
from lmkit.cli.main import app
from lmkit.config import NAMED_PEERS, EngineConfig
from lmkit.conflicts import CALLER_TRAITS, CONFLICTS, REPLICAS, TRAITS, Conflict, facts
from lmkit.devices import DEVICES
from lmkit.errors import ConfigError

FIELDS = EngineConfig.__struct_fields__
# What gives an option, or makes a trait true. Sides that are not here hold by default, or are named by a caller.
GIVEN: dict[str, dict[str, Any]] = {
    "adapters": {"adapters": ("a=folder",)},
    "adapter_root": {"adapter_root": "folder"},
    "attention_sinks": {"attention_sinks": 4},
    "cluster": {"cluster": "ray"},
    "deterministic": {"deterministic": True},
    "devices": {"devices": "0,1"},
    "draft_history": {"draft_history": 64},
    "ep": {"ep": 2},
    "kv_disk_memory": {"kv_disk_memory": 1 << 20},
    "kv_disk_path": {"kv_disk_path": "folder"},
    "kv_dtype": {"kv_dtype": "int8"},
    "kv_events": {"kv_events": "tcp://127.0.0.1:5557"},
    "kv_events_topic": {"kv_events_topic": "kv"},
    "kv_host_memory": {"kv_host_memory": 1 << 20},
    "kv_key_file": {"kv_key_file": "key"},
    "kv_listen": {"kv_listen": "127.0.0.1:7400"},
    "kv_peer": {"kv_peer": "127.0.0.1:7400"},
    "lm_head": {"lm_head": "int8"},
    "max_adapters": {"max_adapters": 2},
    "pp": {"pp": 2},
    "quantize": {"quantize": "int8"},
    "speculate": {"speculate": "ngram"},
    "tp": {"tp": 2},
    "weights_memory": {"weights_memory": 1 << 30},
    "weights_path": {"weights_path": "folder"},
    "no packed_cache": {"packed_cache": False},
    "no prefix_cache": {"prefix_cache": False},
    **{f"device {name}": {"device": name} for name in DEVICES},
    conflicts.PROCESSES: {"tp": 2},
    conflicts.RANKS: {"tp": 2},
    conflicts.UNEQUAL: {"tp": 2, "ep": 4},
    conflicts.MANY: {"tp": 16, "device": "cuda"},
    conflicts.WRONG_COUNT: {"tp": 4, "devices": "0,1"},
    conflicts.LONE_DRAFTER: {"tp": 2, "device": "cuda"},
    conflicts.DRAFTER: {"speculate": "draft=folder"},
    conflicts.UNCALIBRATED: {"kv_dtype": "int4"},
    conflicts.NAMED: {"kv_peer": NAMED_PEERS},
}
OF_ENGINES = [row for row in CONFLICTS if row.with_ != REPLICAS]


def test_sides_exist() -> None:
    """Each is an option, with or without `no`, a device, or a trait. Those of --dp are options of `lmkit serve`."""
    commands: Any = typer.main.get_command(app)
    serve = {param.name for param in commands.commands["serve"].params}
    sides = {*FIELDS, *(f"no {name}" for name in FIELDS), *(f"device {name}" for name in DEVICES), *TRAITS}
    for row in CONFLICTS:
        assert row.option in (serve if row.with_ == REPLICAS else sides), row
        assert row.with_ in sides | set(CALLER_TRAITS), row


def test_no_row_stands_twice_or_between_the_same() -> None:
    pairs = [(row.option, row.with_) for row in CONFLICTS]
    assert len(set(pairs)) == len(pairs)
    assert all(option != with_ for option, with_ in pairs)


@pytest.mark.parametrize("device", ["auto", *DEVICES])
def test_the_defaults_go_together(device: str) -> None:
    conflicts.check(EngineConfig(device=device))


@pytest.mark.parametrize("row", OF_ENGINES, ids=lambda row: f"{row.option} | {row.with_}")
def test_a_row_is_refused_for_its_reason(row: Conflict, monkeypatch: pytest.MonkeyPatch) -> None:
    given = GIVEN.get(row.option, {}) | GIVEN.get(row.with_, {})
    traits = tuple(side for side in row if side in CALLER_TRAITS)
    monkeypatch.setattr(conflicts, "CONFLICTS", (row,))
    with pytest.raises(ConfigError) as refused:
        conflicts.check(EngineConfig(**given), *traits, architecture="Llama")
    line = str(refused.value)
    start, end = row.reason.partition("{")[0], row.reason.rpartition("}")[2]
    assert line.startswith(start)
    assert line.endswith(end)
    assert not set("{}") & set(line)


def test_all_options_of_one_reason_are_named() -> None:
    config = EngineConfig(kv_host_memory=1 << 20, kv_events="tcp://127.0.0.1:5557", pp=1)
    with pytest.raises(ConfigError, match=r"^Bert reads each text as a whole; leave out kv_host_memory, kv_events$"):
        conflicts.check(config, conflicts.WHOLE_TEXTS, architecture="Bert")


def test_what_a_device_refuses_is_in_the_table() -> None:
    rows = {(row.option, row.with_): row.reason for row in CONFLICTS}
    refused = {(option, f"device {d.name}"): why for d in DEVICES.values() for option, why in d.refuses.items()}
    assert refused
    assert refused.items() <= rows.items()


def test_an_option_that_is_turned_off_is_not_given() -> None:
    found = facts(EngineConfig(prefix_cache=False, deterministic=True))
    assert {"no prefix_cache", "deterministic", "packed_cache", "no kv_listen"} <= found
    assert not {"prefix_cache", "no deterministic", "no packed_cache"} & found


def test_reasons_name_what_a_configuration_has() -> None:
    config = msgspec.structs.replace(EngineConfig(), tp=16, device="cuda")
    with pytest.raises(ConfigError, match=r"^tp=16: at most 8 GPUs share a model; use a smaller number$"):
        conflicts.check(config)
