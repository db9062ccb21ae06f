"""The hooks of mkdocs.yml: pages from outside docs/, notebooks among them, and links to files that are no pages.

A page links to files of the repository as GitHub reads them; here these are public links (tools/public_links.py).
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from public_links import LINK, public_link

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ctxext"]["repository"]
# Files of the repository that are pages of the site, by their path there.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "recipes/README.md": "recipes.md",
}
NOTEBOOKS = {path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}

# What a page's comment `<!-- filter -->` becomes: a box for the tables below it, which filter.js shows and serves.
FILTER = (
    '<div class="table-filter" role="search" hidden><input type="search" placeholder="Filter the rows" '
    'aria-label="Filter the rows of the tables below"><output></output></div>'
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every method's card into the navigation, in the order of the list of methods."""
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    cards = ["README.md", *re.findall(r"^\| \[`\w+`\]\((\w+\.md)\)", index, re.M)]
    assert config.nav is not None
    for section in config.nav:
        if section.get("Methods"):
            section["Methods"] = [f"methods/{card}" for card in cards]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, page in NOTEBOOKS.items():
        resources = {"unique_key": Path(source).stem, "output_files_dir": Path(source).stem}
        text, found = MarkdownExporter().from_filename(str(ROOT / source), resources=resources)
        files.append(File.generated(config, page, content=text))
        for picture, content in found["outputs"].items():
            files.append(File.generated(config, f"notebooks/{picture}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site has them."""
    own, outside = page.file.src_uri, {**PAGES, **NOTEBOOKS}
    source = next((path for path, name in outside.items() if name == own), f"docs/{own}")

    def moved(link: re.Match[str]) -> str:
        image, words, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = outside.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if path == "docs":
            there = "index.md"
        if there is not None and is_served(files, there):
            return f"{image}[{words}]({posixpath.relpath(there, posixpath.dirname(own) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs reports it
        return public_link(link, path, REPOSITORY)

    return LINK.sub(moved, markdown).replace("<!-- filter -->", FILTER)


def on_post_build(config: MkDocsConfig) -> None:
    """Let the calculator, which mkdocs copies as it is, link to the site's pages."""
    page = Path(config.site_dir, "calculator", "index.html")
    text = page.read_text(encoding="utf-8").replace("../../README.md", "../index.html")
    page.write_text(re.sub(r'href="(\.\./\w+)\.md"', r'href="\1.html"', text), encoding="utf-8")


def is_served(files: Files, path: str) -> bool:
    found: Any = files.get_file_from_path(path)
    return found is not None and not found.inclusion.is_excluded()
