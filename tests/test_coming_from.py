"""docs/coming_from.md: the names on our side exist, and its rows say what the errors about such names say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import typer

import lmkit
from lmkit import neutral
from lmkit.cli.main import app
from lmkit.other_names import names
from lmkit.proxy.app import ROUTES as PROXY_ROUTES
from lmkit.serve.app import ROUTERS
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.text import Tokenizer
from lmkit.web.routes import is_known_elsewhere

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"(?!llama-)-{0,2}[a-z_][\w-]*")  # an option, a field or a command, alone; no other program
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
ROOT_COMMAND: Any = typer.main.get_command(app)
PYTHON = {
    name: advice
    for table in ("package", "Pipeline", "Response", "Session", "call", "pipeline")
    for name, advice in names(table).items()
}
REQUEST_FIELDS = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
REFUSED = {*neutral.GENERATION, *neutral.CHAT, *neutral.COMPLETION}  # by name, unless the value asks for nothing
OWNERS = {"pipe": lmkit.Pipeline, "pipe.tokenizer": Tokenizer, "session": lmkit.Session, "response": lmkit.Response}
NOTHING = {"lmkit has no beam search", "lmkit never runs code of a checkpoint"}


class Row(NamedTuple):
    table: str  # heading of the right column
    number: int
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.theirs} -> {self.ours}"


class Space(NamedTuple):
    """What a table's right column names: which names exist there, and the advice for names of others."""

    exists: Callable[[str], bool]
    advice: Mapping[str, str]


def rows() -> Iterator[Row]:
    table = ""
    for number, line in enumerate((ROOT / "docs/coming_from.md").read_text().splitlines(), 1):
        if not line.startswith("|"):
            table = ""
        elif not line.startswith("|---"):
            theirs, ours = (cell.strip() for cell in line.strip("|").split("|"))
            if table:
                yield Row(table, number, theirs, ours)
            table = table or ours.strip("`")


def command_at(words: list[str]) -> tuple[str, Any]:
    """`["bench", "online", "URL"]` -> ("bench online", the command). The first words name it."""
    command, path = ROOT_COMMAND, []
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
        path.append(word)
    return " ".join(path), command


def options(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def command_exists(text: str) -> bool:
    """`lmkit quantize MODEL -o OUT --recipe w8`: the command, its options, and a recipe."""
    words = text.split()
    path, command = command_at(words[1:])
    used = {word for word in words if word.startswith("-")}
    recipes = {word for before, word in pairwise(words) if before == "--recipe"}
    return bool(path) and used <= options(command) and recipes <= RECIPES


def of_command(path: str) -> Space:
    command = command_at(path.split())[1]
    return Space(lambda name: name.split()[0] in options(command) or command_exists(f"lmkit {path} {name}"),
                 names(f"lmkit {path}"))  # fmt: skip


def of_fields(fields: Any, advice: Mapping[str, str]) -> Space:
    return Space(lambda name: name in fields, advice)


def python_exists(text: str) -> bool:
    """`pipe.chat(...)`, `pipe.tokenizer.encode(...)`, `EngineConfig`, `response.text`, `lmkit.pipeline(...)`."""
    owner, _, name = text.partition("(")[0].rpartition(".")
    if owner in OWNERS:
        kind = OWNERS[owner]
        return name in {*dir(kind), *getattr(kind, "__annotations__", ()), "tokenizer"}  # Pipeline's __init__ sets it
    return owner in ("", "lmkit") and (name in lmkit.__all__ or name in OWNERS)


def route_exists(text: str) -> bool:
    method, _, path = text.rpartition(" ")
    served = {(m, r.path) for router in ROUTERS for r in router.routes for m in r.methods}
    served |= {(m, path) for path, methods in PROXY_ROUTES.items() for m in methods}
    return any(path == known and method in ("", m) for m, known in served)


SPACES: dict[str, Space] = {
    **{f"lmkit {path}": of_command(path) for path in ("quantize", "serve", "proxy", "bench online")},
    "lmkit": Space(command_exists, names("lmkit")),
    "EngineConfig": of_fields(lmkit.EngineConfig.__struct_fields__, names("EngineConfig")),
    "GenerationConfig": of_fields(lmkit.GenerationConfig.__struct_fields__, names("GenerationConfig")),
    "request field": of_fields(REQUEST_FIELDS, names("request")),
    "Python": Space(python_exists, PYTHON),
    "route": Space(route_exists, {}),
}
ROWS = list(rows())


def normal(name: str) -> str:
    """The key of a name in an advice table."""
    return name.lstrip("-").replace("-", "_")


def last_name(text: str) -> str:
    """`llm.generate(prompts)` -> generate"""
    return text.partition("(")[0].rpartition(".")[2].strip("=")


def looks_ours(text: str) -> bool:
    """Whether a piece of code is a name that should exist, and no value or file."""
    return text.startswith(("--", "lmkit ", "pipe", "session.", "response.")) or text in lmkit.__all__


def advised(row: Row) -> Iterator[tuple[str, str]]:
    """(name, advice) for each of their names in the row that an error of ours gives advice about."""
    table = SPACES[row.table].advice
    for code in CODE.findall(row.theirs):
        words = code.split()
        keys = [" ".join(words[:2]), words[0], normal(words[0]), last_name(code)]
        key = next((key for key in keys if key in table), None)
        if key is not None:
            yield key, table[key]


def agrees(row: Row, advice: str) -> bool:
    if advice in NOTHING:
        return row.ours.startswith("no")
    if not advice.startswith("use ") or "over HTTP" in advice:
        return True
    code = CODE.match(advice, len("use "))
    name = code[1] if code else normal(re.split(r"[\s,;:(]", advice)[1])
    return name in (row.ours if code else row.ours.replace("-", "_"))


def test_every_table_is_checked() -> None:
    assert {row.table for row in ROWS} == set(SPACES)
    assert len(ROWS) > 150


def test_names_on_our_side_exist() -> None:
    """Those that a cell begins with, as names of its column, and `lmkit ...`, `pipe...` and options anywhere."""
    for row in ROWS:
        exists = SPACES[row.table].exists
        wanted = CODE.findall(row.theirs) if row.ours.startswith("same") else []
        beginning = re.match(r"(`[^`]+`(, | and )?)*", row.ours)
        wanted += CODE.findall(beginning[0]) if beginning else []
        for code in wanted:
            assert exists(code), f"{row}: there is no {code} in {row.table}"
        for code in filter(looks_ours, CODE.findall(row.ours)):
            anywhere = [exists, command_exists, python_exists]
            assert any(is_there(code) for is_there in anywhere), f"{row}: there is no {code}"


def test_rows_agree_with_the_errors() -> None:
    for row in ROWS:
        for name, advice in advised(row):
            assert agrees(row, advice), f"{row}: the error says: {name}: {advice}"


def test_errors_know_the_names_of_the_page() -> None:
    """Who writes a name of the left column is told ours, or that there is none."""
    for row in ROWS:
        space = SPACES[row.table]
        if space.advice and not row.ours.startswith("same"):
            known = {name for name, _ in advised(row)} | (REFUSED if row.table == "request field" else set())
            for code in filter(NAME.fullmatch, CODE.findall(row.theirs)):
                is_known = space.exists(code) or space.exists(f"lmkit {code}") or {code, normal(code)} & known
                assert is_known, f"{row}: no advice for {code}"


def test_routes_that_we_lack_are_named_in_a_404() -> None:
    for row in ROWS:
        if row.table == "route" and row.ours.startswith("no"):
            assert all(map(is_known_elsewhere, CODE.findall(row.theirs))), row
