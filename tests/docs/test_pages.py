"""The pages that are written from the code are current, their links hold on GitHub, and the site builds strictly."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cli_reference
import pytest

from ctxext.encodings.rope import RopeGeometry, rotations

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MARKDOWN = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("recipes/*.md")]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_a_card_with_its_figure() -> None:
    methods = script("methods")
    for name, text in methods.pages().items():
        assert (methods.FOLDER / name).read_text(encoding="utf-8") == text, "run python docs/methods.py"
    written = {path.name for path in methods.FOLDER.glob("*.md")}
    assert written == set(methods.pages())
    drawn = {cls.name for cls in methods.list_methods() if methods.example(cls) is not None}
    assert {path.stem for path in methods.FOLDER.glob("*.svg")} == drawn


def test_every_entry_of_the_bibliography_is_a_methods_paper_in_its_year() -> None:
    methods = script("methods")
    papers = {cls.paper for cls in methods.list_methods()}
    entries = (methods.FOLDER / "papers.bib").read_text(encoding="utf-8")
    assert len(re.findall("^@", entries, re.M)) == len({paper.url for paper in papers})
    for paper in papers:
        assert f"{{{paper.year}}}" in methods.bibtex(paper), paper


def test_a_figure_shows_the_methods_own_numbers(tmp_path: Path) -> None:
    """λ of the last pair: 4 for NTK-aware, 1 for one that keeps it."""
    from matplotlib.figure import Figure

    methods = script("methods")
    for name, expected in (("ntk", 4.0), ("pi", 4.0), ("yarn", 4.0)):
        left, right = Figure().subplots(1, 2)
        cls = next(cls for cls in methods.list_methods() if cls.name == name)
        methods.draw_frequencies(methods.example(cls), left, right)
        assert left.lines[0].get_ydata()[-1] == pytest.approx(expected)


def test_the_command_line_reference_is_current() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_reference.page(), "run python tools/cli_reference.py"


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} in {page}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{path}#{anchor} in {page}"


def test_every_figure_is_shown_on_a_page() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.png", "*.svg"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shown = {
        (page.parent / path).resolve()
        for page in MARKDOWN
        for path, _ in LINK.findall(page.read_text(encoding="utf-8"))
    }
    figures = [ROOT / name for name in tracked.stdout.split() if (ROOT / name).exists()]
    assert len(figures) > 20
    assert [figure for figure in figures if figure not in shown] == []


def test_the_pairs_of_the_concepts_page_are_those_of_the_formula() -> None:
    turns = rotations(RopeGeometry.plain(128, 10_000.0, 4096))
    never = [pair for pair, each in enumerate(turns.tolist()) if each < 1]
    page = " ".join((DOCS / "concepts.md").read_text(encoding="utf-8").split())
    assert f"these are {len(never)} of {len(turns)} pairs, from pair {never[0]} on" in page


def test_the_calculators_links_lead_to_files() -> None:
    page = DOCS / "calculator" / "index.html"
    links = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page.read_text(encoding="utf-8"))
    assert len(links) > 6
    assert [link for link in links if not (page.parent / link).is_file()] == []


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Every link and anchor holds there too, and every page is in the navigation."""
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install 'ctxext[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = ("index.html", "methods/yarn.html", "calculator/index.html", "calculator/known.js", "api.html")
    pages += ("notebooks/extend_a_model.html", "notebooks/extend_a_model/extend_a_model_3_0.png")
    for name in pages:
        assert (tmp_path / name).is_file(), name
    assert "extend_context" in (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    calculator = (tmp_path / "calculator" / "index.html").read_text(encoding="utf-8")
    for link in re.findall(r'href="(\.\./[^"]+)"', calculator):
        assert (tmp_path / "calculator" / link).is_file(), link
    left = re.findall(r'href="(?:\.\./)+(?:ctxext|tests|benchmarks)/', (tmp_path / "engines.html").read_text())
    assert left == []
