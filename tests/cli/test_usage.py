"""A mistake on the command line is one line that names what to write instead; help reads well in 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.errors import ConfigError
from lmkit.other_names import names
from tests.cli.commands import mistake

ROOT: Any = typer.main.get_command(app)


def every_command(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, TyperGroup):
            yield from every_command(command, (*path, name))


COMMAND_PATHS = [path for path, _ in every_command()]


def option_names(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("qunatize", "no command `qunatize`; did you mean quantize?"),
        ("bench onlin", "no command `bench onlin`; did you mean online?"),
        ("bench nothing", "no command `bench nothing`; there are throughput, latency, online"),
        ("lite auto_gptq m", "no command `lite auto_gptq`: use `lmkit quantize MODEL -o OUT --recipe w4"),
        ("serve api_server m", "no command `serve api_server`: use `lmkit serve MODEL`"),
        ("check_env", "no command `check_env`: use `lmkit doctor`"),
        ("bench serve", "no command `bench serve`: use `lmkit bench online URL`"),
        ("--versoin", "no option --versoin; did you mean --version?"),
        ("--json doctor", "no option --json; options of a command come after its name"),
        ("quantize demo -o x --w-bits 4", "quantize: no option --w-bits: use --bits"),
        ("quantize demo -o x --w_group_size 64", "quantize: no option --w_group_size: use --group-size; channel"),
        ("quantize demo -o x --calib-samples 4", "quantize: no option --calib-samples: use --num-samples"),
        ("quantize demo -o x --grp-size 4", "quantize: no option --grp-size; did you mean --group-size?"),
        ("quantize demo -o x --kv_bits 4", "quantize: no option --kv_bits; did you mean --kv-bits?"),
        ("quantize demo -o x --zzz", "quantize: no option --zzz; see `lmkit help quantize`"),
        ("quantize demo", "quantize: --output or -o is missing: Folder to write"),
        ("quantize", "quantize: MODEL is missing: A checkpoint folder"),
        ("quantize demo -o x y", "quantize: got unexpected extra argument(s) (y)"),
        ("quantize demo -o x --recipe", "--recipe needs a value"),
        ("quantize demo -o x --json=3", "--json takes no value"),
        ("quantize demo -o x --seed many", "--seed 'many': expected an integer"),
        ("eval demo --seq-len 1", "--seq-len '1': expected an integer of at least 2"),
        ("chat demo --temperature warm", "--temperature 'warm': expected a number"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: str, line: str) -> None:
    assert mistake(*arguments.split()).startswith(line)


@pytest.mark.parametrize("path", COMMAND_PATHS, ids=" ".join)
def test_help_of_every_command(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["help", *path])
    assert shown.exit_code == 0
    assert shown.stdout == CliRunner().invoke(app, [*path, "-h"]).stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


def test_no_short_help_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ([], ["bench"], ["proxy", "--help"], ["help"]):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0
        assert "Commands:" in shown.stdout
        assert "..." not in shown.stdout.partition("Commands:")[2]


def test_a_group_of_options_has_a_heading() -> None:
    from lmkit.cli.usage import Command

    grouped = typer.Typer(rich_markup_mode=None)

    def command(a: int = typer.Option(1, rich_help_panel="Memory"), b: int = 2) -> None: ...

    grouped.command(cls=Command)(command)
    shown = CliRunner().invoke(grouped, ["--help"]).stdout
    assert shown.index("Options:") < shown.index("--b") < shown.index("Memory:") < shown.index("--a")


def test_names_of_other_tools_are_none_of_ours() -> None:
    """And the option that an advice says to use exists."""
    paths = {" ".join(path): command for path, command in every_command()}
    assert not names("lmkit").keys() & paths.keys()
    found = {path: names(f"lmkit {path}") for path in paths}
    assert {path for path, advised in found.items() if advised} > {"serve", "proxy", "quantize", "bench online"}
    for path, advised in found.items():
        options = option_names(paths[path])
        for name, advice in advised.items():
            assert f"--{name.replace('_', '-')}" not in options
            with pytest.raises(ConfigError) as raised:
                ROOT.main([*path.split(), f"--{name}", "1"])
            words = str(raised.value).replace(",", " ").replace(";", " ").replace(":", " ").split()
            assert all(word in options for word in words if word.startswith("--") and word != f"--{name}"), raised.value
            assert advice.split()[0] in words


def test_ctrl_c_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt("2 of 3 layers are kept")

    monkeypatch.setattr("lmkit.cli.doctor._packages", interrupted)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 130
    assert result.stderr == "lmkit: interrupted: 2 of 3 layers are kept\n"


def test_a_wrong_environment_is_a_line() -> None:
    for variable in ("LMKIT_LOG_LEVEL", "LMKIT_NUM_THREADS", "LMKIT_CPU_ISA"):
        run = [sys.executable, "-m", "lmkit", "doctor"]
        result = subprocess.run(run, capture_output=True, text=True, check=False, env={**os.environ, variable: "foo"})
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"lmkit: {variable}='foo': expected ")
        assert result.stderr.count("\n") == 1


def test_completion() -> None:
    code = "from lmkit.cli.main import main; main()"
    words = {"_LMKIT_COMPLETE": "complete_bash", "COMP_WORDS": "lmkit quantize --kv", "COMP_CWORD": "2"}
    run = [sys.executable, "-c", f"import os, sys; sys.argv = ['lmkit']; os.environ.update({words}); {code}"]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["--kv-bits"], result
