"""The README on a package index: no link leads nowhere."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from public_links import LINK, with_public_links

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"!\[[^\]]*\]\((.+?)\)", README)


def test_links_and_pictures_are_absolute_once_the_repository_has_an_address() -> None:
    shown = with_public_links(README, "https://example.org/ctxext")
    assert LINK.findall(shown) == []
    assert PICTURES
    for picture in PICTURES:
        assert f"](https://example.org/ctxext/raw/main/{picture})" in shown
    assert "](https://example.org/ctxext/blob/main/CONTRIBUTING.md#add-a-method)" in shown


def test_links_are_their_words_before() -> None:
    shown = with_public_links(README, "")
    assert LINK.findall(shown) == []
    assert not any(picture in shown for picture in PICTURES)
    address = "[YaRN](https://arxiv.org/abs/2309.00071)"
    assert with_public_links(address, "") == address


def test_brackets_in_words_and_code_are_left() -> None:
    assert (
        with_public_links("[a [b] c](docs/x.md#y) `[code](no.md)`", "R")
        == "[a [b] c](R/blob/main/docs/x.md#y) `[code](no.md)`"
    )


@pytest.mark.slow
def test_wheel_and_sdist_are_whole(tmp_path: Path) -> None:
    """The wheel has the recipes and the bundled model, and both a description that a package index renders."""
    build = pytest.importorskip("build", reason="needs build and twine: pip install build hatchling twine")
    checks = pytest.importorskip("twine.commands.check")
    sdist = build.ProjectBuilder(ROOT).build("sdist", tmp_path)
    wheel = build.ProjectBuilder(ROOT).build("wheel", tmp_path)
    assert not checks.check([sdist, wheel])
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "assets/austen-4m/model.safetensors",
        "recipes/finetune.py",
        "models/checkpoints.toml",
        "evals/report.html",
    ):
        assert f"ctxext/{name}" in names
    assert not [name for name in names if name.startswith(("docs", "tests", "tools", "hatch_build"))]
