"""The documents as a whole: links lead to pages and headings, and made pages are those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from lmkit.option import Note, Option, notes_of
from tests import pages
from tests.documents import ROOT, anchors, links, prose

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "calibration").glob("*.md")]
WRITTEN_BY_TESTS = {"docs/real_models.md"}  # `make test-real`


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in links(page.read_text()):
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file() or (path / "README.md").exists(), f"{target}: no such page"
        assert not heading or heading in anchors(path.read_text()), f"{target}: no such heading"


def test_named_pages_exist() -> None:
    """Code, messages and comments name pages as docs/NAME.md."""
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES, *OUTSIDE]
    for folder in ("lmkit", "benchmarks", "tests", "recipes", "docs/deploy"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".proto", "")]
    for path in (path for path in files if path.is_file()):
        for name in re.findall(r"(?<![\w/])docs/(?:[a-z_]+/)?[a-z_]+\.md\b", path.read_text(errors="ignore")):
            assert name in WRITTEN_BY_TESTS or (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_every_page_is_in_the_site_and_its_index() -> None:
    """Each page of docs/ stands in mkdocs.yml once, and docs/index.md links to it, or to its folder's index."""
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert sorted(name for name in listed if not name.startswith("repository/")) == sorted(there)
    found = {target.partition("#")[0] for target in links((DOCS / "index.md").read_text())}
    assert {name for name in there if "/" not in name} - {"index.md"} <= found
    notes = {target.partition("#")[0] for target in links((DOCS / "notes/index.md").read_text())}
    assert {name.removeprefix("notes/") for name in there if name.startswith("notes/")} - {"index.md"} <= notes


@pytest.mark.parametrize(("name", "make"), pages.PAGES.items())
def test_made_pages_are_those_of_the_code(name: str, make: Callable[[], str]) -> None:
    assert (DOCS / name).read_text() == make(), "run `python -m tests.pages`"


@pytest.mark.parametrize("struct", [struct for _, _, struct in pages.structs()], ids=lambda struct: struct.__name__)
def test_every_key_of_a_file_says_what_it_is(struct: type) -> None:
    helps = {**notes_of(struct, Note), **notes_of(struct, Option)}
    for field in struct.__struct_fields__:  # type: ignore[attr-defined]
        assert field in helps, f"{struct.__name__}.{field}"
        assert helps[field].help.endswith("."), f"{struct.__name__}.{field}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Annotated[int, Meta(ge=8)], "an integer from 8"),
        (Annotated[float, Meta(gt=0, le=1)] | Literal["auto"], "a number above 0 to 1 or `auto`"),
        (Annotated[Annotated[int, Meta(lt=9)] | None, Note("")], "an integer below 9"),
        (tuple[str, ...], "a list"),
        (pages.Recipe, "keys of its own"),
    ],
)
def test_values_of_a_key_are_in_words(kind: Any, text: str) -> None:
    assert pages.values(kind) == text


def test_links_and_headings_are_read_as_meant() -> None:
    text = "# A `b` c\n\n## Why, [x](y.md)?\n\n## Why, x\n\n[1](a.md#b) `[2](c.md)` ![](p.png) [w](https://x.org)\n"
    text += "```\n# d\n```\n"
    assert links(text) == ["y.md", "a.md#b", "p.png"]
    assert anchors(text) == {"a-b-c", "why-x", "why-x_1"}
    assert "c.md" not in prose(text)
