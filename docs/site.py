"""What MkDocs needs beside mkdocs.yml: pages may link to files outside docs/, which the site has below repository/."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_config(config: Any) -> None:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # headings as GitHub names them


def _target(source: Path, link: str) -> Path:
    """The file that a page links to. A folder stands for its README."""
    path = Path(os.path.normpath(source.parent / link))
    return path / "README.md" if path.is_dir() else path


def _uri(path: Path) -> str:
    """Where a file stands in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.is_relative_to(DOCS):
            files.append(File.generated(config, _uri(page), abs_src_path=str(page)))
        for link in LINK.findall(page.read_text("utf-8")) if page.suffix == ".md" else ():
            path = _target(page, link)
            if path.is_file() and path.is_relative_to(ROOT) and path not in seen and not path.is_relative_to(DOCS):
                seen.add(path)
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links as they are inside the site."""
    source, here = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        path = _target(source, found[1])
        return posixpath.relpath(_uri(path), here or ".") if path.is_file() else found[1]

    return LINK.sub(inside, markdown)
