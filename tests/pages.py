"""The pages that are made from the code: `python -m tests.pages` writes those of docs/ anew."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer
from fastapi.routing import APIRoute

from lmkit import errors
from lmkit.cli.main import app
from lmkit.cluster.config import ClusterConfig, Group, Scaling
from lmkit.conflicts import CONFLICTS, PROCESSES
from lmkit.environment import VARIABLES
from lmkit.option import Note, kinds, notes_of, options_of
from lmkit.proxy import app as proxy
from lmkit.proxy.accounts.account import Price
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.rules import Rule, When
from lmkit.quant.recipe import Recipe
from lmkit.quant.sections import CalibrationRecipe, KVRecipe, SchemeRecipe
from lmkit.quant.steps.registry import STEPS
from lmkit.serve.app import ROUTERS
from lmkit.serve.metrics import ASKED, HISTOGRAMS
from tests.documents import ROOT
from tests.features import features

PACKAGE = ROOT / "lmkit"
MADE = "Made from the code by `python -m tests.pages`; a test compares it."
OPTIONS = """\
Each is shown by `--help` as well. Those of `lmkit serve` and `lmkit proxy` are variables of the environment, too
([operate](operate.md#environment-variables))."""
TOGETHER = """\
The first rows are of `lmkit serve --role` and `--dp`. "no NAME" means that an option is left out, or turned off."""
FILES = """\
Files are YAML, and read strictly: an unknown key or a value out of range is one line that names the place. That of
`lmkit serve --config` has the options of `lmkit serve`. [Quantization](quantization.md), [routing](routing.md) and
[cluster](cluster.md) explain the others."""
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", tuple: "a list", dict: "a map"}
# Where a route is described: by the module of its handler, the longest name first.
READ = {
    "lmkit.serve.responses": "apis.md#responses", "lmkit.serve.responses.conversations": "apis.md#conversations",
    "lmkit.serve.stored_chats": "apis.md#stored-chats", "lmkit.serve.messages": "apis.md#messages",
    "lmkit.serve.generate": "apis.md#token-ids-in-and-out", "lmkit.serve.embeddings": "embeddings.md",
    "lmkit.serve.batches": "batches.md", "lmkit.serve.ollama": "ollama.md", "lmkit.serve.llama_cpp": "ollama.md",
    "lmkit.serve.sleep": "operate.md#sleep", "lmkit.serve.adapters": "adapters.md",
    "lmkit.serve.metrics": "serving.md#metrics", "lmkit.serve": "serving.md",
}  # fmt: skip
DOCSTRING = re.compile(r'\A(?:#.*\n)*"""(.*?)"""', re.DOTALL)
FAMILIES = re.compile(r"(?:Counter|Gauge|Histogram|_gauge|_counter)(?:MetricFamily)?")  # what makes a metric


def sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    found = re.match(r"(.*?[^.A-Z][.:])(?: |$)(?![a-z(])", line)
    return (found.group(1) if found else line).rstrip(".:")


def table(rows: list[tuple[str, ...]], *columns: str) -> str:
    cells = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """(name, command, its context) of a command and of those below it that do something."""
    context = typer.Context(command, info_name=" ".join(words))
    inner = getattr(command, "commands", {})
    if not inner or (command.invoke_without_command and words[1:]):
        yield " ".join(words), command, context
    for name, each in inner.items():
        yield from commands(each, (*words, name))


def options(command: Any, context: Any) -> str:
    """A table of a command's arguments and options, in the groups of its help, with variables of the environment."""
    rows, prefix = [], getattr(command, "prefix", "")
    for param in command.get_params(context):
        if param.name != "help" and (record := param.get_help_record(context)) is not None:
            written, text = (" ".join(part.split()) for part in record)
            panel = getattr(param, "rich_help_panel", None)
            group = panel or ("Arguments" if param.param_type_name == "argument" else "")
            variable = (f"`{prefix}{param.name.upper()}`",) if param.name != "print_config" else ("",)
            rows.append((f"`{written}`", text, group, *(variable if prefix else ())))
    return table(rows, "option", "", "group", *(("variable",) if prefix else ()))


def variables() -> str:
    """A table of the variables that are no options of one command."""
    return table([(f"`{v.name}`", v.readers, v.help) for v in VARIABLES.values()], "variable", "read by", "")


def meaning(function: Any) -> str:
    return sentence(inspect.getdoc(function) or "") if inspect.isroutine(function) else ""


def server_routes() -> str:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    rows = [
        (f"`{', '.join(sorted(route.methods))} {route.path_format}`", meaning(route.endpoint), page(route.endpoint))
        for route in routes
    ]
    return table(sorted(rows, key=lambda row: row[0].split()[-1].strip("`")), "route", "", "read")


def page(function: Any) -> str:
    name = max((name for name in READ if function.__module__.startswith(name)), key=len)
    return f"[{READ[name].partition('.')[0]}]({READ[name]})"


def proxy_routes() -> str:
    rows: list[tuple[str, ...]] = [
        (f"`{method} {path}`", route.access.name.lower(), meaning(route.handler))
        for path, methods in sorted(proxy.ROUTES.items())
        for method, route in methods.items()
    ]
    return table(rows, "route", "key's role", "")


def metrics() -> str:
    """The names and help of all metrics, read off the calls that make them."""
    rows = [(f"`lmkit:{name}`", text) for name, (text, _) in {**HISTOGRAMS, **ASKED}.items()]
    for path in sorted((PACKAGE / "serve").rglob("*.py")) + sorted((PACKAGE / "proxy").rglob("*.py")):
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source))) if "prometheus_client" in source else []
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        names = dict(named for node in nodes if (named := _named(node)) and stored[named[0]] == 1)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            texts = [_text(argument) or names.get(ast.unparse(argument), "") for argument in call.args[:2]]
            if FAMILIES.fullmatch(function) and len(texts) == 2 and texts[0]:
                rows.append((f"`{texts[0]}`", texts[1]))
    return table(sorted(set(rows)), "metric", "")


