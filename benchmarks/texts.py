"""Long texts of different kinds: the bundled novel, documentation packages of Debian, and Python's standard library.

`apt-get` and `dpkg` fetch the packages once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import html
import inspect
import re
import subprocess
import tarfile
from pathlib import Path

from ctxext.assets import PERSUASION

TEXTS = Path("runs/texts")
PACKAGES = ("anarchism", "debian-reference-en", "jargon-text")


def fetch(folder: Path = TEXTS) -> None:
    """Write a novel, an essay, a manual, a lexicon and code to `folder`, once."""
    if (folder / "code.txt").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive.name, "packages"], cwd=folder, check=True)
    documents = folder / "packages/usr/share"
    (folder / "novel.txt").write_text(PERSUASION.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "essay.txt").write_text(plain(documents / "doc/anarchism/html/secH3.html"), encoding="utf-8")
    for name, path in (
        ("manual", "debian-reference/debian-reference.en.txt.gz"),
        ("lexicon", "doc/jargon-text/jargon.txt.gz"),
    ):
        text = gzip.decompress((documents / path).read_bytes()).decode("utf-8", errors="replace")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    modules = (argparse, dataclasses, inspect, tarfile)
    code = "\n\n".join(Path(inspect.getfile(module)).read_text(encoding="utf-8") for module in modules)
    (folder / "code.txt").write_text(code, encoding="utf-8")


def plain(page: Path) -> str:
    """The text of an HTML page, its paragraphs apart."""
    text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", page.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"(?i)</?(p|h\d|li|br|div|tr)\b[^>]*>", "\n\n", text)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", html.unescape(re.sub(r"<[^>]+>", "", text)))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t\r]+", " ", text)).strip()
