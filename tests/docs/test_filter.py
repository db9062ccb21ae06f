"""docs/filter.js on the built site, in a real browser: rows, empty tables, three widths, light and dark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site's address on this machine."""
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install 'ctxext[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def open_page(site: str, browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of the site; an error of its scripts fails the test."""
    errors: list[str] = []
    contexts: list[Any] = []

    def opened(name: str, width: int = 1280, scheme: str = "light", scripts: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{site}/{name}")
        contexts.append(context)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def shown(page: Any) -> list[str]:
    """The first cell of every row below the box that is shown."""
    rows = "[...document.querySelectorAll('.table-filter ~ * tbody tr')].filter(row => row.checkVisibility())"
    return page.evaluate(f"{rows}.map(row => row.cells[0].textContent)")


def test_rows_with_every_word_are_shown_and_sections_without_one_are_hidden(open_page: Callable[..., Any]) -> None:
    page = open_page("families.html")
    box = page.get_by_role("searchbox", name="Filter the rows")
    assert "llama" in shown(page)
    box.fill("GEMMA3 causal")
    assert {name.startswith("gemma3") for name in shown(page)} == {True}
    assert {"gemma3", "gemma3_text"} <= {*shown(page)}
    assert page.inner_text(".table-filter output") == f"{len(shown(page))} of 611 rows"
    assert not page.locator("#learned").is_visible()
    assert page.locator("#rope").is_visible()
    box.fill("no model is called so")
    assert shown(page) == []
    box.fill("")
    assert page.locator("#learned").is_visible()
    assert page.inner_text(".table-filter output") == ""


@pytest.mark.parametrize("name", ["engines.html", "engine_evidence.html"])
def test_the_tables_of_engines_have_it_too(open_page: Callable[..., Any], name: str) -> None:
    page = open_page(name)
    every = len(shown(page))
    page.get_by_role("searchbox", name="Filter the rows").fill("yarn")
    assert 0 < len(shown(page)) < every


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (768, "light"), (1280, "light"), (1280, "dark")])
def test_it_fits_the_screen_and_stays_in_view(open_page: Callable[..., Any], width: int, scheme: str) -> None:
    page = open_page("families.html", width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.mouse.wheel(0, 9000)
    page.wait_for_function("scrollY > 5000")
    box, header = page.locator(".table-filter").bounding_box(), page.locator("header").bounding_box()
    assert header["y"] + header["height"] <= box["y"] + 1 < 300
    dark = page.evaluate("getComputedStyle(document.querySelector('.table-filter')).backgroundColor")
    assert (max(map(float, dark[dark.index("(") + 1 : -1].split(",")[:3])) < 60) == (scheme == "dark")


def test_without_scripts_there_is_no_box_and_every_row(open_page: Callable[..., Any]) -> None:
    page = open_page("engines.html", scripts=False)
    assert not page.locator(".table-filter").is_visible()
    assert page.locator("tbody tr").first.is_visible()