def _named(node: ast.AST) -> tuple[str, str] | None:
    """(name, text) of the assignment of a text."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, _text(node.value)
    return None


def _text(node: ast.expr) -> str:
    """A string as it is written; a field of an f-string is its name in braces."""
    if isinstance(node, ast.JoinedStr):
        parts = (value if isinstance(value, ast.Constant) else None for value in node.values)
        names = (ast.unparse(value.value) for value in node.values if isinstance(value, ast.FormattedValue))
        return "".join(str(part.value) if part else f"{{{next(names)}}}" for part in parts)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def codes() -> str:
    notes = dict(re.findall(r'^    "(\w+)": \d+,  # (.+)$', inspect.getsource(errors), re.MULTILINE))
    rows = [(f"`{code}`", str(status), notes.get(code, "")) for code, status in errors.HTTP_STATUS.items()]
    return table(rows, "code", "HTTP status", "")


def conflicts() -> str:
    """The table of lmkit.conflicts. What a reason quotes of a configuration stands as a word."""
    words = {"shared": PROCESSES, "alone": "one process", "architecture": "this model", "max_ranks": "a few"}
    words |= {name: f"{name.upper()}" for name in ("cluster", "devices", "pp", "ep")}
    rows = [
        (_side(row.option), _side(row.with_), row.reason.format_map(words | {"options": row.option}))
        for row in CONFLICTS
    ]
    return table(rows, "option", "with", "why, and what to do")


def _side(side: str) -> str:
    """Names of options as code, traits as words."""
    first, _, name = side.rpartition(" ")
    return f"`{side}`" if not first else f"no `{name}`" if first == "no" else side


@cache
def reference() -> str:
    """docs/reference.md: options, routes, metrics and errors."""
    parts = ["# Reference", f"{MADE}\n[Serving](serving.md) explains the fields of requests."]
    parts += ["## Options", OPTIONS]
    for name, command, context in commands(typer.main.get_command(app), ("lmkit",)):
        parts += [f"### {name}", sentence(command.help or command.short_help or ""), options(command, context)]
    parts += ["## Environment variables", variables()]
    parts += ["## Options that do not go together", TOGETHER, conflicts()]
    parts += ["## Keys of files", FILES, *keys()]
    parts += ["## Routes", "### Of a server", server_routes(), "### Of a proxy"]
    parts += ["All other routes of `forwarded_routes` go to a node.", proxy_routes()]
    parts += ["## Metrics", "Counters end in `_total` on the page. `{prefix}` is `lmkit` and `vllm`.", metrics()]
    parts += ["## Errors", "The code of an error, and the HTTP status that comes with it.", codes()]
    return "\n\n".join(part for part in parts if part) + "\n"


def structs() -> Iterator[tuple[str, str, Any]]:
    """(heading, where it stands, struct) of everything that files hold."""
    yield "Recipe", "", Recipe
    for key, section in {"scheme": SchemeRecipe, "kv": KVRecipe, "calibration": CalibrationRecipe}.items():
        yield f"Recipe: {key}", "", section
    for name, step in STEPS.items():
        if step.__struct_fields__:
            yield f"Recipe: steps: {name}", sentence(inspect.getdoc(step) or "") + ".", step
    yield "File of lmkit proxy", "Times are in seconds. Options of `lmkit proxy` are keys, too.", ProxyConfig
    for key, part in {"nodes": NodeConfig, "rules": Rule, "rules: when": When, "prices": Price}.items():
        yield f"File of lmkit proxy: {key}", "", part
    yield "File of lmkit up", "Times are in seconds.", ClusterConfig
    yield "File of lmkit up: models", "", Group
    yield "File of lmkit up: scaling of a model", "", Scaling


def keys() -> Iterator[str]:
    """Headings and tables of the keys of all files."""
    for heading, text, struct in structs():
        limited, helps = kinds(struct, limits=True), {name: note.help for name, note in notes_of(struct, Note).items()}
        if struct is not ProxyConfig:  # whose options stand at its command in the same form
            helps |= {name: option.help for name, option in options_of(struct).items()}
        fields = [field for field in msgspec.structs.fields(struct) if field.name in helps]
        rows = [(f"`{f.name}`", values(limited[f.name]), shown(f), helps[f.name]) for f in fields]
        yield from (f"### {heading}", text, table(rows, "key", "values", "default", ""))


def limits(meta: msgspec.Meta) -> Iterator[str]:
    for word, limit in (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt)):
        if limit is not None:
            yield f"{word} {limit:.12g}"


def values(kind: Any) -> str:
    """The values of a type, in words: `an integer of at least 8`, `16, 8, 4 or auto`."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        return " ".join([values(inner), *(text for n in notes if isinstance(n, msgspec.Meta) for text in limits(n))])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return " or ".join(values(part) for part in get_args(kind) if part is not type(None))
    return WORDS.get(get_origin(kind) or kind, "keys of its own")


def shown(field: Any) -> str:
    """The default of a field, if it is one value."""
    if field.required:
        return "required"
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if isinstance(value, int | float | str) and value != "" else ""


def docstring(path: Path) -> str:
    found = DOCSTRING.match(path.read_text())
    return sentence(found.group(1)) if found else ""


@cache
def modules() -> str:
    """docs/modules.md: every module of lmkit with the first sentence of its docstring, room by room."""
    parts = ["# Modules", f"{MADE}\n[Architecture](architecture.md) has the reading order and the rules."]
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        paths = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        package = docstring(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
        if paths:
            rows = [(f"`{path.stem}`", docstring(path)) for path in paths]
            parts += [f"## {folder.relative_to(ROOT).as_posix()}", package and f"{package}.", table(rows, "module", "")]
    return "\n\n".join(part for part in parts if part) + "\n"


PAGES = {"reference.md": reference, "modules.md": modules, "features.md": features}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())
