"""What a reader of the documents meets: lines that fit a screen, commands that exist and print what is shown."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lmkit.cli.main import app
from lmkit.errors import ConfigError
from tests.documents import ROOT, Block, blocks, commands
from tests.reader import CHANGED, Reader, environment, lacks, run

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "calibration").glob("*.md")])
RUN = [path for path in DOCUMENTS if re.search(r"^\$ ", path.read_text(), re.MULTILINE)]
PYTHON = ["README.md", "docs/python.md"]
MOST = 120  # characters of a line; a table's row and a code block's line may have more


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of what is neither a table nor in a code block."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_lines_fit_a_screen(document: Path) -> None:
    long = [f"{number}: {len(line)}" for number, line in prose(document.read_text()) if len(line) > MOST]
    assert not long, f"{document.relative_to(ROOT)}: lines of more than {MOST} characters: {', '.join(long)}"


@pytest.mark.parametrize(("document", "lines"), [("README.md", 150), ("CHANGELOG.md", 200)])
def test_what_everybody_reads_is_short(document: str, lines: int) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= lines


def test_tables_and_code_may_be_wider() -> None:
    wide = "x" * 200
    assert list(prose(f"a\n| {wide} |\n```\n{wide}\n```\n{wide}\n")) == [(1, "a"), (6, wide)]


@functools.cache
def parser() -> Any:
    """The `lmkit` command, whose commands do nothing."""

    def quiet(command: Any) -> None:
        command.callback = lambda **options: None
        for inner in getattr(command, "commands", {}).values():
            quiet(inner)

    command = typer.main.get_command(app)
    quiet(command)
    return command


def written(text: str) -> Iterator[tuple[str, bool]]:
    """The words after `lmkit` of each command in a document, and whether it is whole: prose may name a part of one."""
    for block in blocks(text):
        refused = [f"$ {command.text}" for command in commands(block) if command.is_refused]
        code = "\n".join(line for line in block.lines if line not in refused).replace("\\\n", " ")
        for found in re.finditer(r"^(?:\$ )?(?:\w+=\S+ )*(?:.* -m )?lmkit ([a-z-].*)", code, re.MULTILINE):
            yield found.group(1), True
    for found in re.finditer(
        r"`lmkit ([a-z-][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        yield found.group(1), False


def arguments(words: str) -> list[str]:
    """The arguments of a command: without what a shell takes, a column of explanation, and optional words."""
    cut = re.split(r" [|>&#]| {2,}", re.sub(r"\n\s*", " ", words))[0]
    return [word for word in shlex.split(cut) if not re.fullmatch(r"\[.*\]|\.\.\.", word)]


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name != "modules.md"], ids=name)
def test_every_command_exists(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text("model: demo\n")
    for words, is_whole in written(document.read_text()):
        try:
            parser().main(arguments(words), standalone_mode=False)
        except ConfigError as error:
            if is_whole or not re.search("is missing|needs a value", str(error)):
                pytest.fail(f"{name(document)}: `lmkit {words}`: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("document", RUN, ids=name)
def test_commands_do_what_is_shown(document: Path, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        for block in blocks(document.read_text()):
            for command in [] if block.not_run else commands(block):
                printed = reader.type(command)
                if command.text.split()[1] not in CHANGED:
                    line = lacks(printed, command.shown)
                    assert not line, f"{name(document)}: $ {command.text}\ndoes not print\n{line}\nbut\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("document", PYTHON)
def test_python_does_what_is_shown(document: str, tmp_path: Path) -> None:
    """The blocks of a document run in order in one process."""
    found = [block for block in blocks((ROOT / document).read_text()) if not block.not_run]
    pairs = list(zip(found, [*found[1:], Block("", [], "", False)], strict=True))
    code = [(block, after) for block, after in pairs if block.language == "python"]
    program = tmp_path / "document.py"
    program.write_text("".join("\n".join([*block.lines, 'print("\\n<end>")', ""]) for block, _ in code))
    printed = run([sys.executable, str(program)], tmp_path, environment(tmp_path)).split("<end>\n")
    assert len(printed) == len(code) + 1
    for text, (block, after) in zip(printed, code, strict=False):
        if after.is_next and not after.language:
            line = lacks(text, after.lines, is_python=True)
            assert not line, f"{document}:\n" + "\n".join(block.lines) + f"\ndoes not print\n{line}\nbut\n{text}"


def test_documents_are_read_as_meant() -> None:
    shell, python = "```\n$ x 'y\nz'\nout\n$ w\n```\n\n", "```python\n1\n```\n\n```\n1\n```\n\n"
    text = f"a\n\n<!-- not run: needs a GPU -->\n{shell}{python}    lmkit x\n"
    found = list(blocks(text))
    assert [block.not_run for block in found] == ["needs a GPU", "", "", ""]
    assert [block.is_next for block in found] == [False, True, True, True]
    assert commands(found[0]) == [("x 'y\nz'", ["out"]), ("w", [])]
    assert found[3].lines == ["lmkit x"]


def test_shown_output_is_compared() -> None:
    printed = "a 12.5 s\nid-0123456789ab\nfirst\nsecond\n"
    assert not lacks(printed, ["a 9 s", "id-ffffffffffff", "...", "second"])
    assert lacks(printed, ["second", "first"]) == "first"
    assert lacks(printed, ["third"]) == "third"
    assert not lacks("'x' is 1", ['"other" is 2'], is_python=True)
    assert lacks("'x' is 1", ["'x' was 1"], is_python=True)


def test_a_command_that_does_not_exist_is_found() -> None:
    text = "`lmkit serve --no-such`\n\n```\n$ A=1 lmkit inspect demo --nothing\nlmkit bench fast   quickly\n```\n"
    found = list(written(text))
    assert found == [("inspect demo --nothing", True), ("bench fast   quickly", True), ("serve --no-such", False)]
    for words, _ in found:
        with pytest.raises(ConfigError, match=r"no option|no command"):
            parser().main(arguments(words), standalone_mode=False)
