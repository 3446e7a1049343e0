"""A pipeline leaves the application's logging alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmkit import AsyncPipeline, pipeline
from lmkit.errors import ConfigError

PROGRAM = """
import logging, sys, warnings
loggers = lambda: {name: (l.level, l.propagate, l.handlers, l.disabled, l.filters)
    for name, l in {**logging.root.manager.loggerDict, "": logging.root}.items() if isinstance(l, logging.Logger)}
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.basicConfig(level=logging.INFO, handlers=[Keep()])
theirs = logging.getLogger("lmkit")
before, filters, show = loggers(), list(warnings.filters), warnings.showwarning
from lmkit import GenerationConfig, pipeline
with pipeline("demo", max_model_len=64, max_batch_size=1%s) as pipe:
    pipe("hi", GenerationConfig(max_new_tokens=2))
after = loggers()
changed = [name for name in before if after[name] != before[name]]
ours = [name for name, state in after.items() if name.startswith("lmkit.") and state != (0, True, [], False, [])]
print(changed, ours, warnings.showwarning is show, any(r.name.startswith("lmkit.") for r in records))
"""


def run(program: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_an_application_keeps_its_loggers_and_gets_the_records() -> None:
    out, err = run(PROGRAM % "")
    assert out == "[] [] True True"
    assert err == ""


@pytest.mark.slow
def test_a_log_level_asks_for_lines_on_stderr() -> None:
    out, err = run(PROGRAM % ", log_level='info'")
    assert out == "['lmkit'] [] True False"
    assert " I model: " in err


def test_an_unknown_level_is_one_error() -> None:
    for opening in (pipeline, AsyncPipeline):
        with pytest.raises(ConfigError, match="log level 'loud': expected DEBUG, INFO"):
            opening("demo", log_level="loud")
