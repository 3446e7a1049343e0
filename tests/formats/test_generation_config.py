"""The sampling defaults of a checkpoint: an untrusted file, of which nothing is ignored in silence."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.generation_config import NOT_APPLIED, SamplingDefaults, read_defaults


def read(folder: Path, content: str) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(content)
    return read_defaults(folder)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("{}", {}),
        ('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}', {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ('{"min_p": 0.1, "repetition_penalty": 1.05}', {"min_p": 0.1, "repetition_penalty": 1.05}),
        ('{"temperature": 1, "top_k": null}', {"temperature": 1.0}),
        ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}),  # greedy
        ('{"do_sample": true, "temperature": 0.6}', {"temperature": 0.6}),
        ('{"do_sample": true}', {"temperature": 1.0}),  # as transformers samples
        ('{"top_k": -1}', {"top_k": 0}),
        ('{"eos_token_id": [1, 2], "use_cache": true, "transformers_version": "5", "num_beams": 1}', {}),
    ],
)
def test_fields(tmp_path: Path, content: str, fields: dict[str, float]) -> None:
    defaults = read(tmp_path, content)
    assert defaults.sampling() == fields
    assert all(type(value) is (int if name == "top_k" else float) for name, value in defaults.sampling().items())
    assert defaults.max_new_tokens is None
    assert defaults.not_applied == ()


def test_length(tmp_path: Path) -> None:
    assert read(tmp_path, '{"max_new_tokens": 2048}').max_new_tokens == 2048


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", '"0.6"'), ("temperature", "-1"), ("temperature", "true"), ("temperature", "[0.6]"),
        ("temperature", "1e400"), ("temperature", "1" + "0" * 4000), ("temperature", "NaN"), ("top_k", "1.5"),
        ("top_k", "-2"), ("top_k", "1" + "0" * 30), ("top_p", "0"), ("top_p", "1.5"), ("min_p", "2"),
        ("repetition_penalty", "0"), ("repetition_penalty", "-Infinity"), ("max_new_tokens", "0"),
        ("max_new_tokens", "1e3"), ("do_sample", '"yes"'), ("do_sample", "0"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_names_file_and_field(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, f'{{"top_p": 0.5, "{field}": {value}}}' if field != "top_p" else f'{{"top_p": {value}}}')
    message = str(caught.value)
    assert str(tmp_path / "generation_config.json") in message
    assert field in message
    assert len(message) < len(str(tmp_path)) + 200
    assert "\n" not in message


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"top_p": 0.5, "top_p": 0.6}', "\x00"])
def test_a_malformed_file(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, content)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_defaults(tmp_path)


def test_what_is_not_done_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    defaults = read(tmp_path, '{"num_beams": 4, "penalty_alpha": 0.6, "typical_p": 1.0, "no_repeat_ngram_size": 0}')
    assert set(defaults.not_applied) == {"num_beams", "penalty_alpha"}
    caplog.set_level(logging.INFO)
    defaults.announce(logging.getLogger("test"))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "generation_config.json: num_beams, penalty_alpha: not supported, and not applied")
    ]


def test_neutral_values_are_no_warning(tmp_path: Path) -> None:
    for nothing in (None, *({name: values[0] for name, values in NOT_APPLIED.items() if values},)):
        content = dict.fromkeys(NOT_APPLIED) if nothing is None else nothing
        assert read(tmp_path, json.dumps(content)).not_applied == ()


def test_one_line_says_what_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    SamplingDefaults().announce(logging.getLogger("test"))
    assert not caplog.records
    read(tmp_path, '{"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 100}').announce(logging.getLogger("test"))
    assert caplog.messages == [
        "sampling defaults of generation_config.json: temperature 0.6, top_p 0.95, max_new_tokens 100; "
        "--generation-config none turns them off"
    ]


def test_choice(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert read_defaults(tmp_path / "model") == SamplingDefaults()
    (tmp_path / "model" / "generation_config.json").write_text('{"top_p": 0.5}')
    (tmp_path / "mine.json").write_text('{"top_p": 0.7}')
    for choice, top_p in {
        "auto": 0.5,
        "none": None,
        str(tmp_path / "mine.json"): 0.7,
        str(tmp_path / "model"): 0.5,
    }.items():
        assert read_defaults(tmp_path / "model", choice).top_p == top_p
    for missing in ("vllm", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"--generation-config .*: expected auto, none, or a file or folder"):
            read_defaults(tmp_path / "model", missing)
