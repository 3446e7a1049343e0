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
with pipeline("demo", max_model_len=64, max_batch_size=1) as pipe:
    pipe("hi", GenerationConfig(max_new_tokens=2))
after = loggers()
changed = [name for name in before if after[name] != before[name]]
ours = [name for name, state in after.items() if name.startswith("lmkit.") and state != (0, True, [], False, [])]
print(changed, ours, warnings.showwarning is show, any(r.name.startswith("lmkit.") for r in records))
records.clear()
print("now with a level", file=sys.stderr)
with pipeline("demo", max_model_len=64, max_batch_size=1, log_level="info"):
    pass
print([name for name in before if loggers()[name] != before[name]], any(r.name.startswith("lmkit.") for r in records))
"""


@pytest.mark.slow
def test_an_application_keeps_its_loggers_unless_it_asks_for_lines_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] [] True True", "['lmkit'] False"]
    silent, spoken = done.stderr.split("now with a level\n")
    assert silent == ""
    assert " I model: " in spoken


def test_an_unknown_level_is_one_error() -> None:
    for opening in (pipeline, AsyncPipeline):
        with pytest.raises(ConfigError, match="log level 'loud': expected DEBUG, INFO"):
            opening("demo", log_level="loud")
