"""`--log-format json`: one object a line, from lmkit, from libraries and from the engine's process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from lmkit import log
from tests.serve.live import Server


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    loggers = logging.getLogger("lmkit"), logging.getLogger()
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_each_line_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("INFO", process="engine", log_format="json")
    logging.getLogger("lmkit.test").info("two\nlines \x1b[31m", extra={"fields": {"status": 200}})
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("somebody").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO", "process": "engine", "logger": "lmkit.test", "message": "two\nlines \x1b[31m", "status": 200,
    }  # fmt: skip
    assert (second["logger"], second["level"]) == ("somebody", "ERROR")
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ValueError: no")


def test_the_lines_of_a_server() -> None:
    """Those of a request have its fields. Neither its prompt nor its key is in the log."""
    with Server("--log-format", "json", "--api-key", "a-secret-key") as server:
        body = {"model": "demo", "prompt": "a-secret-prompt", "max_tokens": 1, "user": "eve"}
        headers = {"authorization": "Bearer a-secret-key", "x-request-id": "abc"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
        assert server.post("/v1/completions", body | {"n": 0}, headers=headers).status_code == 400
        server.wait_for_line('"status": 400')
        server.terminate()
    lines = [json.loads(line) for line in server.log.splitlines() if not line.startswith("serving ")]
    good, bad = [line for line in lines if line["logger"] == "lmkit.web.access_log"]
    expected: dict[str, Any] = {
        "method": "POST", "path": "/v1/completions", "status": 200, "client": "127.0.0.1", "request_id": "abc",
        "user": "eve",
    }  # fmt: skip
    assert good.items() >= expected.items()
    assert (bad["status"], bad["error"]) == (400, "invalid_request")
    assert good["key"] != "a-secret-key"
    assert "a-secret" not in server.log
