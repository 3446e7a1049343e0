"""Strict configuration: wrong values are one clear error, nothing is ignored."""

from __future__ import annotations

import io
import logging
import os
import sys

import pytest

from lmkit import log
from lmkit.config import EngineConfig, parse, parse_bytes
from lmkit.environment import calm_openmp, environment
from lmkit.errors import HTTP_STATUS, ConfigError, RequestError
from lmkit.turbo.request import SamplingParams


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"block_sise": 32}, "block_sise"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "32"}, "block_size"),
        ({"kv_dtype": "int5"}, "kv_dtype"),
        ({"max_queue": 1.5}, "max_queue"),
    ],
)
def test_engine_config_is_strict(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe.yaml: .*{message}"):
        parse(data, EngineConfig, "recipe.yaml")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("64kb", 64 << 10), (" 3 T ", 3 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "x", "-1G", "0", "1Q", "nan", "inf", "1e400G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        parse_bytes(text, "--kv-memory")


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="LMKIT_NUM_THREADS"):
        environment()
    monkeypatch.setenv("LMKIT_NUM_THREADS", "2")
    for level, read in (("debug", "DEBUG"), ("", "INFO"), ("WARNING", "WARNING")):
        monkeypatch.setenv("LMKIT_LOG_LEVEL", level)
        assert environment().log_level == read
    monkeypatch.setenv("LMKIT_LOG_LEVEL", "foo")
    with pytest.raises(ConfigError, match="LMKIT_LOG_LEVEL='foo': expected DEBUG, INFO, WARNING, ERROR, CRITICAL"):
        environment()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": NAN}, {"temperature": INF}, {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1},
        {"min_p": 2}, {"repetition_penalty": 0}, {"max_tokens": -1}, {"max_tokens": 5, "min_tokens": 6},
        {"seed": -1}, {"seed": 1 << 64}, {"stop": ("",)}, {"stop": ("a",) * 17}, {"stop_token_ids": (100,)},
        {"logit_bias": {100: 1.0}}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: NAN}}, {"logprobs": 21},
        {"logit_bias": dict.fromkeys(range(1025), 0.0)}, {"presence_penalty": -INF}, {"frequency_penalty": 1e9},
    ],
)  # fmt: skip
def test_generation_config_refuses(change: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**change).validate(100)  # type: ignore[arg-type]
    assert caught.value.status == 400
    assert caught.value.param in change


def test_defaults_are_valid() -> None:
    SamplingParams().validate(100)


def test_every_error_code_has_a_status() -> None:
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())
    with pytest.raises(KeyError):
        RequestError("no_such_code", "")


def test_log_lines_cannot_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("INFO")
    logging.getLogger("lmkit.test").info("user %s", "eve\n2026 I lmkit: fake\x1b[31m")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_library_that_repeats_itself_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("INFO")
    for i in range(1000):
        logging.getLogger("asyncio").error("cannot accept\n%d", i)
    logging.getLogger("asyncio").info("no warning")
    logging.getLogger("py.warnings").warning("deprecated")
    lines = capsys.readouterr().err.splitlines()
    assert lines[log.BURST - 1].endswith(f" E asyncio: cannot accept\\n{log.BURST - 1}")
    assert len(lines) == log.BURST + 1
    assert " W py.warnings: " in lines[-1]


def test_the_number_of_lines_left_out_is_told_after_the_period() -> None:
    now = 0.0
    sparing = log.Sparing(lambda: now)

    def record(line: int = 1) -> logging.LogRecord:
        return logging.LogRecord("asyncio", logging.ERROR, "a.py", line, "cannot %s", ("accept",), None)

    assert [sparing.filter(record()) for _ in range(9)] == [True] * log.BURST + [False] * (9 - log.BURST)
    assert sparing.filter(record(line=2))
    now = log.PERIOD
    first = record()
    assert sparing.filter(first)
    assert first.getMessage() == "cannot accept (4 more like this were not written)"
    again = record()
    assert sparing.filter(again)
    assert again.getMessage() == "cannot accept"


def test_log_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that stood in for stderr at set-up is closed later, as pytest's is: no line is lost or written there."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.setup("INFO")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    logging.getLogger("lmkit.test").info("hello")
    assert "hello" in second.getvalue()
    assert "Logging error" not in second.getvalue()


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_openmp_sleeps_soon_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    calm_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("text", "value"), [("300M", 300 << 20), (" 2g", 2 << 30), ("30%", "30%"), ("12.50 %", "12.5%")]
)
def test_sizes_of_an_engine_may_be_texts(text: str, value: int | str) -> None:
    assert EngineConfig(kv_memory=text).kv_memory == value  # type: ignore[arg-type]
    assert EngineConfig(kv_memory=value).kv_memory == value  # type: ignore[arg-type]
    assert EngineConfig(kv_host_memory="1G", image_memory="7M").image_memory == 7 << 20  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["lots", "0%", "101%", "-3%", "%", "0", ""])
def test_sizes_of_an_engine_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory: .*; write for example|kv_memory: .* greater than zero"):
        EngineConfig(kv_memory=text)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_host_memory: '30%' is not a size"):
        EngineConfig(kv_host_memory="30%")  # type: ignore[arg-type]
